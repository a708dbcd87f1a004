"""A world over TCP: ranks in processes of their own, which need no MPI and no launcher."""

from __future__ import annotations

import hmac
import os
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading

import pytest

from ringtrain._bootstrap import opening
from ringtrain._rendezvous import handshake
from ringtrain.errors import InvalidArgumentError, RingtrainError

PATIENCE = 120
TCP = b"rt-tcp-1"  # the core's protocol
# What each rank runs: it tells its addresses, hears everybody's, and works.
RANK = """
import sys, time
import numpy as np
import ringtrain as rt
from ringtrain._bootstrap import opening
from ringtrain._runtime.context import default, make_default

rank, options = int(sys.argv[1]), dict(each.split("=") for each in sys.argv[3:])
listener, addresses = opening.listen("127.0.0.1:0")
print(addresses, flush=True)
secret = bytearray.fromhex(sys.stdin.readline())
peers = sys.stdin.readline().split()
make_default(opening.open_tcp(listener, rank, peers, secret, 12345, options))
assert not any(secret)
{work}
"""
EXCHANGE = """
assert (rt.rank(), rt.size()) == (rank, len(peers))
for step in range(3):
    for count in (1, 1000, 3_000_000):
        x = np.full(count, rank + step, dtype=np.float32)
        assert (rt.allreduce(x, op=rt.Sum, name=f"x{count}") == sum(range(len(peers))) + step * len(peers)).all()
gathered = rt.allgather(np.full((rank + 1, 2), rank))
assert gathered.tolist() == [[other, other] for other in range(len(peers)) for _ in range(other + 1)]
for count in (10, 3_000_000):
    before, found = (rank - 1) % len(peers), np.zeros(count, np.float32)
    rt.send(np.full(count, rank, np.float32), (rank + 1) % len(peers))
    assert rt.receive(found) == before and (found == before).all()
print(rt.local_size(), rt.cross_size(), flush=True)
rt.shutdown()
"""


class Ranks:
    """Processes of one world; ended when the block is left."""

    def __init__(self, size: int, work: str, *options: str):
        self.secret = secrets.token_bytes(32)
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK.format(work=work), str(rank), "--", *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=dict(os.environ, OMP_NUM_THREADS="1"),
            )
            for rank in range(size)
        ]
        self.peers = [process.stdout.readline().strip() for process in self.processes]
        for process in self.processes:
            process.stdin.write(f"{self.secret.hex()}\n{' '.join(self.peers)}\n")
            process.stdin.flush()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def finish(self) -> list[str]:
        """What each rank has printed; all must end well."""
        found = []
        for process in self.processes:
            out, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, err
            found.append(out.strip())
        return found


@pytest.mark.parametrize(
    ("options", "seen"),
    [([], "3 1"), (["host_layout=1+1+1"], "1 3"), (["host_layout=2+1"], None)],
    ids=["one host", "three hosts", "two hosts"],
)
def test_three_ranks_meet_reduce_and_leave(options, seen):
    with Ranks(3, EXCHANGE, *options) as ranks:
        found = ranks.finish()
    assert seen is None or found == [seen] * 3


@pytest.mark.parametrize("streams", [1, 3])
def test_each_rank_opens_the_connections_that_were_asked_for(streams):
    """One for control to each of the two others and back, and as many for tensors as the option says."""
    work = EXCHANGE.replace(
        "rt.shutdown()",
        """
import os, time
rt.barrier()
def connections():
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # that by which the folder was read
            pass
    inodes = {link[8:-1] for link in links if link.startswith("socket:")}
    rows = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
    return sum(row[9] in inodes and row[3] == "01" for row in rows)
until = time.monotonic() + 20
while connections() != EXPECTED and time.monotonic() < until:
    time.sleep(0.01)  # of two ranks that have called each other, one connection is closed
print(connections(), flush=True)
rt.barrier()
rt.shutdown()
""".replace("EXPECTED", str(2 * (1 + streams))),
    )
    with Ranks(2, work, "host_layout=1+1", f"tcp_streams={streams}") as ranks:
        found = ranks.finish()
    assert found == [f"1 2\n{2 * (1 + streams)}"] * 2


def test_large_tensors_travel_over_all_connections_alike():
    """Of each message some, and the same of all together, though the first has room for all three pieces of a message.

    What has come at the moment, and when the second connection opens, is luck. So bytes count from when both have carried
    something, and once the peer's kernel has all of them; and there is one message at a time, for which both have room.
    """
    work = """
import collections, fcntl, os, socket, struct, termios
def sent():
    found = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        link = f"/proc/self/fd/{descriptor}"
        if not os.path.islink(link) or not os.readlink(link).startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            tcp = connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM
            if tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                while struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]:
                    time.sleep(0.001)
                told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
                found[descriptor] = struct.unpack_from("Q", told, 120)[0]  # tcpi_bytes_acked
    return found
pieces = np.ones(3 << 16, np.float32)
def send():
    before = sent()
    for root in range(2):
        rt.broadcast(pieces, root, name="pieces")
        rt.barrier()
    return sorted((bytes - before.get(each, 0), each) for each, bytes in sent().items())[-2:]
for turn in range(200):
    send()
    if rt.allreduce(sum(bytes > 200_000 for bytes in sent().values()), op=rt.Min, name="carried a piece") == 2:
        break
of_messages = [send() for turn in range(8)]
of_all = collections.Counter()
for of_one in of_messages:
    of_all.update({each: bytes for bytes, each in of_one})
print(min(fewer for (fewer, _), _ in of_messages), *sorted(of_all.values())[-2:], flush=True)
rt.barrier()
rt.shutdown()
"""
    with Ranks(2, work, "host_layout=1+1", "tcp_streams=2") as ranks:
        found = ranks.finish()
    piece = 1 << 18
    for of_one, fewer, more in (map(int, each.split()) for each in found):
        assert piece <= of_one < 2 * piece and 12 * piece <= fewer <= more < 13 * piece, found


@pytest.mark.parametrize("layout", ["3", "1+1+1"])
def test_a_killed_rank_ends_the_operations_of_the_others(layout):
    """By its lock in shared memory within a host, by the end of its connections between hosts; not by silence."""
    work = """
rt.allreduce(np.ones(1), name="met")
print("met", flush=True)
try:
    while True:
        rt.allreduce(np.ones(100_000, dtype=np.float32), name="on and on")
except rt.errors.PeerLostError as problem:
    print(problem, flush=True)
"""
    with Ranks(3, work, "dead_after_seconds=600", f"host_layout={layout}") as ranks:
        for process in ranks.processes:
            assert process.stdout.readline() == "met\n"
        ranks.processes[1].send_signal(signal.SIGKILL)
        for rank in (0, 2):
            assert "rank 1" in ranks.processes[rank].stdout.readline()


# Its worker sleeps on, as that of a data loader whose parent has just died.
FORKS = {
    "multiprocessing": """
import multiprocessing
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
worker.start()
print(worker.pid, flush=True)
""",
    "a child before its exec": """
import os, subprocess
def say_and_sleep():
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(600)
subprocess.Popen(["true"], preexec_fn=say_and_sleep)
""",
}


@pytest.mark.parametrize("forks", FORKS.values(), ids=list(FORKS))
def test_a_forked_child_does_not_hide_the_death_of_its_rank(forks):
    work = f"""
rt.allreduce(np.ones(1), name="met")
if rank == 1:
    {textwrap.indent(forks.strip(), "    ").strip()}
print("met", flush=True)
try:
    while True:
        rt.allreduce(np.ones(1000, dtype=np.float32), name="on and on")
except rt.errors.PeerLostError as problem:
    print(problem, flush=True)
"""
    with Ranks(3, work, "dead_after_seconds=600", "host_layout=1+1+1") as ranks:
        worker = int(ranks.processes[1].stdout.readline())
        try:
            for process in (ranks.processes[0], ranks.processes[2]):
                assert process.stdout.readline() == "met\n"
            ranks.processes[1].send_signal(signal.SIGKILL)
            for rank in (0, 2):
                assert "rank 1" in ranks.processes[rank].stdout.readline()
            assert os.path.exists(f"/proc/{worker}"), "the worker must outlive its rank here"
        finally:
            os.kill(worker, signal.SIGKILL)


# Rank 1 waits for the others, and so does rank 0, or asks for something else; rank 2 takes part or leaves. Rank 0 ends by the error.
ENDS = """
mine = np.ones(4, np.float64 if rank == 0 and {differs} else np.float32)
if rank != 1:
    sys.stdin.readline()
if rank == 2 and not {differs}:
    rt.shutdown()
    sys.exit(0)
handle = rt.allreduce_async(mine, name="x")
if rank == 1:
    time.sleep(0.3)
    print("asked", flush=True)
try:
    rt.synchronize(handle)
except rt.RingtrainError as problem:
    print(type(problem).__name__, problem, flush=True)
    if rank == 0:
        default().abort(f"rank 0 ended with an uncaught exception: {{problem}}")
        time.sleep(0.5)
import os
os._exit(0)
"""


@pytest.mark.parametrize(("error", "layout"), [("ClosedError", "3"), ("MismatchError", "1+2")])
def test_an_end_does_not_overtake_what_was_decided_before(layout, error):
    """Rank 1 stands still meanwhile: when it goes on, the notice of the end is there as well as its error."""
    work = ENDS.format(differs=error == "MismatchError")
    with Ranks(3, work, "dead_after_seconds=600", f"host_layout={layout}") as ranks:
        assert ranks.processes[1].stdout.readline() == "asked\n"
        ranks.processes[1].send_signal(signal.SIGSTOP)
        for rank in (2, 0):
            ranks.processes[rank].stdin.write("go\n")
            ranks.processes[rank].stdin.flush()
        said = ranks.processes[0].stdout.readline()
        ranks.processes[0].wait(timeout=PATIENCE)
        ranks.processes[1].send_signal(signal.SIGCONT)
        assert said.startswith(f"{error} allreduce 'x'") and ranks.processes[1].stdout.readline() == said


# Works until it reads a line.
WORKS = """
import threading
stop = []
threading.Thread(target=lambda: stop.append(sys.stdin.readline()), daemon=True).start()
print("working", flush=True)
while not rt.broadcast_object(bool(stop), root_rank=0, name="stop"):
    assert (rt.allreduce(np.full(1000, rank, np.float32), op=rt.Sum, name="sum") == 1).all()
print("ended well", flush=True)
rt.shutdown()
"""


def greeting_of(caller: int, called: int, nonce: bytes, epoch: int = 12345, lane: int = 0) -> bytes:
    """What a rank says first, as native/transport/tcp/hello.h has it."""
    return TCP + nonce + claim_of(caller, called, epoch, lane)


def claim_of(caller: int, called: int, epoch: int = 12345, lane: int = 0) -> bytes:
    return struct.pack("<QII", epoch, caller << 8 | lane, called)


def talk(address: str, *words: bytes) -> bytes:
    """What a rank answers to somebody who says these words, each after an answer to the one before."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        heard = b""
        for number, word in enumerate(words):
            connection.sendall(word)
            if number < len(words) - 1:
                heard += connection.recv(1000)
        try:
            while more := connection.recv(1000):
                heard += more
        except ConnectionResetError:
            pass
    return heard


def test_strangers_learn_a_random_number_and_disturb_nobody():
    """Neither who knows no secret, nor who repeats or sends back what was said, or claims another epoch, version or rank."""
    with Ranks(2, WORKS) as ranks:
        assert [process.stdout.readline() for process in ranks.processes] == ["working\n"] * 2
        for rank, address in enumerate(ranks.peers):
            other = 1 - rank
            greeting = greeting_of(other, rank, secrets.token_bytes(16))
            wrong = [
                hmac.digest(handshake.key_of(bytes(32)), b"proof" + greeting, "sha256"),
                bytes(32),
                secrets.token_bytes(32),
            ]
            nonces = [talk(address, greeting, proof) for proof in wrong]
            assert {len(nonce) for nonce in nonces} == {16} and len(set(nonces)) == 3
            for claim in (
                greeting_of(other, rank, bytes(16), epoch=12344),
                greeting_of(rank, rank, bytes(16)),
                greeting_of(2, rank, bytes(16)),
                greeting_of(other, other, bytes(16)),
                greeting.replace(b"rt-tcp-1", b"rt-tcp-0"),
                b"GET / HTTP/1.1\r\nHost: somebody\r\nAccept: */*\r\n\r\n",
            ):
                assert talk(address, claim) == b"", claim
        ranks.processes[0].stdin.write("stop\n")
        ranks.processes[0].stdin.flush()
        said = [process.communicate(timeout=PATIENCE) for process in ranks.processes]
    assert [(process.returncode, out) for process, (out, _) in zip(ranks.processes, said, strict=True)] == [
        (0, "ended well\n")
    ] * 2, said
    for rank, (_, err) in enumerate(said):
        assert (
            len(re.findall(rf"rank {rank}: connections must be of this job, but 1 turned away were not", err)) == 1
        ), err
        assert ranks.secret.hex() not in err


def test_the_first_stranger_is_told_of_at_once_and_the_rest_with_their_number():
    """Whatever the program does meanwhile; tests/native/tcp_hello_test.cc has the minute between."""
    work = WORKS.replace(
        "stop = []",
        "import os\nfrom ringtrain._binding import log\nfrom ringtrain._binding._native import lib\n"
        "from ringtrain._runtime import reports\n"
        "lib.rt_ask_through(default().native, "
        "reports.answer_requests(0, lambda: log.drain(default().native)))\nstop = []",
    )  # as init() does
    with Ranks(2, work) as ranks:
        assert [process.stdout.readline() for process in ranks.processes] == ["working\n"] * 2
        for turn in range(3):
            # As long as a greeting, whose end a rank awaits for 5 s.
            assert talk(ranks.peers[0], b"GET / HTTP/1.1\r\nHost: somebody\r\nAccept: */*\r\n\r\n") == b""
            if turn == 0:
                said = ranks.processes[0].stderr.readline()
                assert (
                    "rank 0: connections must be of this job, but 1 turned away were not, the last from 127.0.0.1"
                    in said
                )
        ranks.processes[0].stdin.write("stop\n")
        ranks.processes[0].stdin.flush()
        said = [process.communicate(timeout=PATIENCE)[1] for process in ranks.processes]
    assert said[0].count("connections must be") == 1 and "but 2 turned away were not" in said[0], said[0]


def test_a_rank_proves_itself_to_those_who_know_the_secret():
    """By the twin of native/transport/tcp/hello.h; a proof serves once."""
    with Ranks(2, WORKS) as ranks:
        for process in ranks.processes:
            assert process.stdout.readline() == "working\n"
        host, _, port = ranks.peers[0].rpartition(":")
        caller = handshake.Caller(ranks.secret, claim_of(1, 0, lane=1), TCP)
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            greeting = caller.take()
            connection.sendall(greeting)
            caller.hear(connection.recv(16, socket.MSG_WAITALL))
            proof = caller.take()
            connection.sendall(proof)
            caller.hear(connection.recv(32, socket.MSG_WAITALL))
        assert caller.is_proven
        assert len(talk(ranks.peers[0], greeting, proof)) == 16  # said again, after another challenge


def test_a_rank_calls_and_believes_the_twin_that_knows_the_secret():
    secret = secrets.token_bytes(32)
    with socket.create_server(("127.0.0.1", 0)) as peer:
        heard: list[bytes] = []

        def answer() -> None:
            connection, _ = peer.accept()
            answerer = handshake.Answerer(secret, TCP)
            with connection:
                while not answerer.is_proven:
                    answerer.hear(connection.recv(64))
                    connection.sendall(answerer.take())
                heard.append(answerer.claim)
                heard.append(connection.recv(64))  # a record: it believes the answer

        thread = threading.Thread(target=answer)
        thread.start()
        listener, own = opening.listen("127.0.0.1:0")
        peers = [f"127.0.0.1:{peer.getsockname()[1]}", own]
        with pytest.raises(RingtrainError):
            opening.open_tcp(listener, 1, peers, bytearray(secret), 12345, {"start_timeout_seconds": "5"})
        thread.join()
    assert heard[0] == claim_of(1, 0) and len(heard[1]) > 32


def test_what_cannot_be_listened_on_or_opened_is_refused():
    with pytest.raises(InvalidArgumentError, match="expected an IP address and a port"):
        opening.listen("localhost:4711")
    with pytest.raises(InvalidArgumentError, match="expected the address of one interface"):
        opening.listen("0.0.0.0:0")
    listener, addresses = opening.listen("127.0.0.1:0")
    with pytest.raises(InvalidArgumentError, match="the secret must have 32 bytes, but has 5"):
        opening.open_tcp(listener, 0, [addresses], bytearray(b"short"), 1, {})
    secret = bytearray(secrets.token_bytes(32))
    with pytest.raises(InvalidArgumentError, match=r"rank must be in \[0, 1\), got 1"):
        opening.open_tcp(listener, 1, [addresses], secret, 1, {})
    assert not any(secret)
