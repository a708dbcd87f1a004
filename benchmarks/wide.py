"""``python -m benchmarks wide``: allreduce between hosts far from each other, on lines that are made on this machine.

Each line has a rate, a delay and a share of packets that are lost (``lines``). In front of the table stands what one
stream of plain TCP got of it, with the kernel's cubic. The floor is 2(H-1)/H of the bytes over the payload of that
rate, without any delay; with ``--sites`` H is the number of sites, which share the line. Ranks wait for each other over
another network, which is fast; only what is measured is on the
line. ``start`` runs in a process that is no rank, and starts ``run`` on the ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import lines
from benchmarks.lines import Kind, Line
from ringtrain.bench import documents, namespaces

MODULE = "benchmarks"
ROOT = Path(__file__).resolve().parents[1]
# What ours may be told, by the name of the way: options of the world.
SETTINGS: dict[str, dict[str, object]] = {
    "ringtrain": {},
    "cubic": {"tcp_congestion": "cubic"},
    "bbr": {"tcp_congestion": "bbr"},
    "no-sites": {"site": ""},
    "one-cubic": {"tcp_congestion": "cubic", "tcp_streams": 1},
    "eight-cubic": {"tcp_congestion": "cubic", "tcp_streams": 8},
    "sixteen-cubic": {"tcp_congestion": "cubic", "tcp_streams": 16},
}


def start(options: Mapping[str, Any], arguments: Sequence[str]) -> int:
    """Makes hosts and one line after the other, runs the benchmark on each, and returns the highest exit code."""
    needed = "" if namespaces.find_program("iperf3") else "raw TCP is measured by iperf3: apt-get install iperf3"
    if hindrance := namespaces.missing() or needed:
        print(f"python -m benchmarks wide: {hindrance}.", file=sys.stderr)
        return 2
    written, codes = [], []
    names = [f"host-{number}" for number in range(1, options["hosts"] + 1)]
    with namespaces.HostNetwork(dict.fromkeys(names, "eth0"), useless=None) as network:
        for loss in options["losses"]:
            kind = Kind(options["mbit"], options["round_trip_ms"], loss, options["buffer_ms"])
            with Line(network, kind, congestion=options["congestion"], sites=options["sites"]) as line:
                for package in options["packages"] or [""]:
                    codes.append(_run(network, line, package, arguments))
                    if options["json"]:
                        written.append(documents.read(options["json"]))
                        os.unlink(options["json"])  # the next job writes its own
    if written:
        documents.write(options["json"], documents.combine(written))
    return max(codes)


def _run(network: namespaces.HostNetwork, line: Line, package: str, arguments: Sequence[str]) -> int:
    """One job on the line. package: the folder that ringtrain is imported from; "" for this one."""
    one, *_, other = network.hosts.values()
    raw = lines.raw_rate(line, one, other)
    print(f"\n{line.kind}; one stream of raw TCP, cubic: {raw.rate * 8e-6:.0f} Mbit/s, "
          f"RTT {raw.round_trip_seconds * 1e3:.1f} ms{f'; {package}' if package else ''}", flush=True)  # fmt: skip
    addresses = ";".join(f"{name}={address}" for name, address in line.addresses.items())
    job = [sys.executable, "-m", "ringtrain.launch", "--transport", "tcp", "-np", str(len(network.hosts)),
           "-H", ",".join(f"{name}:1" for name in network.hosts), "--network-interfaces", "eth0", "--share-gpus",
           sys.executable, "-m", MODULE, *arguments, "--addresses", addresses,
           "--measured-rate", f"{line.kind.payload_rate:.0f}", "--raw-rate", f"{raw.rate:.0f}",
           "--loss", f"{line.kind.loss_percent}", "--sites", str(line.sites)]  # fmt: skip
    environment = dict(os.environ, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"),
                       PYTHONPATH=os.pathsep.join(filter(None, [package, str(ROOT)])))  # fmt: skip
    before = line.processor_seconds()
    code = subprocess.call(one.command(*job, folder="/"), env=environment)  # where Python finds no other ringtrain
    print(f"(the line itself used {line.processor_seconds() - before:.1f} s of a core)", flush=True)
    return code


def run(sizes: Sequence[int], ways: Sequence[str], peers: Sequence[str], repetitions: int, measured_rate: float,
        addresses: Mapping[str, Sequence[str]], json: str | None, raw_rate: float, loss: float, mbit: float,
        round_trip_ms: float, sites: int, **_of_the_start: Any) -> bool:  # fmt: skip
    """Runs the benchmark on this rank; returns whether every system's results were right."""
    # Not before: what waits for the other ranks is a world of its own.
    from ringtrain.bench import ranks, report, wire
    from ringtrain.bench.measured_worlds import MeasuredWorld
    from ringtrain.bench.systems import PEERS, Over, System

    os.environ["GLOO_SOCKET_IFNAME"] = lines.INTERFACE
    site = f"site-{ranks.rank() * sites // ranks.size()}" if sites < ranks.size() else ""
    systems: list[System] = []
    worlds = []
    for way in ways:
        worlds.append(MeasuredWorld("tcp", addresses, **{"site": site, **SETTINGS[way]}))
        systems.append(Over(worlds[-1]))
        systems[-1].name = way
    systems += [PEERS[name]() for name in peers]
    worlds[0].enter()
    results = [
        {
            **result,
            "mbit": mbit,
            "round_trip_ms": round_trip_ms,
            "loss_percent": loss,
            "raw_rate": raw_rate,
            "sites": sites,
        }
        for size in sizes
        for result in wire.measure("allreduce", systems, size, repetitions, sites, measured_rate)
    ]
    report.say(f"allreduce, float32, sum, in place, {ranks.size()} ranks on as many hosts at {sites} sites")
    report.print_table(wire.HEADINGS, [wire.row(result) for result in results])
    report.write_json(json, results, hosts=ranks.size(), bytes_per_second=measured_rate)
    for system in reversed(systems):
        system.close()
    for world in worlds:
        world.close()
    return all(result["verified"] for result in results)
