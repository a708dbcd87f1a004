"""Connections to an authority: who calls proves the job's secret first (`ringtrain.sealed`), and a stranger gets 32 random bytes."""

from __future__ import annotations

import contextlib
import errno
import secrets
import selectors
import socket
import time
from typing import Any

from ringtrain.sealed import ANOTHER_SECRET, AUTHORITY, NONCE_BYTES, RANK, BrokenSealError, Seal

MOST_STRANGERS = 64  # connections that have proven nothing yet; the next one takes the oldest's place
SECONDS_TO_PROVE = 10.0
MOST_UNSENT = 64 << 20  # bytes for a process that reads nothing
BYTES_AT_ONCE = 1 << 18
ENDED, BROKEN = "ended", "broken"  # its kernel says that the other end is closed; the network carries nothing


class Caller:
    """One connection. uid: of the process that has proven itself; "" before."""

    def __init__(self, connection: socket.socket, now: float):
        self.connection = connection
        self.since = now
        self.uid = ""
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.seal: Seal | None = None
        self.theirs = b""  # of its nonce, what has come
        self.unsent = bytearray(self.nonce)


class Callers:
    """All connections to a listener, by one thread."""

    def __init__(self, listener: socket.socket, secret: bytes):
        self._secret = secret
        self._listener = listener
        self._callers: set[Caller] = set()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def wait(self, seconds: float) -> list[tuple[Caller, dict[str, Any] | str]]:
        """What has been said until then, by processes that have the secret: an object; or ENDED, BROKEN for a connection's end."""
        events: list[tuple[Caller, dict[str, Any] | str]] = []
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.data is None:
                self._accept()
            elif key.data in self._callers:
                self._flush(key.data)
                events += [(key.data, said) for said in self.read(key.data)]
        for caller in [each for each in self._callers if self._is_late(each)]:
            self.drop(caller)
        return events

    def send(self, caller: Caller, said: dict[str, Any]) -> None:
        """Never waits; a connection whose other end reads nothing is dropped in the end."""
        if caller not in self._callers or caller.seal is None:
            return
        caller.unsent += caller.seal.seal(said)
        self._flush(caller)
        if len(caller.unsent) > MOST_UNSENT:
            self.drop(caller)

    def read(self, caller: Caller) -> list[dict[str, Any] | str]:
        """What has come of one, without waiting."""
        said: list[dict[str, Any] | str] = []
        while caller in self._callers:
            try:
                data = caller.connection.recv(BYTES_AT_ONCE)
                if not data:
                    raise ConnectionResetError
                said += self._hear(caller, data)
            except BlockingIOError:
                break
            except BrokenSealError:
                if not caller.uid:
                    with contextlib.suppress(OSError):
                        caller.connection.send(ANOTHER_SECRET)
                self.drop(caller)
                said.append(BROKEN)
            except OSError as error:
                self.drop(caller)
                said.append(ENDED if error.errno in (None, errno.ECONNRESET, errno.EPIPE) else BROKEN)
        return said

    def drop(self, caller: Caller) -> None:
        """Ends a connection, of which nothing is heard any more."""
        if caller in self._callers:
            self._callers.remove(caller)
            self._selector.unregister(caller.connection)
            caller.connection.close()

    def are_there(self) -> bool:
        """Whether some process that has proven itself is connected."""
        return any(caller.uid for caller in self._callers)

    def close(self) -> None:
        """Ends all connections, and listens no more."""
        for caller in list(self._callers):
            self.drop(caller)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        strangers = sorted((each for each in self._callers if not each.uid), key=lambda each: each.since)
        if len(strangers) >= MOST_STRANGERS:
            self.drop(strangers[0])
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller = Caller(connection, time.monotonic())
        self._callers.add(caller)
        self._selector.register(connection, selectors.EVENT_READ, caller)
        self._flush(caller)

    def _hear(self, caller: Caller, data: bytes) -> list[dict[str, Any]]:
        if caller.seal is None:
            missing = NONCE_BYTES - len(caller.theirs)
            caller.theirs, data = caller.theirs + data[:missing], data[missing:]
            if len(caller.theirs) < NONCE_BYTES:
                return []
            caller.seal = Seal(self._secret, caller.nonce + caller.theirs, AUTHORITY, RANK)
        said = caller.seal.read(data)
        if said and not caller.uid:
            caller.uid = str(said[0].get("uid", "")) or "?"
        return said

    def _is_late(self, caller: Caller) -> bool:
        return not caller.uid and time.monotonic() > caller.since + SECONDS_TO_PROVE

    def _flush(self, caller: Caller) -> None:
        """Sends what there is room for; the rest when there is room again. An end is found by whoever reads."""
        try:
            while caller.unsent:
                del caller.unsent[: caller.connection.send(caller.unsent[:BYTES_AT_ONCE])]
        except OSError:
            pass
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.unsent else 0)
        self._selector.modify(caller.connection, wanted, caller)
