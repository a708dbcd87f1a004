"""One job of `python -m benchmarks faults --elastic`: it is started, struck again and again, and brought to its end."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from benchmarks.elastic_records import Member, Reader, newest_world, next_step, plan_of
from benchmarks.elastic_systems import RANKS, System
from benchmarks.faults import has_ended
from benchmarks.jobs import Job

Found = TypeVar("Found")
LOOK_SECONDS = 0.1  # times are those that ranks note
SECONDS_TO_BE_WHOLE = 300.0  # on a busy machine four ranks import torch for a minute
SECONDS_TO_GO_ON = 120.0
SECONDS_TO_REPLAY = 3600.0
STEPS_BEFORE_A_FAULT = 5  # in a world that has all ranks
STEPS_TO_THE_END = 30  # which no rank has begun yet when it is told which step is the last


class Trial:
    """A job that trains until it is told to end.

    Args:
        system: that runs it.
        job: under whose watch.
        folder: where ranks note, and all is said.
        size_bytes, pace_seconds, checkpoint_steps: those of `elastic_training.Job`.
    """

    def __init__(
        self, system: System, job: Job, folder: Path, size_bytes: int, pace_seconds: float, checkpoint_steps: int
    ):
        self.system, self.job, self.folder = system, job, folder
        self._settings = ["--bytes", str(size_bytes), "--checkpoint-steps", str(checkpoint_steps)]
        self._pace = ["--pace-seconds", str(pace_seconds)]
        self._reader = Reader(folder)

    def start(self) -> None:
        """Starts the ranks."""
        self.system.start([*training_line(self.system.name, self.folder), *self._settings, *self._pace])

    def records(self) -> np.ndarray:
        """All that was noted until now; has dead ranks started again on the way."""
        self.system.keep()
        return self._reader.records()

    def whole_world(self) -> list[Member]:
        """The ranks, if all are in one world that has made some steps; else []."""
        records = self.records()
        members = newest_world(records)
        if len(members) < RANKS or any(has_ended(each.pid) for each in members):
            return []
        steps = np.unique(records["step"][records["world"] == members[0].world])
        return members if len(steps) > STEPS_BEFORE_A_FAULT else []

    def await_whole_world(self) -> list[Member]:
        """Waits until all ranks train together. Raises TimeoutError with what was said, if they do not."""
        members = self._await(self.whole_world, SECONDS_TO_BE_WHOLE)
        if not members:
            raise TimeoutError(
                f"faults: {self.system.name}: after {SECONDS_TO_BE_WHOLE:g} s there were no {RANKS} ranks that train "
                f"together. The last that was said:\n{self.said()}"
            )
        return members

    def await_next_step(self, fault: float, struck: Sequence[Member]) -> float:
        """Seconds from a fault until training goes on without those who were struck; inf if it does not."""
        most = RANKS - len(struck) if self.system.shrinks else RANKS
        moment = self._await(
            lambda: next_step(self.records(), fault, struck[0].world, most), fault + SECONDS_TO_GO_ON - time.monotonic()
        )
        return float("inf") if moment is None else moment - fault

    def end(self) -> set[str]:
        """Has the ranks end after the same step; returns the digests of what they have come to.

        Raises TimeoutError with what was said, if they do not end.
        """
        members = self.await_whole_world()
        newest = int(self.records()["step"].max())
        whole = self.folder / ".last"
        whole.write_text(str(newest + STEPS_TO_THE_END))
        whole.rename(self.folder / "last")
        ends = [self.folder / f"end-{each.pid}" for each in members]
        if not self._await(lambda: all(end.exists() for end in ends), SECONDS_TO_BE_WHOLE):
            raise TimeoutError(f"faults: {self.system.name}: ranks do not end. The last that was said:\n{self.said()}")
        return {end.read_text() for end in ends}

    def planned(self) -> str:
        """The digest that a job of a fixed size comes to, with the samples and ranks of each step that this one has had.

        Raises RuntimeError with what was said, if it fails.
        """
        place = self.folder / "plan"
        place.mkdir()
        (place / "plan.json").write_text(json.dumps(plan_of(self.records())))
        line = [sys.executable, "-m", "ringtrain.launch", "--transport", "tcp", "-np", str(RANKS)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = self.job.run(
            *line, *training_line("plan", place), *self._settings, seconds=SECONDS_TO_REPLAY, env=environment
        )
        digests = {end.read_text() for end in place.glob("end-*")}
        if done.returncode != 0 or len(digests) != 1:
            raise RuntimeError(f"faults: the planned run failed with {done.returncode}:\n{done.stderr[-2000:]}")
        return digests.pop()

    def said(self) -> str:
        """The last lines of all output."""
        texts = [path.read_text(errors="replace").splitlines()[-15:] for path in sorted(self.folder.glob("said-*"))]
        return "\n".join(line for text in texts for line in text)

    def _await(self, condition: Callable[[], Found], seconds: float) -> Found:
        deadline = time.monotonic() + seconds
        while not (found := condition()) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        return found


def training_line(system: str, folder: Path) -> list[str]:
    """The command of one rank."""
    return [sys.executable, "-m", "benchmarks.elastic_training", system, str(folder)]
