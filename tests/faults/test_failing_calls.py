"""Each call of a C function that can fail does so, in one of two ranks: all ranks must say clearly what it was, or go on.

A rank opens a world, uses it over shared memory or TCP, and closes it. No process may crash or hang, no shared memory and
no descriptor may be left, and another world must open. Every run does some of the calls; `bin/test --long failing` does
all: from each site the first and the last one.
"""

from __future__ import annotations

import errno
import queue
import random
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ringtrain._core as core
from environments import rank_environment
from failing_calls import Server, preloadable

from benchmarks.jobs import Job

pytestmark = [pytest.mark.timeout(600)]
SEED = 5
SERVERS = 3
LAYOUTS = ["", "1+1"]  # shared memory, TCP
SAMPLE_OF_MALLOC = 24
WORLDS_TO_FIND_SITES = 3
# What each function may fail with, by the watched library's own use of it: an eventfd is never full, sockets do not block.
ERRORS = {
    "malloc": "ENOMEM", "calloc": "ENOMEM", "realloc": "ENOMEM", "posix_memalign": "ENOMEM", "mmap": "ENOMEM", "madvise": "EINVAL",
    "shm_open": "EMFILE ENOENT", "fallocate": "EOPNOTSUPP", "posix_fallocate": "ENOSPC EINTR", "stat": "ENOENT", "fstat": "EIO",
    "fopen": "EMFILE", "fopen64": "EMFILE", "open": "EMFILE", "read": "EINTR EIO", "write": "EINTR", "pread": "EIO", "pwrite": "ENOSPC",
    "socket": "EMFILE", "bind": "EADDRINUSE", "listen": "EADDRINUSE", "accept4": "EMFILE ECONNABORTED EINTR", "getsockname": "ENOBUFS",
    "connect": "ECONNREFUSED EADDRNOTAVAIL ETIMEDOUT", "getpeername": "ENOTCONN", "getsockopt": "ENOBUFS", "setsockopt": "ENOPROTOOPT",
    "send": "ECONNRESET EINTR ENOBUFS", "sendmsg": "ECONNRESET EINTR ENOBUFS", "recv": "ECONNRESET EINTR ENOMEM",
    "recvmsg": "ECONNRESET EINTR ENOMEM", "gethostname": "ENAMETOOLONG", "epoll_create1": "EMFILE", "epoll_ctl": "ENOSPC ENOMEM",
    "epoll_wait": "EINTR", "eventfd": "EMFILE", "poll": "EINTR ENOMEM", "nanosleep": "EINTR", "ioctl": "EINVAL", "pthread_create": "EAGAIN",
    "pthread_setname_np": "ERANGE", "getrandom": "EAGAIN", "getrlimit": "EINVAL", "sched_getaffinity": "EINVAL", "futex": "EINTR",
    "syscall": "ENOSYS EMFILE EPERM",
}  # fmt: skip
# Texts by which nobody finds out what to do.
UNCLEAR = re.compile(r"std::|bad_alloc|It is stopped|Bad file descriptor|unknown address|: $|^\w+: ?$")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preloadable(tmp_path_factory.mktemp("preload"))


@pytest.fixture
def servers(watch: Callable[..., Job], library: Path) -> Iterator[list[Server]]:
    """Each in a job of its own, whose shared memory it has for itself."""
    started = [Server(watch(), library, rank_environment()) for _ in range(SERVERS)]
    yield started
    for server in started:
        server.close()


def trials(server: Server, layout: str) -> list[dict[str, Any]]:
    """All that can be done to the ranks of a layout: each site of each function with each error, its first and last call."""
    found: dict[tuple[int, str, int], int] = {}
    for _ in range(WORLDS_TO_FIND_SITES):
        result = server.ask(layout=layout)
        assert all(rank.get("right") for rank in result["ranks"]), result
        for rank, told in enumerate(result["ranks"]):
            for function, site, calls in told["called"]:
                found[rank, function, site] = max(calls, found.get((rank, function, site), 0))
    return [
        {"layout": layout, "rank": rank, "function": function, "site": site, "call": call, "error": getattr(errno, error)}
        for (rank, function, site), calls in sorted(found.items())
        for error in ERRORS[function].split()
        for call in {1, calls}
    ]  # fmt: skip


def problems(result: dict[str, Any], most: list[dict[str, int]]) -> list[str]:
    """What is wrong with the outcome of a trial. most: threads and descriptors that a rank may have at its end. Pure."""
    found = ["hung"] if result["hung"] else []
    found += [f"left {name}" for name in result["left"]]
    for number, rank in enumerate(result["ranks"]):
        if rank["code"] != 0 or not ("right" in rank or "error" in rank):
            found.append(f"rank {number} ended with code {rank['code']} and said: {rank['said']}")
        if UNCLEAR.search(rank.get("error", "")):
            found.append(f"rank {number}'s error is unclear: {rank['error']}")
        found += [
            f"rank {number} kept {rank[what]} {what}, not {most[number][what]}"
            for what in ("threads", "descriptors")
            if rank.get(what, 0) > most[number][what]
        ]
    return found


def perform(servers: list[Server], chosen: list[dict[str, Any]]) -> list[str]:
    """Does the trials; what was wrong with each that was not as it must be."""
    left: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for trial in chosen:
        left.put(trial)
    most = [{"threads": 3, "descriptors": 3}] * 2  # those that answer for a rank when it is stalled, or asked
    wrong: list[str] = []

    def work(server: Server) -> None:
        while True:
            try:
                trial = left.get_nowait()
            except queue.Empty:
                return
            result = server.ask(**trial)
            if found := problems(result, most):
                wrong.append(
                    f"{trial}\n  " + "\n  ".join([*found, *where(result["ranks"][trial["rank"]]["failed_at"])])
                )

    threads = [threading.Thread(target=work, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def where(places: list[str]) -> list[str]:
    """The functions of the library that were on the stack of the call that failed, the innermost first."""
    before = [hex(int(place, 16) - 1) for place in places]
    done = subprocess.run(["addr2line", "-Cfpe", core.__file__, *before], capture_output=True, text=True)
    return [f"at {line}" for line in done.stdout.splitlines()]


def sample(possible: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One of each function, and some of the many of malloc. Pure."""
    drawn = random.Random(SEED)
    functions = sorted({trial["function"] for trial in possible})
    of = {function: [trial for trial in possible if trial["function"] == function] for function in functions}
    return [
        trial for name in functions for trial in drawn.sample(of[name], SAMPLE_OF_MALLOC if name == "malloc" else 1)
    ]


def test_a_failing_call_is_told_by_all_ranks_or_does_no_harm(servers: list[Server]) -> None:
    possible = [trial for layout in LAYOUTS for trial in trials(servers[0], layout)]
    assert not (wrong := perform(servers, sample(possible))), "\n".join(wrong)


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_failing_call_is_told_by_all_ranks_or_does_no_harm(layout: str, servers: list[Server]) -> None:
    assert not (wrong := perform(servers, trials(servers[0], layout))), "\n".join(wrong)
