"""How each system runs a job of four ranks that goes on after failures: what it is started by, and who starts ranks again."""

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.jobs import Job
from ringtrain.errors import UnsupportedError

RANKS = 4
RESTARTS = 1_000_000  # as many as there are faults


class System(Protocol):
    """A job of one system.

    Attributes:
        name: in tables, and of the training.
        shrinks: whether it goes on with fewer ranks; else all are started again.
    """

    name: str
    shrinks: bool

    def start(self, training: Sequence[str]) -> None:
        """Starts the ranks, each of which runs this command."""

    def keep(self) -> None:
        """Starts ranks again that have died, where the system leaves that to others; called often."""


class Ringtrain:
    """Ours. A slot pauses for a second after a failure, however often it fails."""

    name = "ringtrain"
    shrinks = True

    def __init__(self, job: Job, folder: Path):
        self._start = _Starter(job, folder)

    def start(self, training: Sequence[str]) -> None:
        flags = ["--elastic", "-np", f"1:{RANKS}", "--blacklist-cooldown-range", "1", "1"]
        self._start("ringtrainrun", [sys.executable, "-m", "ringtrain.launch", *flags, *training])

    def keep(self) -> None:
        """The launcher does it."""


class Torchrun:
    """torchrun on one host, which starts all ranks again."""

    name = "torchrun"
    shrinks = False

    def __init__(self, job: Job, folder: Path):
        self._start = _Starter(job, folder)

    def start(self, training: Sequence[str]) -> None:
        flags = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", str(RESTARTS), "--no-python"]
        self._start("torchrun", [sys.executable, "-m", "torch.distributed.run", *flags, *training])

    def keep(self) -> None:
        """The agent does it."""


class Torchft:
    """TorchFT: each rank a replica group, one lighthouse; who has died is started again at once."""

    name = "torchft"
    shrinks = True

    def __init__(self, job: Job, folder: Path):
        found = importlib.util.find_spec("torchft")
        if found is None or found.origin is None:
            raise UnsupportedError("system 'torchft': it is not installed. Leave it out, or install torchft-nightly.")
        beside = Path(found.origin).parents[1] / "bin" / "torchft_lighthouse"  # as pip install --target has it
        self._lighthouse = beside if beside.exists() else Path(sys.executable).with_name("torchft_lighthouse")
        self._start = _Starter(job, folder)
        self._training: list[str] = []
        self._ranks: dict[int, subprocess.Popen] = {}

    def start(self, training: Sequence[str]) -> None:
        self._training = list(training)
        port = _free_port()
        self._address = f"http://localhost:{port}"
        flags = ["--bind", f"[::]:{port}", "--min_replicas", "1", "--join_timeout_ms", "10000"]
        self._start("lighthouse", [str(self._lighthouse), *flags])
        self.keep()

    def keep(self) -> None:
        for slot in range(RANKS):
            rank = self._ranks.get(slot)
            if rank is None or rank.poll():
                variables = {"TORCHFT_LIGHTHOUSE": self._address, "REPLICA_GROUP_ID": str(slot)}
                self._ranks[slot] = self._start(f"replica-{slot}", self._training, variables)


class _Starter:
    """Starts commands of a job, whose output goes to files of its folder."""

    def __init__(self, job: Job, folder: Path):
        self._job, self._folder = job, folder

    def __call__(self, name: str, line: Sequence[str], variables: dict[str, str] | None = None) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
        with (self._folder / f"said-{name}").open("ab") as said:
            return self._job.start(*line, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        return taken.getsockname()[1]


SYSTEMS: dict[str, type] = {each.name: each for each in (Ringtrain, Torchrun, Torchft)}
