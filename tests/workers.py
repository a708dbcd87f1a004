"""A pytest plugin: spreads a whole run over worker processes, and keeps the processor free for jobs whose times matter.

bin/test loads it when it runs everything. Each worker of pytest-xdist takes whole files. Those that start jobs which must
hear, stop or end within bounds, or that measure, come first, one after another on the first worker, while no other test runs:
they mostly wait, so the native tests are built meanwhile, with what they leave of the processor.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator

import pytest
from xdist.scheduler import LoadScopeScheduling

ALONE = re.compile(r"tests/(faults/|test_(bench_wire|hosts|launch_(doctor|function|hosts|networks)|mpi_world))")
FIRST_WORKER = "gw0"

processor = open(__file__)  # a lock between the workers: shared by tests, exclusive for one that runs alone


class AloneThenFiles(LoadScopeScheduling):
    """Hands out files in the order of the run; what runs alone is one piece, the first, and goes to the first worker."""

    @property
    def nodes(self) -> list:
        return sorted(super().nodes, key=lambda node: node.gateway.id)

    def _split_scope(self, nodeid: str) -> str:
        return "alone" if runs_alone(nodeid) else nodeid.split("::")[0]


def pytest_xdist_make_scheduler(config, log) -> AloneThenFiles:
    return AloneThenFiles(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items) -> None:
    items.sort(key=lambda item: not runs_alone(item.nodeid))


def runs_alone(nodeid: str) -> bool:
    return ALONE.match(nodeid) is not None


# Before any worker is given a test, since they all collect first.
def pytest_collection_finish() -> None:
    if os.environ.get("PYTEST_XDIST_WORKER") == FIRST_WORKER:
        fcntl.flock(processor, fcntl.LOCK_EX)


# Outermost, so that neither a test's time nor its timeout counts the wait.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem) -> Iterator[None]:
    """Waits until no other worker needs the processor for itself, or none uses it; keeps it between tests that run alone."""
    alone = runs_alone(item.nodeid)
    fcntl.flock(processor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        if not (alone and nextitem is not None and runs_alone(nextitem.nodeid)):
            fcntl.flock(processor, fcntl.LOCK_UN)
