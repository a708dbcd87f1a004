"""Reaches the hosts of a job: starts the agent on each (see `agent`) and speaks with it. Used by `preflight` and `job`."""

from __future__ import annotations

import json
import os
import re
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ringtrain.launch.agent import START_MARK
from ringtrain.launch.clocks import HostClock
from ringtrain.launch.hosts import Host

AGENT_PROGRAM = Path(__file__).with_name("agent.py")
SECONDS_TO_CONNECT = 10
# What ssh says -> the reason in our words, and what to do.
SSH_REASONS = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED",
     "its host key has changed since it was last seen", "If that is expected, forget the old key: ssh-keygen -R {host}"),
    (r"Host key verification failed", "its host key is not the one that is known",
     "If that is expected, forget the old key: ssh-keygen -R {host}"),
    (r"Permission denied", "it accepts no key of this user, and a launcher cannot type a password",
     "Make a key once with ssh-keygen and take it there: ssh-copy-id {host}"),
    (r"Could not resolve hostname|Name or service not known", "its name cannot be resolved",
     "Check the spelling, or add it to /etc/hosts"),
    (r"Connection refused", "nothing listens on its ssh port", "Start sshd there, or name its port: --ssh-port"),
    (r"Connection timed out|No route to host|Network is unreachable|Operation timed out", "it does not answer",
     "Check that it is up and that no firewall is between"),
    (r"Identity file \S+ not accessible", "the identity file cannot be read", "Check --ssh-identity-file"),
    (r"(python\S*: (not found|No such file)|No such file or directory)", f"there is no Python at {sys.executable} there",
     "Make the environment at the same path on each host, or share it"),
)  # fmt: skip


class HostError(RuntimeError):
    """A host that cannot be used: its name, the reason, and what to do."""


@dataclass(frozen=True)
class Ssh:
    """How ssh is called: never with a prompt, never trusting a changed key."""

    port: int | None = None
    identity_file: str | None = None

    @property
    def options(self) -> list[str]:
        """The options, for the agents and for the engine's own daemons alike."""
        line = ["-x", "-T", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new",
                "-o", f"ConnectTimeout={SECONDS_TO_CONNECT}",
                "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]  # fmt: skip
        line += ["-p", str(self.port)] if self.port else []
        return line + (["-i", self.identity_file] if self.identity_file else [])

    def command_line(self, host: str, *command: str) -> list[str]:
        """Runs a command on a host, by way of the shell there."""
        return ["ssh", *self.options, "--", host, shlex.join(command)]

    def reproduce(self, host: str) -> str:
        """What a person types to see the same failure."""
        return shlex.join(["ssh", *self.options, host, "true"])


class Agent:
    """The launcher's end of the agent on one host."""

    def __init__(self, host: Host, shell: Ssh | SrunShell):
        self.host = host
        self.shell = shell
        self.clock = HostClock()
        source = AGENT_PROGRAM.read_bytes()
        if host.is_here:
            line = [sys.executable, "-I", "-S", str(AGENT_PROGRAM)]
        else:
            # Read through a buffer of one byte, so that no request behind the source is swallowed.
            load = f"import io;exec(io.BufferedReader(io.FileIO(0,closefd=False),1).read({len(source)}))"
            line = shell.command_line(host.name, sys.executable, "-I", "-S", "-c", load)
        # A session of its own: Ctrl-C reaches the launcher alone.
        self.process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        start_new_session=True)
        os.set_blocking(self.process.stdout.fileno(), False)
        os.set_blocking(self.process.stderr.fileno(), False)
        self.words = b""  # of ssh or of Python, on stderr
        self.is_open = True
        self._pending = b""
        self._has_started = False
        if not host.is_here:
            self._write(source)

    def send(self, **request: object) -> None:
        """Sends a request; one that has gone gets none."""
        self._write(json.dumps(request).encode() + b"\n")

    def ask(self, deadline: float, **request: object) -> dict:
        """Sends a request and waits for its answer until the deadline (time.monotonic).

        Raises HostError if the host cannot be reached, or does not answer in time.
        """
        self.send(**request)
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                for facts, _ in self.news():
                    return facts
                if not self.is_open:
                    raise self._failure()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise HostError(self._text("it gave no answer within the start timeout",
                                               "Raise --start-timeout if it is slow"))
                selector.select(left)

    def news(self) -> Iterator[tuple[dict, bytes]]:
        """What the agent has sent by now: facts, and the bytes behind them. Sets is_open to False at the end."""
        self._read()
        data, at = self._pending, 0
        try:
            while (end := data.find(b"\n", at)) >= 0:
                if not self._has_started:
                    self._has_started = data[at:end].endswith(START_MARK[:-1])
                    at = end + 1
                    continue
                facts = json.loads(data[at:end])
                size = facts.get("bytes", 0)
                if len(data) < end + 1 + size:
                    return
                at = end + 1 + size
                yield facts, data[end + 1:at]
        finally:
            self._pending = data[at:]

    def hear_words(self) -> None:
        """Takes what ssh or the agent's Python says."""
        try:
            self.words = (self.words + (self.process.stderr.read() or b""))[-10000:]
        except ValueError:  # closed
            pass

    def close(self) -> None:
        """Hangs up: the agent ends its ranks, if there are any left, and leaves."""
        try:
            self.process.stdin.close()
        except OSError:
            pass

    def give_up(self) -> None:
        """Ends ssh, so that whoever waits for an answer waits no longer."""
        self.process.kill()

    def _read(self) -> None:
        while self.is_open:
            try:
                data = os.read(self.process.stdout.fileno(), 1 << 18)
            except BlockingIOError:
                return
            self.is_open = data != b""
            self._pending += data
            if len(self._pending) > 1 << 20:
                return

    def _write(self, data: bytes) -> None:
        try:
            self.process.stdin.write(data)
            self.process.stdin.flush()
        except (OSError, ValueError):  # it is gone, as the end of its stdout will tell
            pass

    def _failure(self) -> HostError:
        self.process.wait()
        self.hear_words()
        said = self.words.decode(errors="replace").strip()
        for pattern, reason, advice in SSH_REASONS:
            if re.search(pattern, said):
                return HostError(self._text(reason, advice.format(host=self.host.name), said.splitlines()[-1]))
        return HostError(self._text(f"the connection ended with code {self.process.returncode}", "See its words",
                                    said[-500:]))

    def _text(self, reason: str, advice: str, said: str = "") -> str:
        quoted = f" ({said})" if said else ""
        return (f"host '{self.host.name}': it must run a command without a prompt, but {reason}{quoted}. {advice}. "
                f"To see it: {self.shell.reproduce(self.host.name)}")


@dataclass(frozen=True)
class SrunShell:
    """Runs the agents inside a Slurm allocation, beside the job's own step."""

    program: str

    def command_line(self, host: str, *command: str) -> list[str]:
        """Runs a command on a host of the allocation."""
        return [self.program, "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--cpu-bind=none", *command]

    def reproduce(self, host: str) -> str:
        """What a person types to see the same failure."""
        return shlex.join(self.command_line(host, "true"))
