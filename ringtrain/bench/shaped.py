"""Starts benchmarks on hosts that it makes on this machine, with links of a chosen rate; measures what they carry.

``start`` is for ``ringtrain bench wire`` and ``overlap``, ``start_apart`` for the others. The benchmark itself then runs
on ranks that ringtrainrun starts across these hosts.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from ringtrain.bench import hosts

IPERF_SECONDS = 3
SECONDS_FOR_IPERF = 30.0


def start(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Makes the hosts, runs the benchmark for each number of ranks a host, and returns the highest exit code."""
    hindrance = hosts.missing() or ("" if hosts.find_program("iperf3") else "the raw rate is measured by iperf3")
    if hindrance:
        print(f"ringtrain bench {chosen.benchmark}: {hindrance}. Run as root: apt-get install iperf3 iproute2 openssh-server",
              file=sys.stderr)  # fmt: skip
        return 2
    names = [f"host-{number}" for number in range(1, chosen.hosts + 1)]
    with hosts.Network(dict.fromkeys(names, "eth0"), rate=chosen.rate, useless=None, links=chosen.links) as network:
        rate = chosen.links * measured_rate(network[names[0]], network[names[1]])  # of the first, and the others are like it
        each = f", {chosen.links} for each host" if chosen.links > 1 else ""
        print(f"{chosen.hosts} hosts, links of {chosen.rate} each way{each}: "
              f"{rate * 8e-6:.0f} Mbit/s both ways at once (iperf3)")
        further = [*arguments, "--measured-rate", f"{rate:.0f}"]
        codes = [_run(network[names[0]], names, count, further) for count in chosen.ranks_per_host]
    return max(codes)


def start_apart(ranks: int, rate: str, arguments: Sequence[str]) -> int:
    """Runs a benchmark with each rank on a host of its own, and returns its exit code."""
    if hindrance := hosts.missing():
        print(f"ringtrain bench --rate: {hindrance}.", file=sys.stderr)
        return 2
    names = [f"host-{number}" for number in range(1, ranks + 1)]
    with hosts.Network(dict.fromkeys(names, "eth0"), rate=rate, useless=None) as network:
        return _run(network[names[0]], names, 1, arguments)


def measured_rate(one: hosts.Host, other: hosts.Host) -> float:
    """Bytes per second from host to host, both ways at once: the slower way's.

    Raises RuntimeError with what iperf3 said last if it finds no rate within ``SECONDS_FOR_IPERF``.
    """
    server = other.start("iperf3", "--server", stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + SECONDS_FOR_IPERF
    try:
        while True:
            client = one.run("iperf3", "--client", other.address, "--bidir", "--json", "--time", str(IPERF_SECONDS))
            try:
                return rate_in(client.stdout)
            except ValueError as problem:  # its server does not listen yet, or still ends the test before
                if time.monotonic() > deadline:
                    raise RuntimeError(f"raw rate from '{one.name}' to '{other.name}': iperf3 must measure it within "
                                       f"{SECONDS_FOR_IPERF:g} s, but {problem} {client.stderr.strip()}") from None
            time.sleep(0.1)
    finally:
        if server.poll() is None:
            other.signal_to(server, signal.SIGKILL)
        server.wait()


def rate_in(report: str) -> float:
    """The slower way's bytes per second in iperf3's JSON report.

    Raises ValueError with what stands there instead: iperf3's exit code is 0 even if it could not connect.
    """
    try:
        found = json.loads(report)
        ways = [found["end"][way]["bits_per_second"] for way in ("sum_received", "sum_received_bidir_reverse")]
    except (KeyError, json.JSONDecodeError):
        said = re.search(r'"error":\s*"(.*)"', report)
        raise ValueError(f"it says: {said[1] if said else report[-200:].strip() or 'nothing'}.") from None
    return min(ways) / 8


def _run(first: hosts.Host, names: Sequence[str], ranks_per_host: int, arguments: Sequence[str]) -> int:
    listed = ",".join(f"{name}:{ranks_per_host}" for name in names)
    line = [sys.executable, "-m", "ringtrain.launch", "-np", str(len(names) * ranks_per_host), "-H", listed,
            "--share-gpus", sys.executable, "-m", "ringtrain.bench", *arguments]  # fmt: skip
    environment = dict(os.environ, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
    return subprocess.call(first.command(*line), env=environment)
