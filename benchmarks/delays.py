"""``python -m benchmarks delays``: how long a small message takes from one host to another, as a distribution.

Two hosts that this machine makes send each other 64 bytes by TCP in turn, each waiting in the kernel, so that being woken
counts. Half of each round trip is a delay. `bin/simulate --scale --delays FILE` draws from what is written here: one
delay in microseconds a line, quantiles at equal distances. As root.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

from ringtrain.bench import namespaces

ROUND_TRIPS, LEFT_OUT = 20_000, 1_000
QUANTILES = 1_000
PORT = 7411

ECHO = textwrap.dedent(f"""
    import socket
    listener = socket.create_server(("", {PORT}))
    print(flush=True)
    taken = listener.accept()[0]
    taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while message := taken.recv(64):
        taken.sendall(message)
""")
ASK = textwrap.dedent(f"""
    import socket, sys, time
    line = socket.create_connection((sys.argv[1], {PORT}))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range({ROUND_TRIPS}):
        begin = time.perf_counter()
        line.sendall(bytes(64))
        line.recv(64)
        print((time.perf_counter() - begin) * 5e5)
""")


def start(output: Path) -> int:
    """Measures, writes the quantiles, prints some, and returns the exit code."""
    if missing := namespaces.missing():
        print(f"benchmarks: {missing}", file=sys.stderr)
        return 2
    with namespaces.HostNetwork(dict.fromkeys(["one", "other"], "eth0"), useless=None) as network:
        one, other = network["one"], network["other"]
        server = other.start(sys.executable, "-c", ECHO, stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()  # it listens
        asked = one.run(sys.executable, "-c", ASK, other.address)
        server.wait()
    delays = sorted(map(float, asked.stdout.split()[LEFT_OUT:]))
    chosen = [delays[(2 * place + 1) * len(delays) // (2 * QUANTILES)] for place in range(QUANTILES)]
    head = "# Microseconds from one host to another, made by: python -m benchmarks delays\n"
    output.write_text(head + "".join(f"{delay:.2f}\n" for delay in chosen))
    print(
        "microseconds: "
        + ", ".join(f"{share:g} % {chosen[int(share * 10) - 1]:.1f}" for share in (1, 50, 90, 99, 99.9))
    )
    return 0
