"""An engine of the user's, as Slurm or Kubernetes is one: it starts an authority and processes, and knows nothing of worlds."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path

from environments import PATHS, python_with, rank_environment

from benchmarks.jobs import Job

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0  # for what takes a second or two, on a busy machine
AGAIN = '"$@" || "$@" || "$@"'  # what bash does with a process that has failed
ONCE = 'exec "$@"'


class Engine:
    """Processes of one job under watch. folder: for their output; flags: of the authority."""

    def __init__(self, job: Job, folder: Path, *flags: str):
        self.job, self.folder, self.flags = job, folder, flags
        self.secret = secrets.token_hex(32)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.state = folder / "state"
        self.said = folder / "authority"
        self.ranks: dict[int, subprocess.Popen] = {}
        self.authority = self.start_authority()

    def start_authority(self) -> subprocess.Popen:
        """Also one that goes on; returns when it listens."""
        line = (python_with("tcp"), "-m", "ringtrain.launch.commands", "authority", "--listen", self.address)
        before = self.said.read_text().count(" at 127.0.0.1:") if self.said.exists() else 0
        with self.said.open("a") as said:
            self.authority = self.job.start(*line, *self.flags, env=self.environment(), stdout=said, stderr=said)
        self.await_that(lambda: self.said.read_text().count(" at 127.0.0.1:") > before)
        return self.authority

    def environment(self, **variables: str) -> dict[str, str]:
        """What an engine gives to all that it starts."""
        given = {
            "RINGTRAIN_SECRET": self.secret,
            "RINGTRAIN_AUTHORITY": self.address,
            "PYTHONPATH": PATHS,
            "RINGTRAIN_TRANSPORT": "auto",
        }
        return rank_environment(PYTHONUNBUFFERED="1", **given, **variables)

    def start(self, number: int, *command: str | Path, loop: str = ONCE, **variables: str) -> subprocess.Popen:
        """A process by bash, with this number as its own name for itself."""
        line = ("bash", "-c", loop, "bash", python_with("tcp"), *command)
        environment = self.environment(RINGTRAIN_RANK=str(number), **variables)
        with self.output(number).open("a") as output:
            self.ranks[number] = self.job.start(*line, env=environment, stdout=output, stderr=subprocess.STDOUT)
        return self.ranks[number]

    def output(self, number: int) -> Path:
        """Where a process writes."""
        return self.folder / f"output-{number}"

    def pid(self, number: int) -> int:
        """Of a program that has written it."""
        return int((Path(self.job.temporary) / f"pid-{number}").read_text())

    def kill(self, number: int, with_signal: int = signal.SIGKILL) -> None:
        """Sends a signal to the program itself."""
        os.kill(self.pid(number), with_signal)

    def await_line(self, number: int, text: str, times: int = 1) -> None:
        """Returns when a process has written this so many times."""
        self.await_that(
            lambda: self.output(number).exists() and self.output(number).read_text().count(text) >= times, text
        )

    def await_that(self, holds: object, what: str = "") -> None:
        """Returns when it is true; fails with all that was said if it does not become so."""
        deadline = time.monotonic() + SECONDS
        while not holds():  # type: ignore[operator]
            if time.monotonic() > deadline:
                self.fail(what)
            time.sleep(0.02)

    def end(self, **codes: int) -> subprocess.CompletedProcess:
        """Waits until all have ended: the authority with code `authority`, a process with the code of r + its number; 0 as a rule.

        Returns what all have written, in the form of a launcher's output.
        """
        for number, process in self.ranks.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS)
            if process.returncode != codes.get(f"r{number}", 0):
                self.fail(f"{number}: {process.returncode}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.authority.wait(SECONDS)
        if self.authority.returncode != codes.get("authority", 0):
            self.fail(f"authority: {self.authority.returncode}")
        return subprocess.CompletedProcess([], 0, self.everything(), self.said.read_text())

    def fail(self, what: str) -> None:
        """With all that was said; nothing is waited for any more."""
        said = self.everything()
        for pid in self.job.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"{what}\n{said}")

    def everything(self) -> str:
        """What all have written, each line after its number."""
        outputs = {number: self.output(number).read_text() for number in self.ranks if self.output(number).exists()}
        lines = [f"[{number}] {line}" for number, output in outputs.items() for line in output.splitlines()]
        return "\n".join([*lines, self.said.read_text()]) + "\n"
