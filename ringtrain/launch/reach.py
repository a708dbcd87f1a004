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
from ringtrain.launch.agent.processes import kill_group
from ringtrain.launch.clocks import HostClock
from ringtrain.launch.hosts import Host
from ringtrain.launch.shells import Shell

AGENT_PROGRAM = Path(__file__).with_name("agent") / "__main__.py"
PACKAGE = AGENT_PROGRAM.parents[2]
EDITION = edition()
SECONDS_TO_LEAVE = 2.0  # for agents whose job does not start
SECONDS_TO_END_SHELLS, SECONDS_BETWEEN_QUITS = 10.0, 0.1
SECONDS_BEFORE_QUIT = (
    0.1,
    1.0,
    2.0,
)  # of one shell after the other, for its login and the beginning of its start-up file
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
QUIT = b"\x1c"  # the key of a terminal
COMES_TO_ITS_COMMAND = "ringtrain-comes-to-its-command"
SESSION_HAS_ENDED = re.compile(rb"^Connection to \S+ closed", re.M)  # as ssh says of one on a terminal
# What ssh mentions and is no reason: a host that it meets for the first time, and a banner of its own.
SSH_NOTICE = re.compile(r"(Warning: Permanently added|Warning: No xauth data|\*\* |debug\d: |Connection to \S+ closed)")
# What ssh says -> the reason in our words, and what to do.
SSH_REASONS = (
    (r"can't open file", f"there is no ringtrain that it may read at {PACKAGE} there",
     "Install the same environment at the same path on each host, or share it"),
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED",
     "its host key has changed since it was last seen", "If that is expected, forget the old key: ssh-keygen -R {host}"),
    (r"Host key verification failed", "its host key is not the one that is known",
     "If that is expected, forget the old key: ssh-keygen -R {host}"),
    (r"Permission denied", "it accepts no key of this user, and a launcher cannot type a password",
     "Make a key once with ssh-keygen and take it there: ssh-copy-id {host}"),
    (r"Could not resolve hostname|Name or service not known", "its name cannot be resolved",
     "Check the spelling, or add it to /etc/hosts"),
    (r"(kex|ssh)_exchange_identification|banner exchange|Connection (reset|closed) by",
     "its sshd, or that of a host on the way, takes no more logins at a time", "Raise MaxStartups in its sshd_config"),
    (r"Connection refused", "nothing listens on its ssh port", "Start sshd there, or name its port: --ssh-port"),
    (r"Connection to \S+ port \d+ timed out",
     "it answers, but the login stops where packets become large", "See whether the path loses those, as with an MTU that "
     "nobody is told of: ping -c 1 -M do -s 1472 {host}"),
    (r"Connection timed out|No route to host|Network is unreachable|Operation timed out", "it does not answer",
     "Check that it is up and that no firewall is between"),
    (r"Identity file \S+ not accessible", "the identity file cannot be read", "Check --ssh-identity-file"),
    (r"(python\S*: (not found|No such file)|No such file or directory)", f"there is no Python at {sys.executable} there",
     "Make the environment at the same path on each host, or share it"),
)  # fmt: skip


# Of those, what a host says that is not up yet.
NOT_THERE = ("its name cannot be resolved", "nothing listens on its ssh port", "it does not answer")
BUSY = ("its sshd, or that of a host on the way, takes no more logins at a time",)


class HostError(RuntimeError):
    """A host that cannot be used: its name, the reason, and what to do.

    reason: that alone, if it is a known one.
    """

    def __init__(self, text: str, reason: str = ""):
        super().__init__(text)
        self.reason = reason


class HostNotThereError(HostError):
    """One that may come yet."""


class HostBusyError(HostError):
    """One that takes no more logins at the moment."""


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


def hang_up_on(agents: list[Agent]) -> list[str]:
    """Closes all agents of a job that does not start; whoever does not leave by itself, as an ssh that still connects, is ended.

    Returns a line for each host on which something stays for all that.
    """
    for agent in agents:
        agent.close()
    deadline = time.monotonic() + SECONDS_TO_LEAVE
    stuck = [agent for agent in agents if not agent.has_left(deadline)]
    for agent in stuck:
        kill_group(agent.process.pid)
        agent.process.wait()
    return [
        f"host '{name}': a start-up file of the shell there turns the shell into another program, as exec does, and one of these "
        "stays there until it ends. No command can be run there to end it: take the line out, and end it from the host's console."
        for name in end_shells(stuck)
    ]


def end_shells(agents: list[Agent]) -> list[str]:
    """Ends the shells of agents that have not come to their program: sshd leaves them where they wait.

    Returns the names of hosts where no shell comes to its command, as its start-up file ends with another program.
    """
    enders = [ShellEnder(agent) for agent in agents if agent.has_shell()]
    deadline = time.monotonic() + SECONDS_TO_END_SHELLS
    left = enders
    while left and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_QUITS)
        left = [ender for ender in left if ender.goes_on()]
    for ender in left:
        kill_group(ender.process.pid)
        ender.process.communicate()
    return [ender.agent.host.name for ender in enders if ender.meets_another_program]


class ShellEnder:
    """Ends the shell of an agent by other shells on terminals, one after the other: a quit key that comes too early ends one itself."""

    def __init__(self, agent: Agent):
        self.agent = agent
        self.tries = 0
        self.meets_another_program = False
        self._open()

    def _open(self) -> None:
        self.process = self.agent.end_shell()
        self._quit_at = time.monotonic() + SECONDS_BEFORE_QUIT[self.tries]
        self.tries += 1

    def goes_on(self) -> bool:
        """Sends the quit key, or begins anew; whether it is to be called again."""
        if self.process.poll() is None:
            if time.monotonic() >= self._quit_at:
                try:
                    os.write(self.process.stdin.fileno(), QUIT)  # type: ignore[union-attr]  # as was asked for
                except OSError:  # it has just ended
                    pass
            return True
        said, words = self.process.communicate()
        if COMES_TO_ITS_COMMAND.encode() in said or not SESSION_HAS_ENDED.search(words):
            return False
        if self.tries < len(SECONDS_BEFORE_QUIT):
            self._open()
            return True
        self.meets_another_program = True
        return False
