"""What starts the ranks of a job, as `job` sees it: it starts them all, is gone when they have ended, and says its words.

`Program` is the MPI's own program, or srun; `agents` has the engine of jobs without MPI.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import stat
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ringtrain._rendezvous.agent_protocol import RankNews
from ringtrain.launch.agent.processes import kill_group
from ringtrain.launch.output import EngineStream
from ringtrain.launch.reach import Agent


class Engine(Protocol):
    """Starts the ranks of a job on all its hosts.

    Attributes:
        name: for people.
        line: the command line by which ranks are started.
        ends_ranks: whether it ends ranks by itself, so that one whose supervisor is gone may have been ended by it.
        good_end: what a rank does that leaves well, for people.
    """

    name: str
    line: Sequence[str]
    ends_ranks: bool
    good_end: str

    def start(self, selector: selectors.BaseSelector) -> None:
        """Starts all ranks; what it has to hear of from then on it registers with the selector."""
        ...

    def start_anew(self, selector: selectors.BaseSelector) -> None:
        """Starts all ranks once more, after it has ended without having started any, and `finish` was called."""
        ...

    def hear(self, facts: RankNews, agent: Agent) -> None:
        """Takes what the agent of a host tells of a rank."""
        ...

    @property
    def code(self) -> int | None:
        """Its exit code once it is gone, as it is when all ranks have ended; None before."""
        ...

    def kill(self) -> None:
        """Ends it at once, if it is there."""
        ...

    def finish(self) -> None:
        """Passes on what it has said last, without waiting for processes that keep its pipes open. Called once it was killed."""
        ...


class Program:
    """An engine that is a program of its own on this host: an MPI's mpirun, or srun.

    words: where its stdout (1) and stderr (2) go.
    folder_of: the name of the folder for temporary files that the program with a process id makes; "" if it makes none.
    """

    ends_ranks = True
    good_end = "ending MPI"

    def __init__(
        self,
        name: str,
        line: Sequence[str],
        environment: Mapping[str, str],
        words: Mapping[int, EngineStream],
        folder_of: Callable[[int], str],
    ):
        self.name = name
        self.line = line
        self._environment = environment
        self._words = words
        self._folder_of = folder_of
        self._process: subprocess.Popen[bytes] | None = None  # until it is started
        self._streams: dict[int, EngineStream] = {}  # by descriptor, until their end

    def start(self, selector: selectors.BaseSelector) -> None:
        """Starts the program."""
        # A session of its own: Ctrl-C reaches the launcher alone, which then ends the ranks in order.
        self._process = process = subprocess.Popen(
            self.line,
            env=dict(self._environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout and process.stderr  # as was asked for

        def hear(descriptor: int) -> None:
            self._read(descriptor)
            if descriptor not in self._streams:
                selector.unregister(descriptor)

        for number, pipe in ((1, process.stdout), (2, process.stderr)):
            os.set_blocking(pipe.fileno(), False)
            self._streams[pipe.fileno()] = self._words[number]
            selector.register(pipe, selectors.EVENT_READ, lambda pipe=pipe: hear(pipe.fileno()))

    def start_anew(self, selector: selectors.BaseSelector) -> None:
        """Starts the program once more, after `finish`."""
        for pipe in filter(None, (self._process.stdout, self._process.stderr) if self._process else ()):
            with contextlib.suppress(KeyError):  # at its end it was taken out
                selector.unregister(pipe)
        self.start(selector)

    def hear(self, facts: RankNews, agent: Agent) -> None:
        """Needs to hear nothing: it is told of its ranks by daemons of its own."""

    @property
    def code(self) -> int | None:
        """The program's exit code, -n for signal n; None while it runs."""
        return self._process.poll() if self._process else None

    def kill(self) -> None:
        """Kills the program, and what it has started in its session."""
        if self._process and self._process.poll() is None:
            kill_group(self._process.pid)

    def finish(self) -> None:
        """Waits for the program's end, passes on what it has said last, and removes what it has left in TMPDIR."""
        if self._process:
            self._process.wait()
            self._remove_folder(self._process.pid)
        for descriptor in list(self._streams):
            while self._read(descriptor):
                pass
        for stream in self._streams.values():
            stream.close()

    def _remove_folder(self, process: int) -> None:
        """A program that was killed, or that loses a rank before MPI_Init, leaves its folder. A link is none of its making."""
        if not (name := self._folder_of(process)):
            return
        path = os.path.join(self._environment.get("TMPDIR") or "/tmp", name)
        with contextlib.suppress(OSError):
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)

    def _read(self, descriptor: int) -> bool:
        """Reads once; False at the end of the stream or if nothing is there."""
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return False
        if data:
            self._streams[descriptor].feed(data)
            return True
        self._streams.pop(descriptor).close()
        return False
