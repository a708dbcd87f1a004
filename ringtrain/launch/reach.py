"""Reaches the hosts of a job: starts the agent on each (see `agent`) and speaks with it. Used by `preflight` and `job`."""

from __future__ import annotations

import json
import os
import re
import secrets
import selectors
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringtrain._rendezvous.agent_protocol import Request
from ringtrain.launch.agent.link import MARK, edition
from ringtrain.launch.host_errors import (
    BUSY,
    NOT_THERE,
    SSH_NOTICE,
    SSH_REASONS,
    HostBusyError,
    HostError,
    HostNotThereError,
)
from ringtrain.launch.hosts import Host
from ringtrain.launch.known_ranks import HostClock
from ringtrain.launch.shells import Shell

AGENT_PROGRAM = Path(__file__).with_name("agent") / "__main__.py"
EDITION = edition()
# Kills the process group of each process whose command line has the two arguments as one.
END_BY_TOKEN = """\
import os, sys
for process in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            if "".join(sys.argv[1:]).encode() in file.read():
                os.killpg(os.getpgid(int(process)), 9)
    except OSError:
        pass
"""
COMES_TO_ITS_COMMAND = "ringtrain-comes-to-its-command"


class Agent:
    """The launcher's end of the agent on one host."""

    def __init__(self, host: Host, shell: Shell):
        self.host = host
        self.shell = shell
        self.clock = HostClock()
        self.awaited_for = ""  # why it was not there at the last try, if it is tried again
        self.open()

    def open(self) -> None:
        """Begins, or begins anew with a host that was not there."""
        self._token = secrets.token_hex(16)  # by which its shell is found if that comes to nothing
        line = [sys.executable, "-I", "-S", str(AGENT_PROGRAM), self._token]
        if not self.host.is_here:
            line = self.shell.command_line(self.host.name, *line)
        # A session of its own: Ctrl-C reaches the launcher alone.
        self.process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr  # as was asked for
        self.stdin, self.stdout, self.stderr = self.process.stdin, self.process.stdout, self.process.stderr
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)
        self.login_shell = ""  # of the user there, once that is known
        self.words = b""  # of ssh or of Python, on stderr
        self.fault = ""  # of the agent itself: its traceback, and that of its Python
        self.edition = EDITION  # of the package there
        self.is_open = True
        self._pending = bytearray()
        self._unsent = bytearray()  # what the pipe has had no room for
        self._sending = threading.Lock()
        self._has_started = False

    def send(self, request: Request) -> None:
        """Sends a request, by any thread, and without waiting: what the agent does not take goes with the next one.

        One that has gone gets none. One that has not come to its program yet gets it then: a start-up file might read it.
        """
        self._write(json.dumps(request).encode() + b"\n")

    def ask(self, deadline: float, request: Request) -> Any:
        """Sends a request and waits for its answer until the deadline (time.monotonic); which one, the request's type says.

        Raises HostError if the host cannot be reached, or does not answer in time.
        """
        self.send(request)
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout, selectors.EVENT_READ)
            while True:
                for facts, _ in self.news():
                    return facts
                if not self.is_open:
                    raise self._failure()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise HostNotThereError(
                        self._text(
                            "it gave no answer within the start timeout",
                            "Raise --start-timeout if it is slow; "
                            "a start-up file of the shell there may wait, read its input, or run another program",
                            self.last_words(),
                        )
                    )
                self._write(b"")
                if (self._has_started and bool(self._unsent)) != (self.stdin in selector.get_map()):
                    if self._unsent:
                        selector.register(self.stdin, selectors.EVENT_WRITE)
                    else:
                        selector.unregister(self.stdin)
                selector.select(left)

    def news(self) -> Iterator[tuple[Any, bytes]]:
        """What the agent has sent by now: facts, and the bytes behind them. Sets is_open to False at the end."""
        self._read()
        data, at = self._pending, 0
        try:
            while True:
                begin = data.find(MARK, at)
                if begin < 0:
                    at = max(at, len(data) - len(MARK) + 1)  # its end may hold the beginning of one
                    return
                at, end = begin, data.find(b"\n", begin)
                if end < 0:
                    return
                facts = self._facts_of(bytes(data[begin + len(MARK) : end]))
                size = facts.get("bytes", 0)
                if len(data) < end + 1 + size:
                    return
                at = end + 1 + size
                self._has_started = True
                if "edition" in facts:
                    self._note_edition(facts["edition"])
                elif facts and not self.fault:
                    yield facts, bytes(data[end + 1 : at])
        finally:
            del data[:at]

    def _facts_of(self, line: bytes) -> dict[str, Any]:
        """Those of a line, of which the agent's own fault is taken."""
        try:
            facts: dict[str, Any] = json.loads(line)
        except ValueError:  # a line of another program has come within it, and what it told is lost
            self.fault = "another program has written into what the agent there tells the launcher"
            self.give_up()
            return {}
        if "fault" in facts:
            self.fault = f"{facts['fault'].strip()} (Python {facts['python']})"
            return {}
        return facts

    def _note_edition(self, edition: str) -> None:
        """Of another one's agent no answer can be read."""
        self.edition = edition
        if edition != EDITION:
            self.fault = "another edition"
            self.give_up()

    def hear_words(self) -> None:
        """Takes what ssh or the agent's Python says."""
        try:
            self.words = (self.words + os.read(self.stderr.fileno(), 1 << 16))[-10000:]
        except (BlockingIOError, ValueError):  # nothing is there; closed
            pass

    def last_words(self) -> str:
        """The last line of what it has said until now, or of its fault; empty if nothing."""
        self.hear_words()
        said = (self.fault or self.words.decode(errors="replace")).strip().splitlines()
        return "".join([line for line in said if not SSH_NOTICE.match(line)][-1:])

    def close(self) -> None:
        """Hangs up: the agent ends its ranks, if there are any left, and leaves."""
        with self._sending:  # by a thread that would write into whatever has the descriptor's number next
            try:
                self.stdin.close()
            except OSError:
                pass

    def has_left(self, deadline: float) -> bool:
        """Whether it leaves until the deadline, after it was closed."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
            return True
        except subprocess.TimeoutExpired:
            return False

    def has_shell(self) -> bool:
        """Whether it may be stuck in a start-up file of the shell there."""
        return not (self._has_started or self.host.is_here) and bool(self.shell.on_terminal(self.host.name, ""))

    def end_shell(self) -> subprocess.Popen[bytes]:
        """Begins to end the shell there in whose start-up file this agent is stuck.

        Another shell on a terminal reads the same file. The terminal's quit key ends the program in which the file waits, and
        not the shell, which comes to its command then.
        """
        half = len(self._token) // 2
        kill = shlex.join([sys.executable, "-I", "-S", "-c", END_BY_TOKEN, self._token[:half], self._token[half:]])
        line = self.shell.on_terminal(self.host.name, f"trap '' QUIT; echo {COMES_TO_ITS_COMMAND}; exec {kill}")
        pipe = subprocess.PIPE
        return subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)

    def let_go(self) -> None:
        """Keeps nothing of one that is lost: neither its pipes nor its process."""
        self.close()
        self.stdout.close()
        self.stderr.close()
        self.process.kill()
        self.process.wait()

    def give_up(self) -> None:
        """Ends ssh, so that whoever waits for an answer waits no longer."""
        self.process.kill()

    def _read(self) -> None:
        while self.is_open:
            try:
                data = os.read(self.stdout.fileno(), 1 << 18)
            except BlockingIOError:
                return
            self.is_open = data != b""
            self._pending += data
            if len(self._pending) > 1 << 20:
                return

    def _write(self, data: bytes) -> None:
        with self._sending:
            self._unsent += data
            try:
                while self._unsent and self._has_started:
                    del self._unsent[: os.write(self.stdin.fileno(), self._unsent[: 1 << 16])]
            except BlockingIOError:
                pass
            except (OSError, ValueError):  # it is gone, as the end of its stdout will tell
                self._unsent.clear()

    def _failure(self) -> HostError:
        self.process.wait()
        self.hear_words()
        if self.edition != EDITION:
            return HostError(
                f"host '{self.host.name}': ringtrain must be the same as here, but is {self.edition} there and {EDITION} "
                "here. Install the same environment on every host, or share one."
            )
        if self.fault:
            return HostError(
                self._text(
                    "the agent there failed",
                    "Each host needs the same Python with the same packages. Please report what is not your host's fault",
                    self.last_words(),
                )
            )
        said = [
            line
            for line in self.words.decode(errors="replace").splitlines()
            if line.strip() and not SSH_NOTICE.match(line)
        ]
        for pattern, reason, advice in SSH_REASONS if not self._has_started else ():
            if meant := [line for line in said if re.search(pattern, line)]:
                kind = HostNotThereError if reason in NOT_THERE else HostBusyError if reason in BUSY else HostError
                return kind(self._text(reason, advice.format(host=self.host.name), meant[-1].strip()), reason)
        if not said and not self._has_started and self.process.returncode != 255:  # ssh's own
            return HostError(
                self._text(
                    f"its shell ended with code {self.process.returncode} before it ran anything",
                    "Let ~/.bashrc and its like not exit unless the shell is interactive",
                )
            )
        return HostError(
            self._text(
                f"the connection ended with code {self.process.returncode}",
                "See its words",
                " ".join(said)[-500:].strip(),
            )
        )

    def _text(self, reason: str, advice: str, said: str = "") -> str:
        quoted = f" ({said})" if said else ""
        return (
            f"host '{self.host.name}': it must run a command without a prompt, but {reason}{quoted}. {advice}. "
            f"To see it: {self.shell.reproduce(self.host.name)}"
        )
