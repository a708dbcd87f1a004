"""A long line between hosts that ``ringtrain.bench.namespaces`` has made: of a rate, with a delay, and with packets that are lost.

Kernels without netem have no such queue. So each host gets a TUN device, and a process (line.cc) carries packets from
one to the other. It is compiled when it is first needed, into a folder for temporary files. The devices are gone with
the process; whoever measures on a line should see by ``raw_rate`` what the line gives to TCP.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ringtrain.bench import namespaces
from ringtrain.bench.namespaces import find_program
from ringtrain.launch.agent.rank_command import end_with

SOURCE = Path(__file__).with_name("line.cc")
INTERFACE = "line0"
NETWORK = "10.79.0"
ALLOWED_CONGESTION = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
DEFAULT_CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
# What of a packet of 1,500 bytes TCP gives to its users, where it has timestamps.
PACKET_BYTES, PAYLOAD_BYTES = 1500, 1448
QUEUE_PACKETS = 10_000  # that a device holds until the process takes them: more than a line's own buffer
SECONDS_TO_START = 30.0
SECONDS_OF_RAW, SECONDS_LEFT_OUT = 6, 2  # of one stream, whose beginning does not count


@dataclass(frozen=True)
class Kind:
    """What a line is like, each way.

    Attributes:
        mbit: megabits of packets a second.
        round_trip_ms: there and back, without waiting for others' packets.
        loss_percent: of the packets, each on its own.
        buffer_ms: what the line holds back before it drops, as the time that sending it takes.
    """

    mbit: float
    round_trip_ms: float
    loss_percent: float = 0.0
    buffer_ms: float = 50.0

    @property
    def payload_rate(self) -> float:
        """Bytes a second that TCP can give to its users."""
        return self.mbit * 1e6 / 8 * PAYLOAD_BYTES / PACKET_BYTES

    def __str__(self) -> str:
        return f"{self.mbit:g} Mbit/s, RTT {self.round_trip_ms:g} ms, {self.loss_percent:g} % lost"

    def arguments(self, seed: int) -> list[str]:
        """Of line.cc, but for the devices."""
        buffer_bytes = self.buffer_ms * 1e-3 * self.mbit * 1e6 / 8
        numbers = (self.mbit * 1e6, self.round_trip_ms * 500, self.loss_percent * 1e4, buffer_bytes, seed)
        return [f"{number:.0f}" for number in numbers]


@functools.cache
def program() -> str:
    """The process that carries packets. Raises RuntimeError with the compiler's words if it cannot be made."""
    made = Path(tempfile.mkdtemp(prefix="ringtrain-line-")) / "line"
    line = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-o", str(made), str(SOURCE)]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        raise namespaces.NotMade(f"making a line: '{' '.join(line)}' returned {done.returncode}: {done.stderr.strip()}")
    return str(made)


class Line:
    """One line that the sites of a network share: each sends at the rate, and what it sends arrives after the delay.

    >>> with namespaces.HostNetwork(dict.fromkeys(["a", "b"], "eth0"), useless=None) as network, Line(network, Kind(200, 50)) as line:
    ...     line.addresses
    {'a': '10.79.0.1', 'b': '10.79.0.2'}

    Args:
        network: its hosts get a further interface, ``line0``, for as long as the line is open.
        kind: what it is like.
        seed: of the packets that are lost.
        sites: at which the hosts are, as many at each, one site behind the other; 0: each host is one.
        congestion: what the kernels of these hosts take for TCP by default, which this machine's must allow all users; "" for what
            they have.
    """

    def __init__(
        self, network: namespaces.HostNetwork, kind: Kind, seed: int = 1, congestion: str = "", sites: int = 0
    ):
        self.kind = kind
        self.sites = sites or len(network.hosts)
        self.addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(network.hosts, start=1)}
        names = [f"line-{number}" for number in range(1, 1 + len(network.hosts))]
        command = [program(), *kind.arguments(seed), str(self.sites), *names]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         preexec_fn=partial(end_with, os.getpid()))  # fmt: skip
        try:
            assert self._process.stdout is not None
            if not self._process.stdout.readline():
                raise namespaces.NotMade(
                    f"making a line: /dev/net/tun must be there for root, but '{names[0]}' was refused."
                )
            for name, host in zip(names, network.hosts.values(), strict=True):
                self._plug_in(name, host, congestion)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, and with it the devices."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def change(self, kind: Kind) -> None:
        """From now on it is like that. Packets that are under way arrive as they would have."""
        self.kind = kind
        assert self._process.stdin is not None
        self._process.stdin.write(f"{' '.join(kind.arguments(0)[:-1])}\n".encode())
        self._process.stdin.flush()

    def processor_seconds(self) -> float:
        """What the process has used so far: where that nears the time, the line is slower than it says."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _plug_in(self, device: str, host: namespaces.NamespaceHost, congestion: str) -> None:
        subprocess.run([find_program("ip"), "link", "set", device, "netns", str(host.pid)], check=True)
        for line in (["ip", "link", "set", device, "name", INTERFACE],
                     ["ip", "link", "set", INTERFACE, "txqueuelen", str(QUEUE_PACKETS), "mtu", str(PACKET_BYTES), "up"],
                     ["ip", "address", "add", f"{self.addresses[host.name]}/24", "dev", INTERFACE]):  # fmt: skip
            host.check(*line)
        if congestion:
            known = ALLOWED_CONGESTION.read_text().split()
            if congestion not in known:
                raise namespaces.NotMade(
                    f"making a line: --congestion must be one of those that this machine's kernel allows all users, {', '.join(known)}, "
                    f"but is {congestion}. As root: sysctl -w net.ipv4.tcp_allowed_congestion_control='{' '.join([*known, congestion])}'."
                )
            host.check("sh", "-c", f"echo {congestion} > {DEFAULT_CONGESTION}")


@dataclass(frozen=True)
class Raw:
    """What one stream of plain TCP got of a line: payload in bytes a second, and the least round trip that it saw."""

    rate: float
    round_trip_seconds: float


def raw_rate(
    line: Line, one: namespaces.NamespaceHost, other: namespaces.NamespaceHost, congestion: str = "cubic"
) -> Raw:
    """Has iperf3 send one way. Raises RuntimeError with its words if it finds no rate."""
    server = other.start("iperf3", "--server", "--one-off", stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + SECONDS_TO_START
    try:
        while True:
            asked = one.run("iperf3", "--client", line.addresses[other.name], "--json", "--congestion", congestion,
                            "--time", str(SECONDS_OF_RAW), "--omit", str(SECONDS_LEFT_OUT))  # fmt: skip
            report = json.loads(asked.stdout or "{}")
            if "error" not in report and "end" in report:
                return _raw_in(report)
            if time.monotonic() > deadline:  # before that its server may not listen yet
                raise RuntimeError(f"raw rate from '{one.name}' to '{other.name}': iperf3 must measure it, but says: "
                                   f"{report.get('error', asked.stderr)}")  # fmt: skip
            time.sleep(0.1)
    finally:
        if server.poll() is None:
            other.signal_to(server, signal.SIGKILL)
        server.wait()


def _raw_in(report: dict[str, Any]) -> Raw:
    end = report["end"]
    return Raw(end["sum_received"]["bits_per_second"] / 8, end["streams"][0]["sender"]["min_rtt"] * 1e-6)
