"""What `ringtrain doctor` measures of links: in which rounds, who sends to whom at what rate, and what is found slow."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import needs
import pytest

from ringtrain.bench.namespaces import HostNetwork
from ringtrain.launch import links, throughput
from ringtrain.launch.links import (
    apart,
    backward,
    explain,
    forward,
    half_duplex,
    held_back,
    one_by_one,
    pairs,
    suspects,
)
from ringtrain.launch.throughput import HELLO, Listeners, TcpThroughput, rate_of

ROOT = Path(__file__).parents[2]
TOKEN = bytes(range(16))


# ---- rounds: pure ----


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9, 33, 1000])
def test_all_neighbours_are_measured_both_ways_in_few_rounds(count: int) -> None:
    """The link that closes the ring, too."""
    ways = {(place, (place + step) % count) for place in range(count) for step in (1, -1)}
    assert set(forward(count)) | set(backward(count)) == ways
    assert {frozenset(pair) for pair in pairs(count)} == {frozenset(way) for way in ways}
    rounds = one_by_one(count)
    assert sorted(way for each in rounds for way in each) == sorted(ways)
    for each in [*rounds, *apart(pairs(count))]:
        busy = [place for way in each for place in way]
        assert len(busy) == len(set(busy)), "a host has part in one way at a time"
    again = suspects(dict.fromkeys(ways, 1e8))
    assert len(rounds) <= links.MOST_ALONE and len(apart(pairs(count))) <= 3
    assert len(again) <= math.log2(len(ways)) + 1
    assert all(len(each) == 1 for each in (rounds if count <= 4 else again)), "nothing is beside it"


def test_the_slowest_of_many_are_measured_once_more() -> None:
    alone = dict.fromkeys(forward(20), 100.0) | {(3, 4): 5.0, (9, 10): 7.0}
    assert suspects(alone)[:2] == [[(3, 4)], [(9, 10)]]


# ---- judging: pure ----


def of_host(count: int, place: int) -> tuple[list, list]:
    """The ways on which a host sends, and on which it receives."""
    ways = forward(count) + backward(count)
    return [way for way in ways if way[0] == place], [way for way in ways if way[1] == place]


@pytest.mark.parametrize(
    "count, slow, found",
    [
        (3, [], []),
        (3, [(2, 0)], [("way", (2, 0))]),
        (3, [(2, 0), (0, 2)], [("link", (0, 2))]),
        (4, of_host(4, 1)[0], [("sends", (1,))]),
        (4, of_host(4, 1)[1], [("receives", (1,))]),
        (4, sum(of_host(4, 3), []), [("host", (3,))]),
        (5, [*of_host(5, 1)[0], (3, 4)], [("sends", (1,)), ("way", (3, 4))]),
        (5, [*of_host(5, 0)[0], *of_host(5, 3)[1]], [("sends", (0,)), ("receives", (3,))]),
        (2, [(1, 0)], [("way", (1, 0))]),
        (2, [(0, 1), (1, 0)], [("link", (0, 1))]),
    ],
)
def test_slow_ways_have_few_reasons(count: int, slow: list, found: list) -> None:
    """What a host has in common with others is named once; of two hosts nobody can tell which it is."""
    assert [(each.what, each.hosts) for each in explain(slow, forward(count) + backward(count))] == found


def test_what_is_slow_is_so_beside_others() -> None:
    assert links.slow_ways({(0, 1): 100.0, (1, 2): 70.0, (2, 0): 50.0}) == [(2, 0)]
    assert links.slow_ways({(0, 1): 10.0, (1, 0): 10.0}) == [] == links.slow_ways({})


def test_what_carries_less_once_all_send_is_found() -> None:
    alone = dict.fromkeys(forward(4) + backward(4), 100.0)
    at_once = alone | {(0, 1): 55.0, (1, 2): 50.0, (1, 0): 20.0}
    assert held_back(alone, at_once, []) == [(0, 1), (1, 2)], "of those that an allreduce uses"
    assert held_back(alone, at_once, [(1, 0)]) == [(1, 2)], "not where confirmations have to wait"
    assert half_duplex([(0, 1), (1, 2)], 4) == [1]
    assert half_duplex([(0, 1)], 4) == [] == half_duplex(forward(4), 4) == half_duplex(forward(2), 2)


def test_the_rate_is_that_of_the_time_in_which_all_send() -> None:
    """Behind the first burst, and before others have ended."""
    steady = [(0.01 * number, 1000 + 10 * number) for number in range(100)]
    assert rate_of(steady, 0.5) == pytest.approx(1000)
    burst = [(0.0, 50_000), *((time, 50_000 + count) for time, count in steady)]
    alone_at_last = [(2.0 + time, 60_000 + 100 * count) for time, count in steady]
    assert rate_of(burst + alone_at_last, 0.5) == pytest.approx(1000)
    assert rate_of([(0.0, 100), (4.0, 500)], 0.5) == 100.0, "too few: over all of the time"
    assert rate_of([(3.0, 100)], 0.5) == 200.0 and rate_of([], 0.5) == 0.0


# ---- over sockets ----


def on_ring(count: int, body: Callable[[int, TcpThroughput], object], listens: str = "127.0.0.1:0") -> list:
    """Runs a body for each of so many hosts, each in its thread; what they return."""
    listeners = [Listeners(listens) for _ in range(count)]
    addresses = [each.addresses for each in listeners]
    results: list = [None] * count

    def run(place: int) -> None:
        measured = TcpThroughput(place, listeners[place], addresses, TOKEN)
        try:
            results[place] = body(place, measured)
        finally:
            measured.close()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("count, listens", [(2, "127.0.0.1:0"), (3, "127.0.0.1:0,127.0.0.1:0")])
def test_bytes_go_to_whom_they_are_for(count: int, listens: str) -> None:
    """All at once, one way alone, the other way, and again; over all networks."""
    all_meet = threading.Barrier(count)

    def body(place: int, measured: TcpThroughput) -> list[float]:
        after, before = (place + 1) % count, (place - 1) % count
        rates = []
        for to, source in (
            (after, before),
            (1 if place == 0 else None, 0 if place == 1 else None),
            (0 if place == 1 else None, 1 if place == 0 else None),
            (before, after),
        ):
            rates.append(measured.carry(to, source, 0.05))
            all_meet.wait(60)
        return rates

    results = on_ring(count, body, listens)
    assert [[rate > 0 for rate in each] for each in results] == [
        [True, place == 1, place == 0, True] for place in range(count)
    ]


def test_latency_is_measured_by_who_leads() -> None:
    results = on_ring(2, lambda place, measured: measured.latency(1 - place, leads=place == 0))
    assert results[0] > 0 and results[1] == 0.0


def test_strangers_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who knows no token, who is another host, and who says nothing."""
    monkeypatch.setattr(throughput, "SECONDS_TO_SAY_HELLO", 0.1)
    listeners = [Listeners("127.0.0.1:0") for _ in range(2)]
    addresses = [each.addresses for each in listeners]
    strangers = [socket.create_connection(addresses[1][0]) for _ in range(3)]
    strangers[0].sendall(HELLO.pack(TOKEN[::-1], 0, 0))
    strangers[1].sendall(HELLO.pack(TOKEN, 1, 0))
    found: list[TcpThroughput] = []
    answering = threading.Thread(target=lambda: found.append(TcpThroughput(1, listeners[1], addresses, TOKEN)))
    answering.start()
    caller = TcpThroughput(0, listeners[0], addresses, TOKEN)
    answering.join()
    for stranger in strangers:
        stranger.settimeout(60)
        assert stranger.recv(1) == b""
        stranger.close()
    for each in (caller, *found):
        each.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(addresses[1][0])


def test_a_way_that_carries_nothing_keeps_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "SECONDS_OF_SILENCE", 0.1)
    ended = threading.Event()

    def body(place: int, measured: TcpThroughput) -> float:
        if place == 0:
            ended.wait()
            return 0.0
        try:
            return measured.carry(None, 0, 0.05)
        finally:
            ended.set()

    assert on_ring(2, body) == [0.0, 0.0]


# A host of a ring that measures once, all at once: its place, and where each of them listens.
ONCE = """
import sys
from ringtrain.launch.throughput import Listeners, TcpThroughput
place, *ring = int(sys.argv[1]), *sys.argv[2:]
listeners = Listeners(ring[place])
print(flush=True)
sys.stdin.readline()
measured = TcpThroughput(place, listeners, [[(at.split(":")[0], 7000)] for at in ring], bytes(16))
print(measured.carry((place + 1) % len(ring), place - 1 if place else len(ring) - 1, 0.3))
sys.stdin.readline()
"""


@pytest.mark.calm
@needs.hosts
def test_the_link_that_closes_the_ring_is_as_slow_as_it_is() -> None:
    with HostNetwork({"node-a": "eth0", "node-b": "eth0", "node-c": "eth0"}, useless=None) as network:
        network.slow_down("node-c", "40mbit", to="node-a")
        ring = [f"{host.address}:7000" for host in network.hosts.values()]
        started = [
            host.start(
                sys.executable, "-c", ONCE, str(place), *ring, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=dict(os.environ, PYTHONPATH=str(ROOT)))
            for place, host in enumerate(network.hosts.values())
        ]  # fmt: skip
        for each in started:
            each.stdout.readline()  # it listens
        for each in started:
            each.stdin.write("\n")
            each.stdin.flush()
        from_c, from_a, from_b = (float(each.stdout.readline()) for each in started)
        for each in started:
            each.communicate("\n")
    assert 0 < from_c < 8e6, "40 Mbit/s are 5 MB/s"
    assert from_c < min(from_a, from_b)
