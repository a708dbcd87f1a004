"""A pytest plugin: spreads a whole run over worker processes, and keeps the processor free for jobs whose times matter.

bin/test loads it when it runs everything. Each worker of pytest-xdist takes whole files. Those that start jobs which must
hear, stop or end within bounds, or that measure, come last, one after another on one worker, while nothing else runs.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from xdist.scheduler import LoadScopeScheduling

ALONE = re.compile(r"tests/(faults/|test_(bench_wire|hosts|launch_(doctor|function|hosts|networks)|mpi_world))")


class FilesThenAlone(LoadScopeScheduling):
    """Hands out files in the order of the run; what runs alone is one piece, the last."""

    def _split_scope(self, nodeid: str) -> str:
        return "alone" if runs_alone(nodeid) else nodeid.split("::")[0]


def pytest_xdist_make_scheduler(config, log) -> FilesThenAlone:
    return FilesThenAlone(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items) -> None:
    items.sort(key=lambda item: runs_alone(item.nodeid))


def runs_alone(nodeid: str) -> bool:
    return ALONE.match(nodeid) is not None


# Outermost, so that neither a test's time nor its timeout counts the wait.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item) -> Iterator[None]:
    with the_processor(alone=runs_alone(item.nodeid)):
        return (yield)


@contextmanager
def the_processor(alone: bool) -> Iterator[None]:
    """Waits until no other worker needs the processor for itself, or none uses it. This file serves as the lock."""
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
