"""What the ranks of a job with faults have noted, step by step, and what follows from it. Pure, but for `Notes` and `Reader`.

A rank appends a record of fixed size to a file of its own when it draws the samples of a step, and when it has applied one.
What a killed process has written stays written, and all clocks are the machine's monotonic one.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

DRAWN, APPLIED = 0, 1
# The world is a number that rises from membership to membership; the index is that of the sample that was drawn.
RECORD = np.dtype(
    [
        ("seconds", "f8"), ("step", "i8"), ("world", "i8"), ("index", "i8"),
        ("kind", "i4"), ("pid", "i4"), ("slot", "i4"), ("rank", "i4"), ("size", "i4"), ("unused", "i4"),
    ]
)  # fmt: skip


class Notes:
    """Where one rank notes.

    Args:
        folder: of the job.
        slot: what stays of a rank when it is started again.
    """

    def __init__(self, folder: Path, slot: int):
        self._file = os.open(folder / f"notes-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._slot = slot

    def add(self, kind: int, seconds: float, step: int, world: int, rank: int, size: int, index: int = -1) -> None:
        """Appends a record, by one call of the kernel's."""
        row = np.array((seconds, step, world, index, kind, os.getpid(), self._slot, rank, size, 0), RECORD)
        os.write(self._file, row.tobytes())


class Reader:
    """Reads what has been added to the notes of a folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes of each file
        self._records = np.zeros(0, RECORD)

    def records(self) -> np.ndarray:
        """All records until now, of each rank in order."""
        found = [self._records]
        for path in sorted(self._folder.glob("notes-*")):
            begin = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(begin)
                data = file.read()
            whole = len(data) // RECORD.itemsize * RECORD.itemsize
            self._read[path] = begin + whole
            found.append(np.frombuffer(data[:whole], RECORD))
        self._records = np.concatenate(found)
        return self._records


class Member(NamedTuple):
    """A rank as it was when it was last heard of."""

    pid: int
    slot: int
    rank: int
    world: int


def newest_world(records: np.ndarray) -> list[Member]:
    """The ranks that have applied a step in the newest world, by rank; [] unless all of it have."""
    applied = records[records["kind"] == APPLIED]
    if not len(applied):
        return []
    rows = applied[applied["world"] == applied["world"].max()]
    last = {int(row["pid"]): row for row in rows}
    members = [Member(pid, int(row["slot"]), int(row["rank"]), int(row["world"])) for pid, row in last.items()]
    return sorted(members, key=lambda each: each.rank) if len(members) == int(rows["size"][-1]) else []


def next_step(records: np.ndarray, fault: float, world: int, most: int) -> float | None:
    """When the first step was applied that is beyond all before a fault, by a world that has not met it.

    Args:
        fault: when it struck.
        world: that it struck.
        most: ranks that there can be without those who were struck.
    """
    applied = records[records["kind"] == APPLIED]
    before = applied["step"][applied["seconds"] <= fault]
    beyond = applied[(applied["seconds"] > fault) & (applied["world"] > world) & (applied["size"] <= most)]
    beyond = beyond[beyond["step"] > (before.max() if len(before) else 0)]
    return float(beyond["seconds"].min()) if len(beyond) else None


def recomputed(records: np.ndarray) -> int:
    """Steps that a slot has applied more than once."""
    applied = records[records["kind"] == APPLIED]
    times = Counter(zip(applied["slot"].tolist(), applied["step"].tolist(), strict=True))
    return len({step for (_, step), count in times.items() if count > 1})


def missing(records: np.ndarray) -> int:
    """Steps before the last one that nobody has applied."""
    steps = np.unique(records["step"][records["kind"] == APPLIED])
    return int(steps[-1] - steps[0] + 1 - len(steps)) if len(steps) else 0


def first_applied(records: np.ndarray) -> np.ndarray:
    """Of each step the record with which it was applied first, in order of the steps."""
    applied = np.sort(records[records["kind"] == APPLIED], order=["step", "seconds"])
    return applied[np.unique(applied["step"], return_index=True)[1]]


def stalls_of_joiners(records: np.ndarray) -> list[float]:
    """Seconds that the others missed, beyond a step as usual, each time that ranks joined.

    The time from the last step without them to the first with them, as rank 0 has it, less the median step of the world
    before.
    """
    rows = np.sort(records[(records["kind"] == APPLIED) & (records["rank"] == 0)], order="seconds")
    stalls = []
    for place in np.flatnonzero((rows["size"][1:] > rows["size"][:-1]) & (rows["pid"][1:] == rows["pid"][:-1])):
        before = rows[: place + 1][rows["world"][: place + 1] == rows["world"][place]]
        if len(before) > 2:
            usual = float(np.median(np.diff(before["seconds"])))
            stalls.append(float(rows["seconds"][place + 1] - rows["seconds"][place]) - usual)
    return stalls


class Goodput(NamedTuple):
    """What a job has done of what it could have done.

    Attributes:
        steps: share of the steps that would have been made without faults, by any number of ranks.
        of_all: share of the batches that all slots would have computed without faults.
        of_alive: share of those that the slots would have computed while they had a rank that could train.
        recomputed: steps that were made twice.
    """

    steps: float
    of_all: float
    of_alive: float
    recomputed: int


def goodput(
    records: np.ndarray, begin: float, faults: Sequence[tuple[float, int]], end: float, slots: int
) -> Goodput | None:
    """What was done between the first moment of faults and the end; None without steps before.

    A step counts once, with as many batches as ranks were in it. The rate is that of the same job before ``begin``: batches
    a second and slot. A slot counts as alive but from its fault until its new rank draws its first sample.

    Args:
        begin: of the time that counts; before it there are steps without faults.
        faults: time and slot of each.
        end: of that time.
        slots: that the job has.
    """
    done = first_applied(records)
    calm = done[(done["seconds"] <= begin) & (done["size"] == slots)]
    if len(calm) < 3:
        return None
    step_seconds = float(calm["seconds"][-1] - calm["seconds"][0]) / (len(calm) - 1)
    counted = done[(done["seconds"] > begin) & (done["seconds"] <= end)]
    possible = (end - begin) / step_seconds
    dead = sum(min(_back(records, moment, slot), end) - moment for moment, slot in faults if moment < end)
    alive = slots - dead / (end - begin)
    batches = float(counted["size"].sum())
    return Goodput(
        steps=len(counted) / possible,
        of_all=batches / (possible * slots),
        of_alive=batches / (possible * alive),
        recomputed=recomputed(records),
    )


def _back(records: np.ndarray, moment: float, slot: int) -> float:
    """When a slot had a rank again."""
    gone = set(records["pid"][(records["slot"] == slot) & (records["seconds"] <= moment)].tolist())
    fresh = records[(records["slot"] == slot) & (records["seconds"] > moment)]
    fresh = fresh[~np.isin(fresh["pid"], list(gone))]
    return float(fresh["seconds"].min()) if len(fresh) else float("inf")


def plan_of(records: np.ndarray) -> list[list[int]]:
    """By step, the samples whose gradients are in it, in the order of the ranks: what a planned run must be given.

    A rank that has died in a step without having applied it contributed unless its sample was dealt again later.
    """
    seniority = _by_seniority(records)
    drawn = records[records["kind"] == DRAWN]
    draws = Counter(drawn["index"].tolist())
    applied = {(int(row["pid"]), int(row["step"])) for row in records[records["kind"] == APPLIED]}
    plan: dict[int, dict[int, int]] = {step: {} for step in sorted({step for _, step in applied})}
    for row in drawn:
        pid, step, index = int(row["pid"]), int(row["step"]), int(row["index"])
        if step in plan and ((pid, step) in applied or draws[index] == 1):
            plan[step][pid] = index
    return [[index for _, index in sorted(by.items(), key=lambda each: seniority[each[0]])] for by in plan.values()]


def _by_seniority(records: np.ndarray) -> dict[int, tuple[int, int]]:
    """What orders processes as the ranks of any world are ordered: who was there earlier stands before."""
    first: dict[int, tuple[int, int]] = {}
    for row in records[records["kind"] == DRAWN]:
        first.setdefault(int(row["pid"]), (int(row["world"]), int(row["rank"])))
    return first
