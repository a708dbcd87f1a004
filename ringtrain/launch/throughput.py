"""What the ways between neighbours of a ring of hosts carry: bytes for a fixed time, by TCP or by messages of MPI.

A time and not a number of bytes: it is as short on a slow way, and all ways that are measured at once begin and end together.
Where TCP connects the ranks, connections of this module carry the bytes, one for each that the job has between two ranks: over
the same networks, and within the same ports. `examine` decides who sends to whom; one rank of each host takes part.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ringtrain.launch.agent.host_networks import bind_within, new_socket

SWAPS, FEWEST_SWAPS = 50, 3  # by which a latency is measured
SECONDS_OF_SWAPS = 0.3  # at most
SECONDS_TO_OPEN = 10.0
SECONDS_TO_SAY_HELLO = 2.0
SECONDS_OF_SILENCE = 10.0  # on a way that carries nothing any more
FILL = 0.25  # of the time: what arrives then has filled buffers, and may have come faster than it goes on
CHUNK_BYTES, READ_BYTES = 256 << 10, 1 << 20
MOST_UNSENT = 256 << 10  # what is written and not sent, which the way still has to carry when the time is over
END = b"\1"  # behind zeros
TOKEN_BYTES = 16
HELLO = struct.Struct(f"!{TOKEN_BYTES}sHH")  # token, the caller's place, which of its connections


def rate_of(marks: Sequence[tuple[float, int]], seconds: float) -> float:
    """Bytes a second of what arrived while all sent: (time, bytes by then), ascending; pure.

    The beginning fills buffers on the way; what comes after `seconds` may have the way to itself.
    """
    if not marks:
        return 0.0
    start = marks[0][0]
    steady = [mark for mark in marks if start + FILL * seconds <= mark[0] <= start + seconds]
    if len(steady) > 1 and steady[-1][0] - steady[0][0] >= FILL * seconds:
        return (steady[-1][1] - steady[0][1]) / (steady[-1][0] - steady[0][0])
    (first, before), (last, after) = marks[0], marks[-1]
    return (after - before) / (last - first) if last > first else after / seconds


class Throughput(Protocol):
    """One host's part; the hosts are named by their places in the ring.

    All hosts meet between two calls: what is sent for the next one must not arrive behind the end of the last.
    """

    def latency(self, peer: int, leads: bool) -> float:
        """Seconds that a byte takes to a neighbour; called by both, of which one leads."""

    def carry(self, to: int | None, source: int | None, seconds: float) -> float:
        """Sends to one neighbour for so long, if any, while another one, or the same, sends to this host; bytes a second that
        came from there."""

    def close(self) -> None:
        """Ends it."""


def _lead(say: Callable[[bytes], object], hear: Callable[[], object]) -> float:
    """Half of the time from a byte to its answer; ends the other side's part."""
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < SWAPS and (len(taken) < FEWEST_SWAPS or time.perf_counter() - begin < SECONDS_OF_SWAPS):
        start = time.perf_counter()
        say(b"\0")
        hear()
        taken.append(time.perf_counter() - start)
    say(END)
    return statistics.median(taken) / 2


# ---- TCP ----


class Listeners:
    """Where the neighbour before this host in the ring calls it: one for each of its networks."""

    def __init__(self, listens: str):
        """listens: as RINGTRAIN_LISTEN says it, such as 10.0.0.1:0,[fd00::1]:20000-20999."""
        self.sockets = [_listen_at(each) for each in listens.split(",")]
        self.addresses: list[tuple[str, int]] = [each.getsockname()[:2] for each in self.sockets]

    def close(self) -> None:
        """Stops listening."""
        for each in self.sockets:
            each.close()


def _listen_at(text: str) -> socket.socket:
    address, _, ports = text.rpartition(":")
    address, (first, _, last) = address.strip("[]"), ports.partition("-")
    listener = bind_within(address, (int(first), int(last or first)))
    if listener is None:
        raise OSError(
            f"address '{address}': doctor must be able to listen there at a port of {ports}, but all are taken. "
            "Widen RINGTRAIN_PORT_RANGE."
        )
    return listener


class TcpThroughput:
    """By TCP. Each host calls the next one in the ring, which knows by a token that it is of this measurement."""

    def __init__(
        self,
        place: int,
        listeners: Listeners,
        addresses: Sequence[Sequence[tuple[str, int]]],
        token: bytes,
        streams: int = 1,
    ):
        """addresses: where each host listens, by place. streams: connections over each network."""
        hosts = len(addresses)
        after, before = (place + 1) % hosts, (place - 1) % hosts
        self._connections: dict[int, list[socket.socket]] = {}
        own = [address for address, _ in addresses[place]]
        if hosts > 2 or place == 0:  # two hosts have one way between them
            called = list(enumerate(addresses[after])) * streams
            self._connections[after] = [
                _call(at, own[link] if len(own) == len(addresses[after]) else "", HELLO.pack(token, place, number))
                for number, (link, at) in enumerate(called)
            ]
        if hosts > 2 or place == 1:
            self._connections[before] = _answer(listeners, token, before, len(own) * streams)
        listeners.close()

    def close(self) -> None:
        for each in self._connections.values():
            for connection in each:
                connection.close()

    def latency(self, peer: int, leads: bool) -> float:
        connection = self._connections[peer][0]
        connection.setblocking(True)
        connection.settimeout(SECONDS_OF_SILENCE)
        if leads:
            return _lead(connection.sendall, lambda: connection.recv(1))
        while (byte := connection.recv(1)) not in (END, b""):
            connection.sendall(byte)
        return 0.0

    def carry(self, to: int | None, source: int | None, seconds: float) -> float:
        sender = threading.Thread(target=_send, args=(self._connections[to], seconds)) if to is not None else None
        if sender is not None:
            sender.start()
        marks = _receive(self._connections[source]) if source is not None else []
        if sender is not None:
            sender.join()
        return rate_of(marks, seconds)


def _call(at: tuple[str, int], own: str, hello: bytes) -> socket.socket:
    connection = new_socket(at[0])
    connection.settimeout(SECONDS_TO_OPEN)
    if own:
        connection.bind((own, 0))
    connection.connect(at)
    connection.sendall(hello)
    return _prepared(connection)


def _answer(listeners: Listeners, token: bytes, caller: int, wanted: int) -> list[socket.socket]:
    """The caller's connections, in its order. Whoever says anything else is turned away."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + SECONDS_TO_OPEN
    with selectors.DefaultSelector() as selector:
        for listener in listeners.sockets:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ, listener)
        while len(found) < wanted:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"links: expected the host before this one to connect within {SECONDS_TO_OPEN:.0f} s. "
                    "Look for a firewall, or name another network: --network-interfaces"
                )
            for key, _ in ready:
                try:
                    connection, _ = key.data.accept()
                except OSError:  # it has gone
                    continue
                number = _hear(connection, token, caller)
                if number is None or number in found:
                    connection.close()
                else:
                    found[number] = _prepared(connection)
    return [found[number] for number in sorted(found)]


def _hear(connection: socket.socket, token: bytes, caller: int) -> int | None:
    """Which of the caller's connections it is; None if it is none."""
    connection.settimeout(SECONDS_TO_SAY_HELLO)
    said = b""
    try:
        while len(said) < HELLO.size:
            part = connection.recv(HELLO.size - len(said))
            if not part:
                return None
            said += part
    except OSError:
        return None
    given, place, number = HELLO.unpack(said)
    return number if hmac.compare_digest(given, token) and place == caller else None


def _prepared(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MOST_UNSENT)
    return connection


def _send(connections: Sequence[socket.socket], seconds: float) -> None:
    """Zeros for so long over whichever connection takes them, then an end over each."""
    zeros = memoryview(bytes(CHUNK_BYTES))
    end = time.monotonic() + seconds
    try:
        with selectors.DefaultSelector() as selector:
            for connection in connections:
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_WRITE, connection)
            while (left := end - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    with contextlib.suppress(BlockingIOError):
                        key.data.send(zeros)
        for connection in connections:
            connection.settimeout(SECONDS_OF_SILENCE)
            connection.sendall(END)
    except OSError:  # as the receiver sees
        pass


def _receive(connections: Sequence[socket.socket]) -> list[tuple[float, int]]:
    """Until the end of each has come: when how many bytes had arrived. Nothing if one carries no more."""
    buffer, arrived = bytearray(READ_BYTES), 0
    marks: list[tuple[float, int]] = []
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, connection)
        while selector.get_map():
            ready = selector.select(SECONDS_OF_SILENCE)
            if not ready:
                return []
            for key, _ in ready:
                try:
                    count = key.data.recv_into(buffer)
                except BlockingIOError:
                    continue
                except OSError:
                    return []
                arrived += count
                marks.append((time.monotonic(), arrived))
                if count == 0:
                    return []
                if buffer[count - 1] == END[0]:
                    selector.unregister(key.data)
    return marks


# ---- MPI ----

FIRST_CHUNK_BYTES, LATER_CHUNK_BYTES = 64 << 10, 1 << 20  # later: once it is known that the way is no slow one
BYTES_UNTIL_LATER = 4 << 20
CHUNKS = 16  # under way at most
SWAP, CHUNK, ARRIVED = 11, 12, 13  # tags
SECONDS_BETWEEN_LOOKS = 5e-5


class MpiThroughput:
    """By messages of MPI, whatever that sends them over."""

    def __init__(self, ranks: Sequence[int]):
        """ranks: that which takes part, by place."""
        from mpi4py import MPI

        self._world, self._ranks = MPI.COMM_WORLD, ranks

    def close(self) -> None:
        pass

    def latency(self, peer: int, leads: bool) -> float:
        rank, byte = self._ranks[peer], bytearray(1)
        if leads:
            return _lead(lambda said: self._world.Send(said, rank, SWAP), lambda: self._world.Recv(byte, rank, SWAP))
        while self._world.Recv(byte, rank, SWAP) or byte != END:
            self._world.Send(byte, rank, SWAP)
        return 0.0

    def carry(self, to: int | None, source: int | None, seconds: float) -> float:
        sending = _MpiSending(self._world, self._ranks[to], seconds) if to is not None else None
        receiving = _MpiReceiving(self._world, self._ranks[source]) if source is not None else None
        parts = [part for part in (sending, receiving) if part is not None]
        while parts:
            moved = [part.move() for part in parts]
            parts = [part for part in parts if not part.is_over]
            if not any(moved):
                time.sleep(SECONDS_BETWEEN_LOOKS)  # other ranks may need this core
        return rate_of(receiving.marks, seconds) if receiving is not None else 0.0


class _MpiSending:
    """Chunks for so long, no more of them under way than have arrived in half of the time; then an end for each of those
    that the receiver waits for."""

    def __init__(self, world: Any, rank: int, seconds: float):
        self.is_over = False
        self._world, self._rank, self._end = world, rank, time.monotonic() + seconds
        self._zeros = np.zeros(LATER_CHUNK_BYTES, np.uint8)
        self._sends: list[Any] = []
        self._answers: list[tuple[Any, int]] = []  # requests for the words that a chunk has arrived, and its bytes
        self._arrived = self._under_way = 0
        self._has_ended = False

    def move(self) -> bool:
        """Does what can be done at once; whether there was anything."""
        moved = False
        while self._answers and self._answers[0][0].Test():
            _, count = self._answers.pop(0)
            self._arrived, self._under_way, moved = self._arrived + count, self._under_way - count, True
        self._sends = [request for request in self._sends if not request.Test()]
        if time.monotonic() < self._end:
            most = max(4 * FIRST_CHUNK_BYTES, self._arrived // 2)
            while self._under_way < most and len(self._answers) < CHUNKS:
                self._send(FIRST_CHUNK_BYTES if self._arrived < BYTES_UNTIL_LATER else LATER_CHUNK_BYTES)
                moved = True
        elif not self._has_ended:
            self._has_ended = moved = True
            self._sends += [self._world.Isend(self._zeros[:1], self._rank, CHUNK) for _ in range(CHUNKS)]
        self.is_over = self._has_ended and not self._sends and not self._answers
        return moved

    def _send(self, count: int) -> None:
        self._answers.append((self._world.Irecv(np.zeros(1, np.uint8), self._rank, ARRIVED), count))
        self._sends.append(self._world.Isend(self._zeros[:count], self._rank, CHUNK))
        self._under_way += count


class _MpiReceiving:
    """Takes chunks, each into the buffer that has waited longest, until as many ends have come as there are buffers."""

    def __init__(self, world: Any, rank: int):
        self.is_over = False
        self.marks: list[tuple[float, int]] = []
        self._world, self._rank = world, rank
        self._buffers = np.zeros((CHUNKS, LATER_CHUNK_BYTES), np.uint8)
        self._requests = [world.Irecv(buffer, rank, CHUNK) for buffer in self._buffers]
        self._words: list[Any] = []
        self._next = self._ends = self._bytes = 0

    def move(self) -> bool:
        """Does what can be done at once; whether there was anything."""
        from mpi4py import MPI

        moved, status = False, MPI.Status()
        while self._ends < CHUNKS and self._requests[self._next].Test(status):
            moved = True
            count = status.Get_count(MPI.BYTE)
            if count == 1:
                self._ends += 1
            else:
                self._bytes += count
                self.marks.append((time.monotonic(), self._bytes))
                self._words.append(self._world.Isend(np.zeros(1, np.uint8), self._rank, ARRIVED))
                self._requests[self._next] = self._world.Irecv(self._buffers[self._next], self._rank, CHUNK)
            self._next = (self._next + 1) % CHUNKS
        self._words = [request for request in self._words if not request.Test()]
        self.is_over = self._ends == CHUNKS and not self._words
        return moved
