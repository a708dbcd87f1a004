"""Both ends of connections that are proven (`ringtrain._rendezvous.handshake`): a server, by one thread, and who calls it.

Rank 0 serves while ranks meet, `ringtrain authority` as long as its job lives. A server has room for so many that have proven
nothing yet, for some seconds each. Where there is none, those who come wait in the kernel's queue until somebody has gone, or
has been there for LEAST_VISIT: of these one loses its place, any of them, so that a flood of strangers leaves a rank a chance
in each try. These are the rules of native/transport/tcp/door.h, too.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import itertools
import json
import os
import random
import selectors
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ringtrain._rendezvous.handshake import Answerer, Caller
from ringtrain._rendezvous.meeting import user_of

MOST_STRANGERS = 512  # connections that have proven nothing yet
LEAST_VISIT = 0.1  # seconds, before one of them loses its place
SECONDS_TO_PROVE = 10.0
SECONDS_OF_REST = 0.5  # without descriptors or memory for another connection
MOST_UNSENT = 64 << 20  # bytes for a process that reads nothing
BYTES_AT_ONCE = 1 << 18
ACCEPTS_IN_TURN = 64
ENDED, BROKEN = "ended", "broken"  # its kernel says that the other end is closed; the network carries nothing


class Connection:
    """One that a process has made to a server. name: what its owner calls it; "" at first."""

    def __init__(self, connection: socket.socket, secret: bytes):
        self.socket = connection
        self.since = time.monotonic()
        self.end = Answerer(secret)
        self.unsent = bytearray()
        self.name = ""


class Server:
    """All connections to some listeners, of a Unix socket those of this user. refused: how many had another secret."""

    def __init__(self, listeners: Sequence[socket.socket], secret: bytes):
        self.refused = 0
        self._secret = secret
        self._listeners = list(listeners)
        self._proven: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}  # the oldest first
        self._listens_at = 0.0  # again; infinite while it listens
        self._selector = selectors.DefaultSelector()
        for listener in self._listeners:
            listener.setblocking(False)
        self._listen()

    def wait(self, seconds: float) -> list[tuple[Connection, dict[str, Any] | str]]:
        """What has been said until then by processes that are proven: an object; or ENDED, BROKEN for a connection's end."""
        events: list[tuple[Connection, dict[str, Any] | str]] = []
        now = time.monotonic()
        oldest = next(iter(self._strangers), None)
        until = min(now + seconds, self._listens_at, oldest.since + SECONDS_TO_PROVE if oldest else float("inf"))
        for key, _ in self._selector.select(max(0.0, until - now)):
            if key.data is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]
            elif self._has(key.data):
                self._flush(key.data)
                events += [(key.data, said) for said in self._read_some(key.data) or ()]  # others have a turn, too
        now = time.monotonic()
        for late in list(itertools.takewhile(lambda each: now > each.since + SECONDS_TO_PROVE, self._strangers)):
            self.drop(late)
        if now >= self._listens_at:
            self._listen()
        return events

    def send(self, connection: Connection, said: dict[str, Any]) -> None:
        """Never waits; a connection whose other end reads nothing is dropped in the end."""
        self.send_all([connection], said)

    def send_all(self, connections: Iterable[Connection], said: dict[str, Any]) -> None:
        """`send` to several, which is written once."""
        text = json.dumps(said).encode()
        for connection in connections:
            if connection not in self._proven:
                continue
            connection.end.say_text(text)
            self._flush(connection)
            if len(connection.unsent) > MOST_UNSENT:
                self.drop(connection)

    def flush(self, seconds: float) -> None:
        """Returns once the kernel has all that was sent, or so many seconds later."""
        deadline = time.monotonic() + seconds
        while any(each.unsent for each in self._proven) and (left := deadline - time.monotonic()) > 0:
            self.wait(left)

    def read(self, connection: Connection) -> list[dict[str, Any] | str]:
        """All that has come of one, without waiting."""
        events: list[dict[str, Any] | str] = []
        while (said := self._read_some(connection)) is not None:
            events += said
        return events

    def drop(self, connection: Connection) -> None:
        """Ends a connection, of which nothing is heard any more."""
        if not self._has(connection):
            return
        self._leave_strangers(connection)
        self._proven.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def proven(self) -> list[Connection]:
        """All connections of processes that are proven."""
        return list(self._proven)

    def are_there(self) -> bool:
        """Whether some process that is proven is connected."""
        return bool(self._proven)

    def close(self) -> None:
        """Ends all connections, and listens no more."""
        for connection in [*self._proven, *self._strangers]:
            self.drop(connection)
        self._selector.close()
        for listener in self._listeners:
            listener.close()

    # ---- who comes ----

    def _has(self, connection: Connection) -> bool:
        return connection in self._proven or connection in self._strangers

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_IN_TURN):
            if self._listens_at != float("inf") or not self._has_room():
                return
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                self._rest(time.monotonic() + SECONDS_OF_REST)
                return
            if listener.family == socket.AF_UNIX and user_of(connection) != os.getuid():
                connection.close()
                continue
            self._let_in(connection)

    def _let_in(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stranger = Connection(connection, self._secret)
        self._strangers[stranger] = None
        self._selector.register(connection, selectors.EVENT_READ, stranger)

    def _has_room(self) -> bool:
        """Makes some. Where all are too young to go, nobody else is let in: ranks of a large world come all at once."""
        if len(self._strangers) < MOST_STRANGERS:
            return True
        least = time.monotonic() - LEAST_VISIT
        old = list(itertools.takewhile(lambda each: each.since <= least, self._strangers))
        if old:
            self.drop(random.choice(old))
        else:
            self._rest(next(iter(self._strangers)).since + LEAST_VISIT)
        return bool(old)

    def _rest(self, until: float) -> None:
        self._listens_at = until
        for listener in self._listeners:
            self._selector.unregister(listener)

    def _listen(self) -> None:
        self._listens_at = float("inf")
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def _leave_strangers(self, connection: Connection) -> None:
        if connection in self._strangers:
            del self._strangers[connection]
            if self._listens_at != float("inf"):
                self._listen()

    def _read_some(self, connection: Connection) -> list[dict[str, Any] | str] | None:
        """What the next bytes of one make whole; None if nothing has come."""
        if not self._has(connection):
            return None
        is_known = connection in self._proven
        try:
            data = connection.socket.recv(BYTES_AT_ONCE)
            if not data:
                raise ConnectionResetError
            return [*self._hear(connection, data)]
        except BlockingIOError:
            return None
        except ValueError:  # a HandshakeError, or no object
            end = BROKEN
            self._flush(connection)  # that it has another secret
        except OSError as error:
            end = ENDED if error.errno in (None, errno.ECONNRESET, errno.EPIPE) else BROKEN
        self.drop(connection)
        return [end] if is_known else []

    def _hear(self, connection: Connection, data: bytes) -> list[dict[str, Any]]:
        said = []
        try:
            said = connection.end.hear(data)
        except ValueError:
            self.refused += connection.end.has_more
            raise
        if connection.end.is_proven and connection in self._strangers:
            self._leave_strangers(connection)
            self._proven.add(connection)
        self._flush(connection)
        if not all(isinstance(each, dict) for each in said):
            raise ValueError
        return said

    def _flush(self, connection: Connection) -> None:
        """Sends what there is room for; the rest when there is room again. An end is found by whoever reads."""
        connection.unsent += connection.end.take()
        try:
            while connection.unsent:
                del connection.unsent[: connection.socket.send(connection.unsent[:BYTES_AT_ONCE])]
        except OSError:
            pass
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, wanted, connection)


class Client:
    """A connection to a server, of which both ends are proven. `say` is one thread's at a time, `receive` one thread's.

    Raises OSError, or HandshakeError, if they are not within so many seconds; the socket is closed then.
    """

    def __init__(self, connection: socket.socket, secret: bytes, seconds: float):
        self.socket = connection
        self._end = Caller(secret)
        self._early: list[Any] = []
        try:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._prove(time.monotonic() + seconds)
        except BaseException:
            connection.close()
            raise

    @staticmethod
    def to(family: int, where: Any, secret: bytes, seconds: float) -> Client:
        """A connection to a place, of a Unix socket if it is this user's. Raises as the constructor."""
        deadline = time.monotonic() + seconds
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(seconds)
            connection.connect(where)
            if family == socket.AF_UNIX and user_of(connection) != os.getuid():
                raise PermissionError("it belongs to another user")
        except BaseException:
            connection.close()
            raise
        return Client(connection, secret, deadline - time.monotonic())

    def _prove(self, deadline: float) -> None:
        self.socket.settimeout(max(0.001, deadline - time.monotonic()))
        self.socket.sendall(self._end.take())
        while not self._end.is_proven:
            try:
                self._early += self._next(deadline)
            except builtins.TimeoutError:
                raise ConnectionError("what listens there says nothing, and is none of this job") from None
            self.socket.sendall(self._end.take())

    def say(self, said: Any) -> None:
        """Raises OSError."""
        self._end.say(said)
        self.socket.sendall(self._end.take())

    def receive(self) -> list[Any]:
        """What the server has said, perhaps nothing that is whole; waits for it. Raises OSError, HandshakeError."""
        if self._early:
            said, self._early = self._early, []
            return said
        data = self.socket.recv(BYTES_AT_ONCE)
        if not data:
            raise ConnectionResetError("it has closed the connection")
        return self._end.hear(data)

    def receive_until(self, deadline: float) -> list[Any]:
        """What it says first. Raises as `receive`, and TimeoutError."""
        while not (said := self._next(deadline)):
            pass
        return said

    def _next(self, deadline: float) -> list[Any]:
        self.socket.settimeout(max(0.001, deadline - time.monotonic()))
        return self.receive()

    def close(self) -> None:
        self.socket.close()
