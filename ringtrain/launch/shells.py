"""How a command is run on another host: by ssh, or by srun within a Slurm allocation. Used by `plan`, `preflight` and `reach`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Protocol

SECONDS_TO_CONNECT = 10


class Shell(Protocol):
    """What runs a command on a host without a prompt."""

    def command_line(self, host: str, *command: str) -> list[str]:
        """Runs a command on a host."""
        ...

    def on_terminal(self, host: str, command: str) -> list[str]:
        """Runs a line of the shell there, on a terminal of its own; [] if start-up files do not matter there."""
        ...

    def reproduce(self, host: str) -> str:
        """What a person types to see the same failure."""
        ...


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
                "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
                # Of this user's configuration: no other session hangs on an agent's, nor an agent's on another one, which
                # notices late that the host is cut off; and no other command is run.
                "-o", "ControlMaster=no", "-o", "ControlPath=none", "-o", "ClearAllForwardings=yes",
                "-o", "RemoteCommand=none"]  # fmt: skip
        line += ["-p", str(self.port)] if self.port else []
        return line + (["-i", self.identity_file] if self.identity_file else [])

    def command_line(self, host: str, *command: str) -> list[str]:
        """Runs a command on a host, by way of the shell there."""
        return ["ssh", *self.options, "--", host, shlex.join(command)]

    def on_terminal(self, host: str, command: str) -> list[str]:
        """Runs a line of the shell there, on a terminal of its own; [] if start-up files do not matter there."""
        return ["ssh", *(each if each != "-T" else "-tt" for each in self.options), "--", host, command]

    def reproduce(self, host: str) -> str:
        """What a person types to see the same failure."""
        return shlex.join(["ssh", *self.options, host, "true"])


@dataclass(frozen=True)
class SrunShell:
    """Runs the agents inside a Slurm allocation, beside the job's own step."""

    program: str

    def command_line(self, host: str, *command: str) -> list[str]:
        """Runs a command on a host of the allocation."""
        return [self.program, "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--cpu-bind=none", *command]

    def on_terminal(self, host: str, command: str) -> list[str]:
        """Runs a line of the shell there, on a terminal of its own; [] if start-up files do not matter there."""
        return []

    def reproduce(self, host: str) -> str:
        """What a person types to see the same failure."""
        return shlex.join(self.command_line(host, "true"))
