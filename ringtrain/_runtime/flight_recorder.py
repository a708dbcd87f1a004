"""The last operations of each rank: ``flight_record``, and what a rank has left in a file.

The core remembers what a rank has submitted, and writes it down as JSON when its world ends by an error, or an operation
waits for too long (option ``flight_record``). Reading is here; ``ringtrain flight`` compares
(``launch/flight_comparison.py``).
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain._binding._native import lib, take_answer
from ringtrain._runtime.context import Context, current
from ringtrain._runtime.rank_lists import ranks_text
from ringtrain.errors import InvalidArgumentError

FORMAT = 2  # that of flight_record.cc
ROWS_MAY_DIFFER = ("allgather", "alltoall")  # in the first dimension
PENDING, OK, REFUSED = "pending", "ok", "invalid_argument"
MOST_HOSTS = 4  # that are named beside ranks
_FILE = re.compile(r"flight\.(\d+)\.json")


class Flown(NamedTuple):
    """One operation of a rank. Times are seconds since 1970, None for what has not come.

    Attributes:
        number: among this rank's submissions, from 1.
        process_set: its id; 0 is the world.
        agreed: its place among the data operations of the process set, from 1, equal on all members; 0 for one that has not
            been agreed on, or has no data.
        operation: ``allreduce`` and so on.
        name: as it was submitted; only the end, behind dots, of a very long one.
        dtype: of the first tensor; None without data.
        shape: of the first tensor; None for extents behind the sixth.
        tensors: how many they are.
        bytes: of all of them.
        reduction, root: None where the operation has none.
        submitted: when this rank submitted it.
        announced: when the coordinator was told.
        started: when all had submitted it.
        finished: when it ended, well or not; with tensors on a GPU when all was on its queue.
        status: ``ok``, ``pending``, or how it failed: ``mismatch``, ``timeout``, ``peer_lost``, ``closed`` and so on.
    """

    number: int
    process_set: int
    agreed: int
    operation: str
    name: str
    dtype: str | None
    shape: tuple[int | None, ...]
    tensors: int
    bytes: int
    reduction: str | None
    root: int | None
    submitted: float
    announced: float | None
    started: float | None
    finished: float | None
    status: str

    @property
    def subject(self) -> str:
        """``allreduce 'x'``."""
        return f"{self.operation} '{self.name}'"

    @property
    def is_open(self) -> bool:
        """Whether not all members have come to it, as far as this rank knows."""
        return not self.agreed and self.status != OK

    @property
    def form(self) -> str:
        """What all members must have alike, for people to read: ``float32[3], sum``."""
        shape = ["?" if extent is None else str(extent) for extent in self.shape]
        if self.operation in ROWS_MAY_DIFFER and shape:
            shape[0] = "*"
        parts = [f"{self.dtype}[{', '.join(shape)}]"] if self.dtype else []
        parts += [f"{self.tensors} tensors"] if self.tensors > 1 else []
        parts += [self.reduction] if self.reduction else []
        parts += [f"root {self.root}"] if self.root is not None else []
        return ", ".join([self.operation, *parts])


class FlightRecord(NamedTuple):
    """What one rank remembers.

    Attributes:
        world: drawn for each world, so that files of another one are told apart.
        rank, size, host, process: whose it is.
        hosts: the ranks of each host of the world, by its name.
        written: seconds since 1970.
        because: why it was written; "" if the program asked for it.
        process_sets: the members of each, by id.
        operations: by their numbers: those that are pending, and the last ones that have ended.
    """

    world: int
    rank: int
    size: int
    host: str
    hosts: dict[str, tuple[int, ...]]
    process: int
    written: float
    because: str
    process_sets: dict[int, tuple[int, ...]]
    operations: tuple[Flown, ...]

    def __str__(self) -> str:
        """A line for each operation, the newest last."""
        return "\n".join([f"rank {self.rank} of {self.size} on {self.host}", *map(self._line, self.operations)])

    def _line(self, each: Flown) -> str:
        place = f"#{each.agreed}" if each.agreed else "-"
        where = "" if each.process_set == 0 else f"  process set {each.process_set}"
        seconds = self.written - each.submitted
        return f"  {seconds:10.3f} s ago  {place:>8}  {each.status:<9} {each.subject}  {each.form}{where}"


def flight_record() -> FlightRecord:
    """The operations that this rank has pending, and the last ``flight_operations`` that have ended.

    Example:
        >>> print(rt.flight_record())
        rank 0 of 1 on node-1
               0.001 s ago        #1  ok        allreduce 'loss'  allreduce, float32[3], average
    """
    return parse(record_of(current()), "flight_record")


def record_of(context: Context) -> str:
    """The text of ``rt_flight_record``."""
    return take_answer(lib.rt_flight_record(context.native))


def parse(text: str, source: str) -> FlightRecord:
    """A record that the core has written; pure. source: what it is called in an error.

    Raises:
        InvalidArgumentError: it is something else.
    """
    try:
        content = json.loads(text)
        if (format_ := content.pop("format")) != FORMAT:
            raise ValueError(f"its format is {format_}")
        sets = {int(number): tuple(members) for number, members in content["process_sets"].items()}
        operations = tuple(_flown(each) for each in content["operations"])
        hosts = {name: tuple(ranks) for name, ranks in content["hosts"].items()}
        return FlightRecord(**{**content, "hosts": hosts, "process_sets": sets, "operations": operations})
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise InvalidArgumentError(
            f"{source}: it must be a flight record of format {FORMAT}, but is not: {problem}. Name the folder that "
            "flight_record named in the job."
        ) from None


def _flown(content: Mapping[str, Any]) -> Flown:
    return Flown(**{**content, "shape": tuple(content["shape"])})


def read(folder: str | os.PathLike) -> list[FlightRecord]:
    """The records in a folder, by rank; those of every world that has left one.

    Raises:
        OSError: the folder or a file cannot be read.
        InvalidArgumentError: there is none, or a file is none.
    """
    files = [file for file in Path(folder).iterdir() if _FILE.fullmatch(file.name)]
    if not files:
        raise InvalidArgumentError(
            f"{folder}: there must be files flight.RANK.json, but is none. Each rank leaves one there if the job has "
            "RINGTRAIN_FLIGHT_RECORD (or ringtrainrun --flight-record) set to it, and its world ends by an error or an "
            "operation waits for too long."
        )
    records = [parse(file.read_text(encoding="utf-8", errors="replace"), str(file)) for file in files]
    return sorted(records, key=lambda record: record.rank)


# ---- the comparison ----


def placed(ranks: Sequence[int], hosts: Mapping[str, Sequence[int]]) -> str:
    """``ranks 1, 4 (hosts node-b, node-c)``; without hosts if all ranks of the world are on one, or these on many."""
    found = [name for name, own in hosts.items() if not set(own).isdisjoint(ranks)]
    if len(hosts) < 2 or not 0 < len(found) <= MOST_HOSTS:
        return ranks_text(ranks)
    return f"{ranks_text(ranks)} ({'host' if len(found) == 1 else 'hosts'} {', '.join(found)})"
