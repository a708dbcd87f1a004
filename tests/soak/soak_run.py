"""One rank of the soak: random operations with random process sets and joins, all results compared with NumPy's.

    ringtrainrun -np 4 python tests/soak/soak_run.py SECONDS SEED [PLANT]

Every rank draws the same rounds from the seed and knows what the others hold. After a warm-up neither memory, nor
shared memory, nor descriptors, nor threads of the rank may grow. Prints what it measured; exits with 1 where something
grew. PLANT is a leak on purpose, one of PLANTS: tests/soak/test_soak.py wants to see it found.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import ringtrain as rt
from ringtrain._binding._native import lib

# The longer of the two: a share of the time, and so many rounds, whatever the machine does besides.
WARM_UP, WARM_UP_ROUNDS, MEASURED_ROUNDS = 1 / 3, 60, 120
# Of a rank after its warm-up. What malloc and Python have given out is exact; what the kernel counts has holes in it,
# which random sizes widen for a while. A descriptor or two may be open at the moment of looking; a leak opens one a
# round.
MOST_GROWTH = {
    "in use MB": 0.5,
    "Python blocks": 5000,
    "own MB": 32.0,
    "shared MB": 8.0,
    "segment MB": 1.0,
    "descriptors": 8,
    "threads": 4,
}


class AllocatorUse(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class Kind(NamedTuple):
    """An operation: how a rank submits its array, and what a member gets of all members' arrays."""

    submit: Callable[..., rt.Handle]  # (array, name, members, process set)
    expected: Callable[[list[np.ndarray], int], list[np.ndarray]]  # (arrays by member, member)


def parts(array: np.ndarray, members: int) -> list[np.ndarray]:
    """Equal runs of rows, one for each member."""
    return np.split(array, members)


KINDS = {
    "allreduce": Kind(
        lambda mine, name, members, among: rt.allreduce_async(mine, name, op=rt.Sum, process_set=among),
        lambda of, me: [np.sum(of, axis=0)],
    ),
    "group": Kind(
        lambda mine, name, members, among: rt.grouped_allreduce_async(
            [mine, mine + 1], name, op=rt.Max, process_set=among
        ),
        lambda of, me: [np.max(of, axis=0), np.max(of, axis=0) + 1],
    ),
    "allgather": Kind(
        lambda mine, name, members, among: rt.allgather_async(mine, name, process_set=among),
        lambda of, me: [np.concatenate(of)],
    ),
    "broadcast": Kind(
        lambda mine, name, members, among: rt.broadcast_async(mine, members[-1], name, process_set=among),
        lambda of, me: [of[-1]],
    ),
    "alltoall": Kind(
        lambda mine, name, members, among: rt.alltoall_async(mine, None, name, process_set=among),
        lambda of, me: [np.concatenate([parts(array, len(of))[me] for array in of])],
    ),
    "reducescatter": Kind(
        lambda mine, name, members, among: rt.reducescatter_async(mine, name, op=rt.Sum, process_set=among),
        lambda of, me: [parts(np.sum(of, axis=0), len(of))[me]],
    ),
}
kept: list[Any] = []  # by a plant
PLANTS: dict[str, Callable[[np.ndarray, rt.Handle], None]] = {
    "arrays": lambda mine, handle: kept.append(mine),
    "handles": lambda mine, handle: kept.append(handle),
    "descriptors": lambda mine, handle: kept.append(os.dup(0)),
}


def usage() -> dict[str, float]:
    """What this process holds now."""
    gc.collect()
    lib.rt_trim()  # what is kept for results differs by their sizes
    with open("/proc/self/status") as status:
        kilobytes = {
            line.split()[0]: int(line.split()[1]) for line in status if line.startswith(("RssAnon", "RssShmem"))
        }
    descriptors = os.listdir("/proc/self/fd")
    return {
        "in use MB": allocated_bytes() / 2**20,
        "Python blocks": sys.getallocatedblocks(),
        "own MB": kilobytes["RssAnon:"] / 1024,
        "shared MB": kilobytes["RssShmem:"] / 1024,
        "segment MB": segment_megabytes(descriptors),
        "descriptors": len(descriptors),
        "threads": len(os.listdir("/proc/self/task")),
    }


def allocated_bytes() -> int:
    """What malloc has given out and not got back; 0 where it does not tell (glibc before 2.33)."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = AllocatorUse
    use = mallinfo()
    return use.uordblks + use.hblkhd


def segment_megabytes(descriptors: list[str]) -> float:
    """What the files in /dev/shm that this process has open take of it; their names are gone from there."""
    paths = [f"/proc/self/fd/{descriptor}" for descriptor in descriptors]
    return (
        sum(
            os.stat(path).st_blocks * 512
            for path in paths
            if os.path.islink(path) and os.readlink(path).startswith("/dev/shm/")
        )
        / 2**20
    )


def values(seed: int, number: int, rank: int, shape: tuple[int, ...]) -> np.ndarray:
    """What a rank holds in an operation: small whole numbers, so that float32 sums are exact in any order."""
    return np.random.default_rng([seed, number, rank]).integers(-8, 9, shape).astype(np.float32)


def run_round(seed: int, number: int, plant: Callable[[np.ndarray, rt.Handle], None] | None) -> None:
    """Up to twelve operations of a random process set, submitted in an order of each rank's own; now and then a join behind them."""
    random = np.random.default_rng([seed, number])
    everyone = list(range(rt.size()))
    drawn = sorted(random.permutation(everyone)[: random.integers(2, rt.size() + 1)].tolist())
    members = everyone if random.random() < 0.5 else drawn
    process_set = rt.global_process_set if members == everyone else rt.add_process_set(members)
    kinds = random.choice(list(KINDS), random.integers(1, 13)).tolist()
    shapes = [(len(members) * int(random.integers(1, 12)), int(random.choice([1, 7, 300, 5000]))) for _ in kinds]
    joins = random.random() < 0.1
    if rt.rank() in members:
        handles = {}
        for place in np.random.default_rng([seed, number, rt.rank(), 1]).permutation(len(kinds)):
            mine = values(seed, 100 * number + place, rt.rank(), shapes[place])
            handles[place] = KINDS[kinds[place]].submit(mine, f"{kinds[place]}.{place}", members, process_set)
            if plant:
                plant(mine, handles[place])
        for place, handle in handles.items():
            of = [values(seed, 100 * number + place, rank, shapes[place]) for rank in members]
            expected = KINDS[kinds[place]].expected(of, members.index(rt.rank()))
            check(rt.synchronize(handle), expected, f"round {number}: {kinds[place]} (seed {seed})")
    if joins:
        end_unevenly(f"round {number} (seed {seed})")
    if process_set is not rt.global_process_set:
        rt.remove_process_set(process_set)


def check(found: Any, expected: list[np.ndarray], what: str) -> None:
    """Compares the results of an operation, of which alltoall has the splits as a second one."""
    results = list(found[: len(expected)]) if isinstance(found, (list, tuple)) else [found]
    assert len(results) == len(expected) and all(map(np.array_equal, results, expected)), f"{what} differs from NumPy's"


def end_unevenly(what: str) -> None:
    """Joins; the higher ranks have more to do."""
    for batch in range(rt.rank()):
        total = rt.allreduce(np.ones(64, np.float32), f"uneven.{batch}", op=rt.Sum)
        check(total, [np.full(64, rt.size() - 1 - batch, np.float32)], f"{what}: an allreduce beside joined ranks")
    rt.join()


def main() -> int:
    seconds, seed = float(sys.argv[1]), int(sys.argv[2])
    plant = PLANTS[sys.argv[3]] if len(sys.argv) > 3 else None
    rt.init()
    begin, number, warm, warm_since = time.monotonic(), 0, None, 0
    while True:
        # Rank 0's clock decides for all.
        elapsed = float(rt.broadcast(np.array([time.monotonic() - begin]), 0, "elapsed")[0])
        if warm is None and elapsed > WARM_UP * seconds and number >= WARM_UP_ROUNDS:
            warm, warm_since = usage(), number
        if warm is not None and elapsed > seconds and number >= warm_since + MEASURED_ROUNDS:
            break
        number += 1
        run_round(seed, number, plant)
    growth = {what: round(now - warm[what], 2) for what, now in usage().items()}
    print(f"rank {rt.rank()}: {number} rounds (seed {seed}), growth {growth}", flush=True)
    rt.shutdown()
    return int(any(growth[what] > most for what, most in MOST_GROWTH.items()))


if __name__ == "__main__":
    sys.exit(main())
