"""A pytest plugin: spreads a whole run over worker processes, and keeps the processor free for jobs whose times matter.

bin/test loads it when it runs everything. Each worker of pytest-xdist takes whole files. Those that start jobs which must
hear, stop or end within bounds, or that measure, come first, in two lanes, one on each of the first two workers. They
mostly wait: what they leave of the processor goes to the other workers, which give way to them and take tests of ranks
that are threads, and to the build of the native tests. A lane's worker that is through waits for the other lane; then
all take what is left, the longest files first, so that none is alone at the end. Tests with the mark `calm`, which compare
times, come last, one after the other, when no worker has anything else.

One worker collects first, and keeps the modules that pytest has rewritten; then the others do, who find them.
"""

from __future__ import annotations

import fcntl
import functools
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import budget
import changed
import pytest
from priority import give_way
from xdist.scheduler import LoadScopeScheduling

# The files of each lane; both take equally long.
LANES = [
    re.compile(
        r"tests/(faults/(?!test_(drawn|jobs|elastic_joiners))|bench/test_bench_wire|launch/test_(hosts|launch_(doctor|networks)))"
    ),
    re.compile(
        r"tests/(faults/test_(drawn|jobs|elastic_joiners)|launch/test_launch_(control|function|hosts|shells)|core/test_mpi_world)"
    ),
]
# What the other workers may take beside the lanes: ranks there are threads.
BESIDE = re.compile(r"tests/(core|gradients|averaging|with_\w+|gpu|fakes)/")
# Of the other workers. A process gets a third of what one beside it gets that is not nice: no test meets its timeout so.
NICENESS = 5
# Long files whose tests share nothing: what their names have in common here is a piece of its own.
PIECES = re.compile(
    r"tests/native/test_native.py::test_native(\[.*)|tests/launch/test_under_launcher.py::test_files_on_ranks(\[.*)"
)
# Between the workers, by locks of files. Of each lane: exclusive for its own tests, shared by those that wait until it is
# done. And of all that is not calm: shared by every worker that has such tests, exclusive for those that are. And of the
# collection: exclusive for the first.
locks = [open(Path(__file__).with_name(name)) for name in ("workers.py", "budget.py")]
at_work, collecting = (open(Path(__file__).with_name(name)) for name in ("conftest.py", "worlds.py"))
CALM = "calm"  # what they are as a piece
MARKED = re.compile(r"^@pytest\.mark\.calm\b.*?^def (test_\w+)", re.MULTILINE | re.DOTALL)


seconds = functools.cache(changed.measured)  # of each file in a whole run


@functools.cache
def calm_tests() -> set[str]:
    """File and name of the tests that are marked, from their text: the scheduler knows no more of a test than its name."""
    root = Path(__file__).parents[1]
    files = [path for path in Path(__file__).parent.rglob("test_*.py") if "mark.calm" in path.read_text()]
    return {f"{path.relative_to(root)}::{name}" for path in files for name in MARKED.findall(path.read_text())}


def is_calm(nodeid: str) -> bool:
    return nodeid.partition("[")[0] in calm_tests()


def lane_of(nodeid: str) -> int | None:
    """The lane of a test, None of one that runs beside others or alone."""
    if is_calm(nodeid):
        return None
    return next((lane for lane, files in enumerate(LANES) if files.match(nodeid)), None)


def piece_of(nodeid: str) -> str:
    """What a worker takes as a whole: a lane, or a file, or a part of one."""
    lane, part = lane_of(nodeid), PIECES.match(nodeid)
    if is_calm(nodeid):
        return CALM
    if lane is not None:
        return f"lane {lane}"
    return nodeid.split("::")[0] + (part[part.lastindex] if part else "")


def place_of(nodeid: str) -> tuple[int, float]:
    """Where a test is in the order of the run: lanes, what may run beside them, the rest, the native tests, the calm.

    The native tests are being built meanwhile. Of them and of the rest the longest come first.
    """
    if is_calm(nodeid):
        return len(LANES) + 3, 0.0
    lane = lane_of(nodeid)
    if lane is not None:
        return lane, 0.0
    if BESIDE.match(nodeid):
        return len(LANES), 0.0
    file = budget.file_of(nodeid)
    return len(LANES) + 1 + ("/native/" in file), -seconds().get(file, math.inf)  # it may be long


def number_of(worker: str) -> int:
    """That of a worker of xdist: 2 of "gw2"."""
    return int(worker.removeprefix("gw"))


def own_number() -> int:
    return number_of(os.environ.get("PYTEST_XDIST_WORKER", "gw0"))


def workers() -> int:
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))


class LanesThenFiles(LoadScopeScheduling):
    """Hands out pieces in the order of the run; a lane goes to the worker of its number."""

    @property
    def nodes(self) -> list:
        return sorted(super().nodes, key=lambda node: number_of(node.gateway.id))

    def _split_scope(self, nodeid: str) -> str:
        return piece_of(nodeid)


def pytest_xdist_make_scheduler(config, log) -> LanesThenFiles:
    return LanesThenFiles(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """One worker collects alone: three that rewrite the same modules at once take thrice as long for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    try:
        fcntl.flock(collecting, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(collecting, fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        fcntl.flock(collecting, fcntl.LOCK_UN)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items) -> None:
    items.sort(key=lambda item: place_of(item.nodeid))


# Before any worker is given a test, since they all collect first.
def pytest_collection_finish(session) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    for lane in {lane_of(item.nodeid) for item in session.items} - {None}:  # or nobody would free an empty one
        if own_number() == lane % workers():
            fcntl.flock(locks[lane], fcntl.LOCK_EX)
    if own_number() >= len(LANES):
        give_way(NICENESS)
    fcntl.flock(at_work, fcntl.LOCK_SH)


def pytest_sessionfinish() -> None:
    fcntl.flock(at_work, fcntl.LOCK_UN)  # of a worker that has had no test


def waits_for_lanes(nodeid: str) -> bool:
    """Whether a test of this worker must not begin before the lanes are empty."""
    return lane_of(nodeid) is None and (own_number() < len(LANES) or not BESIDE.match(nodeid))


# Outermost, so that neither a test's time nor its timeout counts the wait.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem) -> Iterator[None]:
    """Waits until the lanes are empty, if the test must not run beside them; frees the lane behind its last test.

    A calm test waits for all others.
    """
    if is_calm(item.nodeid):
        fcntl.flock(at_work, fcntl.LOCK_EX)
        return (yield)
    try:
        return (yield from in_its_lane(item, nextitem))
    finally:
        if nextitem is None or is_calm(nextitem.nodeid):
            fcntl.flock(at_work, fcntl.LOCK_UN)


def in_its_lane(item, nextitem) -> Iterator[None]:
    lane = lane_of(item.nodeid)
    if lane is None:
        for lock in locks if waits_for_lanes(item.nodeid) else []:
            fcntl.flock(lock, fcntl.LOCK_SH)
        return (yield)
    fcntl.flock(locks[lane], fcntl.LOCK_EX)
    try:
        return (yield)
    finally:
        if nextitem is None or lane_of(nextitem.nodeid) != lane:
            fcntl.flock(locks[lane], fcntl.LOCK_UN)
