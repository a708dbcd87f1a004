"""Starts benchmarks on hosts that it makes on this machine, with links of a chosen rate; measures what they carry.

``start`` is for ``wire``, ``overlap`` and ``compress``, ``start_apart`` for the others. The benchmark itself then
runs on ranks that ringtrainrun starts across these hosts.
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

from ringtrain.bench import documents, namespaces

UNLIMITED = "unlimited"
IPERF_SECONDS = 3
SECONDS_FOR_IPERF = 30.0


def start(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Makes the hosts, runs the benchmark for each number of ranks a host, and returns the highest exit code."""
    hindrance = namespaces.missing() or (
        "" if namespaces.find_program("iperf3") else "the raw rate is measured by iperf3"
    )
    if hindrance:
        print(f"{chosen.command} {chosen.benchmark}: {hindrance}. Run as root: apt-get install iperf3 iproute2 openssh-server",
              file=sys.stderr)  # fmt: skip
        return 2
    if chosen.json and os.path.exists(chosen.json):
        os.unlink(chosen.json)
    names = [f"host-{number}" for number in range(1, chosen.hosts + 1)]
    rates = chosen.rate.split(",") * (1 if "," in chosen.rate else chosen.links)
    if len(rates) < chosen.links:
        print(
            f"{chosen.command} {chosen.benchmark}: --rate must name one rate, or one for each of {chosen.links} links, but "
            f"names {len(rates)}.",
            file=sys.stderr,
        )
        return 2
    with namespaces.HostNetwork(
        dict.fromkeys(names, "eth0"), rate=[None if rate == UNLIMITED else rate for rate in rates], useless=None,
        cores_apart=chosen.cores == "apart",
    ) as network:  # fmt: skip
        one, other = (network[name] for name in names[:2])  # the others are like them
        measured = [measured_rate(one, other, link) for link in range(len(rates))]
        apart = " with cores of its own each" if one.cores else ""
        print(
            f"{chosen.hosts} hosts{apart}, links of {' and '.join(rates)} each way: "
            f"{' + '.join(f'{rate * 8e-6:.0f}' for rate in measured)} Mbit/s both ways at once (iperf3)",
            flush=True,
        )
        further = [*arguments, "--measured-rate", f"{sum(measured):.0f}", *_addresses_of(network)]
        codes, written = [], []
        for count in chosen.ranks_per_host:
            for python in chosen.pythons or [sys.executable]:
                codes.append(_run(chosen, one, names, count, further, python))
                if chosen.json and os.path.exists(chosen.json):
                    written.append(documents.read(chosen.json))
                    os.unlink(chosen.json)  # the next job writes its own
    if written:
        documents.write(chosen.json, documents.combine(written))
    return max(codes)


def start_apart(chosen: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Runs a benchmark with so many ranks on each host, and returns its exit code."""
    hosts_needed, left_over = divmod(chosen.ranks, chosen.ranks_a_host)
    if left_over:
        print(
            f"{chosen.command} {chosen.benchmark}: -np must be a multiple of --ranks-per-host, {chosen.ranks_a_host}, but is "
            f"{chosen.ranks}.",
            file=sys.stderr,
        )
        return 2
    if hindrance := namespaces.missing():
        print(f"{chosen.command} --rate: {hindrance}.", file=sys.stderr)
        return 2
    names = [f"host-{number}" for number in range(1, hosts_needed + 1)]
    with namespaces.HostNetwork(dict.fromkeys(names, "eth0"), rate=chosen.rate, useless=None) as network:
        further = _addresses_of(network) if hasattr(chosen, "addresses") else []
        return _run(chosen, network[names[0]], names, chosen.ranks_a_host, [*arguments, *further], sys.executable)


def _addresses_of(network: namespaces.HostNetwork) -> list[str]:
    return ["--addresses", ";".join(f"{name}={','.join(host.addresses)}" for name, host in network.hosts.items())]


def measured_rate(one: namespaces.NamespaceHost, other: namespaces.NamespaceHost, link: int = 0) -> float:
    """Bytes per second from host to host over one of their links, both ways at once: the slower way's.

    Raises RuntimeError with what iperf3 said last if it finds no rate within ``SECONDS_FOR_IPERF``.
    """
    server = other.start("iperf3", "--server", stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + SECONDS_FOR_IPERF
    try:
        while True:
            client = one.run(
                "iperf3", "--client", other.addresses[link], "--bidir", "--json", "--time", str(IPERF_SECONDS)
            )
            try:
                return rate_in(client.stdout)
            except ValueError as problem:  # its server does not listen yet, or still ends the test before
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"raw rate from '{one.name}' to '{other.name}': iperf3 must measure it within "
                        f"{SECONDS_FOR_IPERF:g} s, but {problem} {client.stderr.strip()}"
                    ) from None
            time.sleep(0.1)
    finally:
        if server.poll() is None:
            other.signal_to(server, signal.SIGKILL)
        server.wait()


def needs_mpi(chosen: argparse.Namespace) -> bool:
    """Whether something is measured that runs over an MPI, which must then have started the ranks."""
    return bool({"mpi", "horovod"} & {*getattr(chosen, "transports", ()), *getattr(chosen, "peers", ())})


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


def _run(
    chosen: argparse.Namespace,
    first: namespaces.NamespaceHost,
    names: Sequence[str],
    ranks_per_host: int,
    arguments: Sequence[str],
    python: str,
) -> int:
    listed = ",".join(f"{name}:{ranks_per_host}" for name in names)
    transport = "mpi" if needs_mpi(chosen) else "tcp"
    line = [python, "-m", "ringtrain.launch", "--transport", transport, "-np", str(len(names) * ranks_per_host), "-H", listed,
            "--share-gpus", python, "-m", chosen.package, *arguments]  # fmt: skip
    environment = dict(os.environ, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
    return subprocess.call(first.command(*line), env=environment)
