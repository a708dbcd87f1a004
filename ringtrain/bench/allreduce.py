"""``ringtrain bench allreduce``: one float32 tensor, summed in place; ours, the peers, and a memcpy of the same bytes.

On one host also ``exchange``: the ranks hand each other the same bytes by plain copies, and do nothing else.

``adasum`` among the peers is ours with another reduction. ``operation`` names another collective (``collectives``).

Up to 64 KB a repetition is a round of operations back to back, as both ranks then submit together without a barrier's
skew in the figure; above, it is one operation after a barrier. With ``pause`` it is one operation at any size, for which
all ranks come at one time out of other work.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import ringtrain as rt
from ringtrain.bench import machine, ranks, report
from ringtrain.bench.collectives import COLLECTIVES, MemcpyMoves, RingtrainMoves
from ringtrain.bench.collectives import PEERS as MOVING_PEERS
from ringtrain.bench.command import bytes_text
from ringtrain.bench.plain_allreduce import PlainAllreduce
from ringtrain.bench.systems import PEERS, Memcpy, Ringtrain, System
from ringtrain.bench.turns import Pause, time_in_turn, time_of
from ringtrain.errors import UnsupportedError

BACK_TO_BACK_BYTES = 64 << 10
Turn = Callable[[System, np.ndarray, np.ndarray], list[float]]  # what a system does with a tensor, and its times
PAUSED_REPETITIONS = 200
ROUND = 20  # operations back to back; sums of 20 stay exact powers and within float32
MEMORY_OPERATIONS = 10


def run(
    sizes: Sequence[int],
    peers: Sequence[str],
    algorithms: Sequence[str],
    operation: str,
    pause: float,
    repetitions: int | None,
    json: str | None,
) -> bool:
    """Runs the benchmark on this rank; returns whether every system's results were right."""
    results: list[dict[str, Any]] = []
    memory: dict[str, list[int]] = {}
    turn = _PausedTurn(pause / 1e3) if pause else None
    for index, algorithm in enumerate(algorithms):
        ours = _ours(operation, algorithm)
        if operation == "allreduce":  # the others' results are tensors that they make
            memory[ours.name] = _memory_growth(ours, max(sizes))
        systems = [ours, *_open_peers(operation, peers if index == 0 else ()), *_floors(operation)]
        for size_bytes in sizes:
            times = _repetitions_for(size_bytes) if turn is None else PAUSED_REPETITIONS
            measured = _measure(operation, systems, size_bytes, repetitions or times, turn or turn_for(size_bytes))
            results += [{**result, "pause_seconds": pause / 1e3} for result in measured]
        for system in systems:
            system.close()
    _print(operation, pause, results, memory, max(sizes))
    report.write_json(json, results, memory_growth_bytes=memory)
    return all(result["verified"] for result in results)


def _ours(operation: str, algorithm: str) -> System:
    return Ringtrain(algorithm) if operation == "allreduce" else RingtrainMoves(COLLECTIVES[operation], algorithm)


def _floors(operation: str) -> list[System]:
    if operation != "allreduce":
        return [MemcpyMoves(COLLECTIVES[operation])]
    return [Memcpy(), PlainAllreduce()] if rt.size() == rt.local_size() > 1 else [Memcpy()]


def _open_peers(operation: str, names: Sequence[str]) -> list[System]:
    systems = []
    for name in names:
        try:
            systems.append(_peer(operation, name))
        except ImportError as problem:
            report.say(f"{name}: left out, {problem}. Run: pip install torch")
    return systems


def _peer(operation: str, name: str) -> System:
    if operation == "allreduce":
        return PEERS[name]()
    if name not in MOVING_PEERS:
        raise UnsupportedError(f"peer '{name}': it has an allreduce, but no {operation}. Leave it out.")
    return MOVING_PEERS[name](COLLECTIVES[operation])


def _repetitions_for(size_bytes: int) -> int:
    """Enough for a steady median, few enough for large tensors to end soon; even the floor takes 0.1 s for 1 GB."""
    return int(np.clip((1 << 30) // max(size_bytes, 1), 7, 50))


# ---- measuring ----


def _measure(
    operation: str, systems: Sequence[System], size_bytes: int, repetitions: int, time_turn: Turn
) -> list[dict[str, Any]]:
    work, source = arrays(_input_bytes(operation, size_bytes))
    for system in systems:
        system.use(work)
    verified = {system.name: verify(system, work, source) for system in systems}
    timed = {system.name: partial(time_turn, system, work, source) for system in systems}
    seconds = time_in_turn(timed, repetitions)
    floor = float(np.median(seconds["memcpy"]))
    return [
        report.result(
            name, operation, times, verified[name],
            bytes=size_bytes, ratio_to_memcpy=float(np.median(times)) / floor,
        )
        for name, times in seconds.items()
    ]  # fmt: skip


def _input_bytes(operation: str, size_bytes: int) -> int:
    """What a rank puts into an operation of about this size: numbers that can be dealt evenly to all ranks."""
    if operation == "allreduce":
        return size_bytes
    share = COLLECTIVES[operation].puts_in(ranks.size())
    each = max(size_bytes // 4 // ranks.size(), 1)
    return round(each * ranks.size() * share) * 4


def arrays(size_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """The array to work on, and this rank's values for it: small integers, whose sums float32 holds exactly."""
    count = max(size_bytes // 4, 1)
    source = (np.arange(count, dtype=np.int32) % 61 + ranks.rank()).astype(np.float32)
    return source.copy(), source


def verify(system: System, work: np.ndarray, source: np.ndarray) -> bool:
    """Whether the system's results are right on every rank."""
    np.copyto(work, source)
    ranks.wait_for_all()
    system.run()
    return ranks.all_true(system.is_right(Inputs(source)))


class Inputs(Sequence[np.ndarray]):
    """What all ranks have put in, by rank: made when it is asked for, since all together may not fit into memory."""

    def __init__(self, mine: np.ndarray):
        self._mine = mine

    def __len__(self) -> int:
        return ranks.size()

    def __getitem__(self, rank: Any) -> Any:
        if rank not in range(ranks.size()):
            raise IndexError(rank)
        return self._mine + np.float32(rank - ranks.rank())


def turn_for(size_bytes: int) -> Turn:
    """What a system does in its turn with a tensor of this size."""
    return _time_round if size_bytes <= BACK_TO_BACK_BYTES else _time_one


def _time_one(system: System, work: np.ndarray, source: np.ndarray) -> list[float]:
    np.copyto(work, source)
    return [time_of(system.run)]


def _time_round(system: System, work: np.ndarray, source: np.ndarray) -> list[float]:
    np.copyto(work, source)
    ranks.wait_for_all()
    seconds = []
    for _ in range(ROUND):
        start = time.perf_counter()
        system.run()
        seconds.append(time.perf_counter() - start)
    return seconds


class _PausedTurn:
    """One operation, for which all ranks come at one time out of other work."""

    def __init__(self, seconds: float):
        self._pause = Pause(seconds)

    def __call__(self, system: System, work: np.ndarray, source: np.ndarray) -> list[float]:
        np.copyto(work, source)
        self._pause.compute()
        start = time.perf_counter()
        system.run()
        return [time.perf_counter() - start]


def _memory_growth(system: System, size_bytes: int) -> list[int]:
    """Growth of each rank's proportional set from before its first operation to after ten of the largest size."""
    work, source = arrays(size_bytes)
    del source  # freed later, it would hide as much growth
    system.use(work)
    ranks.wait_for_all()
    before = machine.proportional_set_bytes()
    for _ in range(MEMORY_OPERATIONS):
        system.run()
    ranks.wait_for_all()
    growth = machine.proportional_set_bytes() - before
    ranks.wait_for_all()  # a rank that went on would change what the others share
    return ranks.gathered(growth)


# ---- saying ----


def _print(
    operation: str, pause: float, results: Sequence[dict[str, Any]], memory: dict[str, list[int]], largest: int
) -> None:
    facts = machine.describe()
    kind = "allreduce, float32, sum, in place" if operation == "allreduce" else f"{operation}, float32"
    report.say(
        f"{kind}{f', after {pause:g} ms of other work' if pause else ''}, "
        f"{ranks.size()} ranks on {facts['cores']} cores ({facts['processor']})"
    )
    medians = {(result["system"], result["bytes"]): result["seconds_median"] for result in results}
    rows = [_row(result, medians) for result in results]
    report.print_table(["size", "system", "median", "fastest", "x memcpy", "x ours", "result"], rows)
    for name, growth in memory.items():
        largest_text = bytes_text(largest)
        per_rank = ", ".join(f"{bytes_ / (1 << 20):.1f}" for bytes_ in growth)
        report.say(f"memory of {name} beyond the tensors after ten of {largest_text}: {per_rank} MB (each rank)")


def _row(result: dict[str, Any], medians: dict[tuple[str, int], float]) -> list[str]:
    ours = next(
        seconds for (name, size), seconds in medians.items() if name.startswith("ringtrain") and size == result["bytes"]
    )
    return [
        bytes_text(result["bytes"]),
        result["system"],
        report.seconds_text(result["seconds_median"]),
        report.seconds_text(result["seconds_min"]),
        f"{result['ratio_to_memcpy']:.2f}",
        f"{result['seconds_median'] / ours:.2f}",
        report.verdict(result),
    ]
