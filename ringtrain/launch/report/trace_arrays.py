"""Traces of ranks as arrays of their operations: what the core's timeline has written, read by NumPy.

An event is a line that the core has formatted, so spans are never parsed as JSON: NumPy finds their digits, all at once,
some ten times as fast.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

STAGES = ("pack", "wire", "reduce", "unpack")
PARTS = ("operation", "negotiate", "queue", *STAGES, "wait")
OPERATION, NEGOTIATE, QUEUE, WAIT = (PARTS.index(name) for name in ("operation", "negotiate", "queue", "wait"))
FIRST_STAGE = PARTS.index(STAGES[0])
# How the names of events begin, of 8 bytes; whatever else is an operation.
NAMES = {
    b"NEGOTIAT": NEGOTIATE,
    b'QUEUE","': QUEUE,
    b"MEMCPY_I": PARTS.index("pack"),
    b"MEMCPY_O": PARTS.index("unpack"),
    b'REDUCE",': PARTS.index("reduce"),
    b'WAIT","c': WAIT,
}
SPAN = b'{"ph":"X","name":"'
FIELDS = 5  # of a span: rank, track, begin, duration, bytes
POWERS = 10 ** np.arange(19)
FURTHER_TRACK = re.compile(r" \(\d+\)$")
ENOUGH_FOR_PROCESSES = 64 << 20  # bytes of all files


@dataclass
class RankTrace:
    """What one rank has done, one element for each operation in the order in which they ended; times in microseconds.

    Attributes:
        rank: whose it is.
        names: of tensors, by their numbers.
        tensor: int64, numbers of tensors.
        submitted, agreed, started, ended: float64; NaN if there was no such moment.
        stages: float64 of shape (operations, stages, 2), begin and end of each; NaN if there was none.
        size_bytes: int64, of this rank's contribution.
        waits: float64 of shape (waits, 2), when a thread of the program waited for an operation.
        dropped: spans that the trace had no room for.
        host: its name; "" if the trace does not say.
    """

    rank: int
    names: list[str]
    tensor: np.ndarray
    submitted: np.ndarray
    agreed: np.ndarray
    started: np.ndarray
    ended: np.ndarray
    stages: np.ndarray
    size_bytes: np.ndarray
    waits: np.ndarray
    dropped: int
    host: str = ""

    def moved(self, microseconds: float) -> RankTrace:
        """The same by a clock that shows so much less."""
        for times in (self.submitted, self.agreed, self.started, self.ended, self.stages, self.waits):
            times -= microseconds
        return self


def read(files: Sequence[Path]) -> list[RankTrace]:
    """The traces in these files, each of one rank or merged, by rank.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is no trace of ours, or two have the same rank.
    """
    processes = min(len(os.sched_getaffinity(0)), len(files))
    if processes > 1 and sum(file.stat().st_size for file in files) > ENOUGH_FOR_PROCESSES:
        with ProcessPoolExecutor(processes) as pool:
            found = list(pool.map(read_file, files))
    else:
        found = list(map(read_file, files))
    by_rank: dict[int, tuple[Path, RankTrace]] = {}
    for file, traces in zip(files, found, strict=True):
        for trace in traces:
            if trace.rank in by_rank:
                raise ValueError(
                    f"{file}: expected one trace of rank {trace.rank}, but {by_rank[trace.rank][0]} has another. "
                    "Name traces of one job, and a merged trace without those that it is made of."
                )
            by_rank[trace.rank] = file, trace
    return [by_rank[rank][1] for rank in sorted(by_rank)]


def read_file(file: Path) -> list[RankTrace]:
    """The traces in one file."""
    try:
        return parse(file.read_bytes())
    except ValueError as problem:
        raise ValueError(f"{file}: {problem}. Is it a trace of ringtrain?") from None


def parse(text: bytes) -> list[RankTrace]:
    """The traces in what the core's timeline, or ``timelines.merge``, has written; pure.

    Raises:
        ValueError: it is something else.
    """
    letters, starts, others = _lines(text)
    kinds, numbers = _kinds(letters, starts), _numbers(letters, starts)
    tracks, dropped, hosts = _described(others)
    found = []
    for rank in sorted({rank for rank, _ in tracks} | set(np.unique(numbers[:, 0]).tolist())):
        mine = numbers[:, 0] == rank
        trace = _of_rank(rank, kinds[mine], numbers[mine], _tensors(tracks, rank), dropped.get(rank, 0))
        trace.host = hosts.get(rank, "")
        found.append(trace)
    return found


def _lines(text: bytes) -> tuple[np.ndarray, np.ndarray, list[bytes]]:
    """All letters, where in them the spans begin, and the other events."""
    letters = np.frombuffer(text, np.uint8)
    starts = np.concatenate(([0], np.flatnonzero(letters == ord("\n")) + 1))
    begins = np.concatenate((letters, np.zeros(len(SPAN), np.uint8)))[starts[:, None] + np.arange(len(SPAN))]
    is_span = (begins == np.frombuffer(SPAN, np.uint8)).all(axis=1)
    others = []
    for number in np.flatnonzero(~is_span).tolist():
        end = starts[number + 1] if number + 1 < len(starts) else len(text)
        other = text[starts[number] : end].strip(b" ,\r\n")
        if other in (b"", b"[", b"]"):
            continue
        if not other.startswith(b"{") or not other.endswith(b"}"):
            found = other[:80].decode(errors="replace")
            raise ValueError(f"expected one event in line {number + 1}, but found {found!r}")
        others.append(other)
    return letters, starts[is_span], others


def _kinds(letters: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Which part of an operation's way each span is: int8, numbers in ``PARTS``."""
    words = letters[(starts + len(SPAN))[:, None] + np.arange(8)].view("S8")[:, 0]
    kinds = np.full(len(starts), OPERATION, np.int8)
    for name, kind in NAMES.items():
        kinds[words == name] = kind
    # Bytes between hosts are called by what MPI would call the operation.
    kinds[words.astype("S4") == b"MPI_"] = PARTS.index("wire")
    return kinds


def _numbers(letters: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Rank, track, begin and duration in nanoseconds, and bytes of each span: int64 of shape (spans, 5)."""
    if not len(starts):
        return np.zeros((0, FIELDS), np.int64)
    at = np.flatnonzero((letters - ord("0")) < 10)  # of uint8, where what is less than "0" is large
    gap = np.diff(at)
    begins = gap > 1
    begins[letters[at[1:] - 1] == ord(".")] = False  # a fraction, always of three digits
    first = np.concatenate(([0], np.flatnonzero(begins) + 1))
    after = np.append(first[1:], len(at))
    power = np.repeat(after, after - first) - np.arange(len(at)) - 1
    values = np.add.reduceat((letters[at] - ord("0")) * POWERS[np.minimum(power, len(POWERS) - 1)], first)
    span = np.searchsorted(starts, at[first], side="right") - 1
    field = np.arange(len(first)) - np.searchsorted(span, np.arange(len(starts)))[span]
    numbers = np.zeros((len(starts), FIELDS), np.int64)
    is_number = (span >= 0) & (at[first] < _ends(letters, starts)[span])
    if (field[is_number] >= FIELDS).any() or np.bincount(span[is_number], minlength=len(starts)).min(
        initial=FIELDS
    ) < 4:
        raise ValueError(f"expected 4 or {FIELDS} numbers in each span, but found others")
    numbers[span[is_number], field[is_number]] = values[is_number]
    return numbers


def _ends(letters: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Where the line of each span ends."""
    breaks = np.append(np.flatnonzero(letters == ord("\n")), len(letters))
    return breaks[np.searchsorted(breaks, starts)]


def _described(others: Iterable[bytes]) -> tuple[dict[tuple[int, int], str], dict[int, int], dict[int, str]]:
    """The names of tracks by rank and track, how many spans were dropped by rank, and the host of each rank."""
    tracks: dict[tuple[int, int], str] = {}
    dropped: dict[int, int] = {}
    hosts: dict[int, str] = {}
    for line in others:
        event = json.loads(line)
        if event.get("name") == "thread_name":
            tracks[event["pid"], event["tid"]] = event["args"]["name"]
        elif event.get("name") == "process_name":
            tracks.setdefault((event["pid"], 0), "")
        elif str(event.get("name", "")).endswith(" spans dropped"):
            dropped[event["pid"]] = int(event["name"].split()[0])
        elif event.get("name") == "process_labels":
            hosts[event["pid"]] = event["args"]["labels"].removeprefix("host ")
    return tracks, dropped, hosts


def _tensors(tracks: dict[tuple[int, int], str], rank: int) -> dict[int, str]:
    """Tensors by the number of the track; "x (2)" is a further track of "x", if there is one of that name."""
    own = {track: name for (of, track), name in tracks.items() if of == rank}
    names = set(own.values())
    first = {track: FURTHER_TRACK.sub("", name) for track, name in own.items()}
    return {track: first[track] if first[track] in names else name for track, name in own.items()}


def _of_rank(rank: int, kinds: np.ndarray, numbers: np.ndarray, tensors: dict[int, str], dropped: int) -> RankTrace:
    """Puts together what the core writes one after the other at the end of an operation."""
    names = sorted(set(tensors.values()))
    number_of = {name: number for number, name in enumerate(names)}
    by_track = np.full(max(tensors, default=0) + 2, -1)
    for track, name in tensors.items():
        by_track[track] = number_of[name]
    tensor = by_track[np.minimum(numbers[:, 1], len(by_track) - 1)]
    begin, end = numbers[:, 2] / 1e3, (numbers[:, 2] + numbers[:, 3]) / 1e3
    waiting = kinds == WAIT
    waits = np.stack([begin[waiting], end[waiting]], axis=1)
    of_operations = ~waiting
    kinds, tensor, begin, end = kinds[of_operations], tensor[of_operations], begin[of_operations], end[of_operations]
    owner = np.cumsum(kinds == OPERATION) - 1
    heads = np.flatnonzero(kinds == OPERATION)
    # A part whose operation was dropped stands behind another one's.
    belongs = (owner >= 0) & (tensor == tensor[heads[owner]]) if len(heads) else np.zeros(len(kinds), bool)

    def moments(part: int, values: np.ndarray) -> np.ndarray:
        chosen = belongs & (kinds == part)
        times = np.full(len(heads), np.nan)
        times[owner[chosen]] = values[chosen]
        return times

    stages = np.stack(
        [
            np.stack([moments(FIRST_STAGE + stage, begin), moments(FIRST_STAGE + stage, end)], axis=1)
            for stage in range(len(STAGES))
        ],
        axis=1,
    )
    return RankTrace(
        rank=rank,
        names=names,
        tensor=tensor[heads],
        submitted=begin[heads].copy(),
        agreed=moments(NEGOTIATE, end),
        started=moments(QUEUE, end),
        ended=end[heads].copy(),
        stages=stages,
        size_bytes=numbers[of_operations, 4][heads],
        waits=waits,
        dropped=dropped,
    )
