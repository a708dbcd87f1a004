"""Starts the ranks of a host where no engine does: a supervisor for each (see `rank`), which the agent is the parent of."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess

from ringtrain.launch.agent.processes import SECONDS_TO_DIE

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringtrain.agent_protocol import Start
    from ringtrain.launch.agent.link import Launcher

CANNOT_START = 125  # code of a supervisor that never was


class Supervisors:
    """The supervisors that this agent has started.

    selector: the agent's, whose entries have a function as data. hear_out: takes what the supervisor of a rank has said
    before its end, so that its end is told last.
    """

    def __init__(self, launcher: Launcher, selector: selectors.BaseSelector, hear_out: Callable[[int], None]):
        self.launcher = launcher
        self.selector = selector
        self.hear_out = hear_out
        self.running: dict[int, subprocess.Popen] = {}  # by rank
        self.uids: dict[int, str] = {}  # of these, in an elastic job
        self.dismissed: set[str] = set()  # uids of those that leave before the training has come to its end
        self.has_finished = False  # some program has come to its end
        self.untold: list[tuple[int, int]] = []  # (rank, code) of those whose end no launcher was told
        self.words: set[int] = set()  # descriptors from which their words are read, one for each request
        self.is_watching = False  # for ends

    def start(self, request: Start) -> None:
        """Starts the ranks of a request: all of the host, or one that follows another in its slot."""
        ranks = {request["first"] + place: place for place in request.get("only", range(request["count"]))}
        try:
            self._watch_ends()
            words, write_end = os.pipe()
        except OSError as error:
            for rank in ranks:
                self._tell_why_not(rank, error)
            return
        os.set_blocking(words, False)
        self.words.add(words)
        self.selector.register(words, selectors.EVENT_READ, self.pass_words_on)
        without = tuple(request["without"])
        environment = {name: value for name, value in os.environ.items() if not name.startswith(without)}
        for rank, place in ranks.items():
            variables = {"RANK": rank, "SIZE": request["size"], "LOCAL_RANK": place, "LOCAL_SIZE": request["count"]}
            named = {f"RINGTRAIN_{name}": str(value) for name, value in variables.items()} | request.get(
                "variables", {}
            )
            try:
                self.running[rank] = subprocess.Popen(
                    request["line"],
                    env={**environment, **named},
                    stdin=subprocess.DEVNULL,
                    stdout=write_end,
                    stderr=write_end,
                )
                self.uids[rank] = request.get("uid", "")
            except OSError as error:
                self._tell_why_not(rank, error)
        os.close(write_end)

    def _tell_why_not(self, rank: int, error: OSError) -> None:
        why = f"cannot start rank {rank}: {error.strerror}. Give its host fewer slots, or raise its limits (ulimit -u, ulimit -n)."
        self.launcher.tell({"rank": -1, "words": f"ringtrainrun: {why}\n"})
        self.launcher.tell({"rank": rank, "supervisor": CANNOT_START})

    def reap(self) -> None:
        """Tells of supervisors that have ended."""
        for rank, process in list(self.running.items()):
            code = process.poll()
            if code is not None:
                del self.running[rank]
                self.hear_out(rank)
                self.pass_words_on()
                uid = self.uids.pop(rank, "")
                self.has_finished = self.has_finished or (code == 0 and uid not in self.dismissed)
                self.dismissed.discard(uid)
                if self.launcher.is_gone:
                    self.untold.append((rank, code))
                self.launcher.tell({"rank": rank, "supervisor": code})

    def kill(self) -> None:
        """Ends those that are left, which have been waited for."""
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits in the kernel
                process.wait(SECONDS_TO_DIE)

    def pass_words_on(self) -> None:
        """Passes on what they say beside the output of their ranks: why one cannot run."""
        for words in list(self.words):
            try:
                while said := os.read(words, 1 << 16):
                    self.launcher.tell({"rank": -1, "words": said.decode(errors="replace")})
            except BlockingIOError:
                continue
            self.words.remove(words)
            self.selector.unregister(words)
            os.close(words)

    def _watch_ends(self) -> None:
        """Has the selector wake up when a child has ended."""
        if self.is_watching:
            return
        wakeup, wakeup_write = os.pipe()
        self.is_watching = True
        for descriptor in (wakeup, wakeup_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

        def wake() -> None:
            os.read(wakeup, 4096)
            self.reap()

        self.selector.register(wakeup, selectors.EVENT_READ, wake)
