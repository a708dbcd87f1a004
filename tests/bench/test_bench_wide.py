"""`python -m benchmarks wide`: its lines have the rate, the delay and the losses that they say, and its sums are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import needs
import pytest
from pytest import approx

from benchmarks import lines
from benchmarks.lines import Kind, Line
from ringtrain.bench import namespaces

ROOT = Path(__file__).parents[2]
NAMES = ["node-a", "node-b"]
# Counts what comes within a while: numbered packets, sent without asking whether they arrive.
RECEIVER = """
import socket, sys
found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
found.bind((sys.argv[1], 4711))
found.settimeout(10)
print(flush=True)
count, packet = 0, b""
while packet != b"end":
    packet = found.recv(2000)
    count += packet != b"end"
print(count)
"""
SENDER = """
import socket, sys, time
to = (sys.argv[1], 4711)
way = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(int(sys.argv[2])):
    way.sendto(bytes(1000), to)
    time.sleep(0.0005)
for _ in range(20):
    time.sleep(0.05)
    way.sendto(b"end", to)
"""


def on_lines(test: Callable) -> Callable:
    """A test that needs lines, and what measures them."""
    return needs.hosts(needs.package("iperf3", "iperf3")(test))


def test_a_kind_says_what_it_is_and_what_tcp_can_get_of_it() -> None:
    kind = Kind(200, 50, 0.01)
    assert str(kind) == "200 Mbit/s, RTT 50 ms, 0.01 % lost"
    assert kind.payload_rate == approx(25e6 * 1448 / 1500)
    assert kind.arguments(7) == ["200000000", "25000", "100", "1250000", "7"]


@on_lines
def test_a_line_has_its_delay_and_its_rate() -> None:
    with (
        namespaces.HostNetwork(dict.fromkeys(NAMES, "eth0"), useless=None) as network,
        Line(network, Kind(20, 40)) as line,
    ):
        raw = lines.raw_rate(line, network[NAMES[0]], network[NAMES[1]])
        assert 0.040 <= raw.round_trip_seconds < 0.150
        assert raw.rate < 1.02 * line.kind.payload_rate


@on_lines
def test_a_line_loses_the_share_that_it_says() -> None:
    count = 2000
    with (
        namespaces.HostNetwork(dict.fromkeys(NAMES, "eth0"), useless=None) as network,
        Line(network, Kind(100, 2, 10)) as line,
    ):
        to = line.addresses[NAMES[1]]
        receiver = network[NAMES[1]].start(sys.executable, "-c", RECEIVER, to, stdout=subprocess.PIPE, text=True)
        assert receiver.stdout is not None
        receiver.stdout.readline()
        network[NAMES[0]].run(sys.executable, "-c", SENDER, to, str(count), check=True)
        came = int(receiver.communicate(timeout=30)[0])
    assert 0.85 * count < came < 0.95 * count


@pytest.mark.long
@on_lines
def test_what_the_benchmark_measures_is_right(tmp_path: Path) -> None:
    written = tmp_path / "wide.json"
    line = [sys.executable, "-m", "benchmarks", "wide", "--mbit", "100", "--rtt-ms", "20", "--losses", "0,0.1",
            "--sizes", "1KB,2MB", "--ways", "ringtrain,one-cubic", "--repetitions", "1", "--json", str(written)]  # fmt: skip
    done = subprocess.run(line, cwd=ROOT, env=dict(os.environ, PYTHONPATH=str(ROOT)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(written.read_text())["results"]
    assert {(each["system"], each["loss_percent"]) for each in results} == {
        (system, loss) for system in ("ringtrain", "one-cubic", "gloo") for loss in (0.0, 0.1)
    }
    assert all(each["verified"] and each["raw_rate"] > 0 for each in results)
    assert min(each["seconds_min"] for each in results) > 0.010, "no result comes before half of a round trip"
