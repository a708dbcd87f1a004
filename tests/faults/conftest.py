"""The oracles of all tests here: when one is over, nothing of its job may be left, neither processes nor shared memory.

They wait as long as is promised, since what is told to end takes a moment; the load of a busy machine is allowed for.
Nothing is tried twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from benchmarks.jobs import Job
from ringtrain.bench.namespaces import HostNetwork

PATIENCE = 60.0  # twice the 30 s after which no process of a job may be left, whoever died


@pytest.fixture
def watch() -> Iterator[Callable[..., Job]]:
    """Makes jobs under watch, with the arguments of `Job`."""
    made: list[Job] = []

    def make(**options: object) -> Job:
        made.append(Job(**options))
        return made[-1]

    yield make
    left = [left for job in made if (left := job.await_end(PATIENCE))]
    for job in made:
        job.close()
    assert not left, "left over:\n" + "\n".join(left)


@pytest.fixture
def job(watch: Callable[..., Job]) -> Job:
    """A job under watch."""
    return watch()


@pytest.fixture
def network(three_hosts: HostNetwork) -> Iterator[HostNetwork]:
    """Three hosts under watch, and all of them connected again afterwards."""
    yield three_hosts
    for host in three_hosts.hosts:
        three_hosts.plug_in(host)
    deadline = time.monotonic() + PATIENCE
    while left := [f"{host.name}: {what}" for host in three_hosts.hosts.values() for what in host.left()]:
        assert time.monotonic() < deadline, "left over:\n" + "\n".join(left)
        time.sleep(0.1)
