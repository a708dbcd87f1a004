"""How ranks meet at "host:port": rank 0 listens there, the others call it, and it answers all when the last one has come.

Both ends prove the secret that the ranks were given, by HMAC-SHA-256 over both nonces and what is said; nothing that was
recorded serves again, and the secret itself does not travel. Ranks without a secret meet on one host alone, by a Unix
socket under the port's number, whose ends are told each other's user by the kernel.
"""

import builtins
import contextlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ringtrain.errors import InvalidArgumentError, TimeoutError
from ringtrain.introducing import (
    A_RANK_EACH,
    ONE_SECRET,
    Answer,
    Call,
    answer_to,
    answer_to_the_present,
    introduction,
    read_call,
)
from ringtrain.meeting import SECONDS_FOR_THE_ANSWER, Introduction, named, of_the_late, user_of

NONCE_BYTES = 32
PROOF_BYTES = 32
LONGEST_CALL = 16 << 10
LONGEST_ANSWER = 64 << 20
MOST_STRANGERS = 64  # connections that have proven nothing yet; the next one takes the oldest's place
SECONDS_TO_PROVE = 10.0
SECONDS_TO_ANSWER = 1.0  # of rank 0, on this host
SECONDS_TO_SEND = 5.0  # the answer to one rank, which reads nothing else
SECONDS_BETWEEN_CALLS = (0.02, 0.5)  # at first, and at most
_FRAME = struct.Struct("!I")
_HEAD_BYTES = NONCE_BYTES + PROOF_BYTES + _FRAME.size
_ANOTHER_SECRET = b"another secret"  # in the place of a proof


class Address(NamedTuple):
    """Where rank 0 listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> Address | None:
    """ "host:port", "10.0.0.1:4711" or "[fd00::1]:4711"; None if the text is none of these."""
    matched = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/\[\]]+)):([0-9]{1,5})", text)
    if not matched or not 0 < int(matched[3]) < 65536:
        return None
    return Address(matched[1] or matched[2], int(matched[3]))


def meet(address: Address, call: Call, secret: bytes) -> Introduction:
    """Waits until all ranks have come, and returns what they were told.

    Args:
        address: the same on all ranks, rank 0's.
        call: this rank's.
        secret: 32 bytes that all ranks know; b"" on the loopback, for ranks of one user.

    Raises:
        InvalidArgumentError: rank 0 cannot listen there, another secret is in use, or the ranks do not fit together.
        TimeoutError: some rank did not come; the text names it.
    """
    if not secret and not is_loopback(address):
        raise InvalidArgumentError(
            f"init: secret must be given where ranks meet at '{address}', but is not, and whoever reaches that port could "
            "join. Give all ranks the same 32 bytes (secrets.token_bytes), or a text in RINGTRAIN_SECRET, such as that of: "
            "openssl rand -hex 32"
        )
    answer = _serve(address, call, secret) if call["rank"] == 0 else _ask(address, call, secret)
    if "late" in answer:
        raise TimeoutError(answer["late"])
    if "refusal" in answer:
        raise InvalidArgumentError(answer["refusal"])
    return introduction(call["rank"], answer, secret)


def is_loopback(address: Address) -> bool:
    """Whether it can be reached on this host alone."""
    try:
        return all(ipaddress.ip_address(where[0]).is_loopback for _, where in _resolved(address))
    except OSError:  # nobody knows the name yet
        return False


def names_this_host(address: Address) -> bool:
    """Whether it is written as one that means another host to each host; pure."""
    try:
        return address.host == "localhost" or ipaddress.ip_address(address.host).is_loopback
    except ValueError:  # a name, which a host may have of itself
        return False


# ---- rank 0 ----


class _Caller:
    """A connection to rank 0, which has proven nothing as long as `call` is None."""

    def __init__(self, connection: socket.socket, now: float):
        self.connection = connection
        self.since = now
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.theirs = b""  # its nonce
        self.read = b""
        self.call: Call | None = None


def _serve(address: Address, own: Call, secret: bytes) -> Answer:
    """Hears all ranks' calls, and answers them at once. Returns the answer."""
    with _listening(address, secret) as listener, contextlib.closing(_Callers(own, secret)) as callers:
        callers.hear_all(listener)
        answer = callers.answer()
        callers.tell(answer)
        return answer


class _Callers:
    """Who has called rank 0: ranks, which have proven themselves, and strangers."""

    def __init__(self, own: Call, secret: bytes):
        self._own = own
        self._secret = secret
        self._ranks: dict[int, _Caller] = {}
        self._strangers: list[_Caller] = []
        self._with_another_secret = 0
        self._twice: set[int] = set()  # ranks as which two processes have called
        self._deadline = time.monotonic() + own["seconds"]
        self._selector = selectors.DefaultSelector()

    def hear_all(self, listener: socket.socket) -> None:
        """Returns when all ranks have come, or one of them has waited long enough, or does not fit."""
        self._selector.register(listener, selectors.EVENT_READ)
        while not self._is_complete() and (left := self._deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(left, 1.0)):
                if key.data is None:
                    self._accept(listener)
                else:
                    self._hear(key.data)
            for caller in [each for each in self._strangers if time.monotonic() > each.since + SECONDS_TO_PROVE]:
                self._drop(caller)

    def answer(self) -> Answer:
        """For all who have come."""
        if self._is_complete():
            return answer_to(self._calls(), self._own["size"])
        twice = f"; {named(sorted(self._twice))} did so twice" if self._twice else ""
        if self._twice:
            return answer_to_the_present(self._calls(), self._own["size"], twice, A_RANK_EACH)
        if self._with_another_secret:
            others = f"; connections with another secret: {self._with_another_secret}"
            return answer_to_the_present(self._calls(), self._own["size"], others, ONE_SECRET)
        return answer_to_the_present(self._calls(), self._own["size"])

    def tell(self, answer: Answer) -> None:
        """Sends it to the ranks that are there."""
        for caller in self._ranks.values():
            with contextlib.suppress(OSError):  # it has ended; the others hear of that when they connect to it
                caller.connection.settimeout(SECONDS_TO_SEND)
                caller.connection.sendall(_sealed(caller, answer, self._secret))

    def close(self) -> None:
        for caller in [*self._ranks.values(), *self._strangers]:
            caller.connection.close()
        self._selector.close()

    def _calls(self) -> dict[int, Call]:
        return {0: self._own, **{rank: caller.call for rank, caller in self._ranks.items() if caller.call}}

    def _is_complete(self) -> bool:
        calls = self._calls()
        return len(calls) == self._own["size"] or any(call["size"] != self._own["size"] for call in calls.values())

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if not self._secret and user_of(connection) != os.getuid():
            connection.close()
            return
        if len(self._strangers) == MOST_STRANGERS:
            self._drop(self._strangers[0])
        connection.setblocking(False)
        caller = _Caller(connection, time.monotonic())
        self._strangers.append(caller)
        self._selector.register(connection, selectors.EVENT_READ, caller)
        with contextlib.suppress(OSError):
            connection.send(caller.nonce)

    def _hear(self, caller: _Caller) -> None:
        """Reads what has come."""
        try:
            data = caller.connection.recv(LONGEST_CALL)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.read += data
        if not data or caller.call is not None or len(caller.read) > _HEAD_BYTES + LONGEST_CALL:
            self._drop(caller)  # a rank that has ended may come again
            return
        said = caller.read[_HEAD_BYTES:]
        if len(caller.read) < _HEAD_BYTES or len(said) < _FRAME.unpack_from(caller.read, _HEAD_BYTES - _FRAME.size)[0]:
            return
        theirs, proof = caller.read[:NONCE_BYTES], caller.read[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES]
        if not hmac.compare_digest(proof, _proof(self._secret, b"caller", caller.nonce, theirs, said)):
            self._with_another_secret += 1
            with contextlib.suppress(OSError):
                caller.connection.send(_ANOTHER_SECRET.ljust(PROOF_BYTES + _FRAME.size, b"\0"))
            self._drop(caller)
            return
        caller.theirs, told = theirs, json.loads(said)
        self._deadline = min(self._deadline, time.monotonic() + told["left"])
        self._admit(caller, read_call(told, self._own["size"]))

    def _admit(self, caller: _Caller, call: Call | None) -> None:
        """Takes a rank in, unless another process is there as this rank."""
        if call is None or call["rank"] in self._calls():
            rank = call["rank"] if call else 0
            self._twice.add(rank)
            text = f"init: one process of rank {rank} must call init() at a time, but two have. {A_RANK_EACH}"
            with contextlib.suppress(OSError):
                caller.connection.send(_sealed(caller, {"refusal": text}, self._secret))
            self._drop(caller)
            return
        self._strangers.remove(caller)
        caller.call = call
        self._ranks[call["rank"]] = caller

    def _drop(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        caller.connection.close()
        if caller in self._strangers:
            self._strangers.remove(caller)
        elif caller.call:
            del self._ranks[caller.call["rank"]]


@contextlib.contextmanager
def _listening(address: Address, secret: bytes) -> Iterator[socket.socket]:
    try:
        if secret:
            family, where = _place_to_listen(address)
        else:
            family, where = socket.AF_UNIX, _unix_name(address)
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            if secret:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(1024)
            listener.setblocking(False)
            yield listener
    except OSError as error:
        raise InvalidArgumentError(
            f"init: rendezvous '{address}' must be an address of rank 0's host with a free port, but: "
            f"{error.strerror or error}. Name rank 0's host and another port, and let one process be rank 0."
        ) from None


def _sealed(caller: _Caller, answer: Answer, secret: bytes) -> bytes:
    said = json.dumps(answer).encode()
    return _proof(secret, b"rank 0", caller.theirs, caller.nonce, said) + _FRAME.pack(len(said)) + said


# ---- the other ranks ----


def _ask(address: Address, call: Call, secret: bytes) -> Answer:
    """Calls rank 0 until it hears, and waits for its answer."""
    deadline, pause = time.monotonic() + call["seconds"], SECONDS_BETWEEN_CALLS[0]
    while True:
        try:
            return _call_once(address, call, secret, deadline)
        except OSError as error:  # it does not listen yet, or has ended
            why = error.strerror or str(error)
        if is_loopback(address) and _listens(_other_place(address, secret)):
            with_one, without = (call["rank"], 0) if secret else (0, call["rank"])
            raise InvalidArgumentError(
                f"init: secret must be given on all ranks that meet at '{address}' or on none, but rank {without} seems to have "
                f"none, and rank {with_one} has one. {ONE_SECRET}"
            )
        if time.monotonic() + pause > deadline:
            what = f"rank 0 could not be reached at '{address}' ({why})"
            raise TimeoutError(of_the_late(f"all {call['size']} ranks", call["seconds"], what))
        time.sleep(pause)
        pause = min(2 * pause, SECONDS_BETWEEN_CALLS[1])


def _call_once(address: Address, call: Call, secret: bytes, deadline: float) -> Answer:
    with _connected(address, secret, deadline) as connection:
        if not secret and user_of(connection) != os.getuid():
            raise PermissionError("it belongs to another user")
        nonce, said = secrets.token_bytes(NONCE_BYTES), _with_time_left(call, deadline)
        try:
            theirs = _read(connection, NONCE_BYTES)
        except builtins.TimeoutError:
            raise ConnectionError("what listens there says nothing, and is no rank of this job") from None
        connection.sendall(nonce + _proof(secret, b"caller", theirs, nonce, said) + _FRAME.pack(len(said)) + said)
        connection.settimeout(max(0.0, deadline - time.monotonic()) + SECONDS_FOR_THE_ANSWER)
        head = _read(connection, PROOF_BYTES + _FRAME.size)
        if head.startswith(_ANOTHER_SECRET):
            raise InvalidArgumentError(
                f"init: secret must be the same on all ranks, but rank 0 at '{address}' has another than rank {call['rank']}. "
                + ONE_SECRET
            )
        length = _FRAME.unpack(head[PROOF_BYTES:])[0]
        if length > LONGEST_ANSWER:
            raise ConnectionError("it is no rank of this job")
        answer = _read(connection, length)
        if not hmac.compare_digest(head[:PROOF_BYTES], _proof(secret, b"rank 0", nonce, theirs, answer)):
            raise ConnectionError("it is no rank of this job")
        told: Answer = json.loads(answer)
        return told


def _connected(address: Address, secret: bytes, deadline: float) -> socket.socket:
    """A connection with rank 0, at the first of the name's addresses where somebody listens. Raises OSError."""
    refused: OSError = ConnectionError("its name has no address")
    for family, where in _resolved(address) if secret else [(socket.AF_UNIX, _unix_name(address))]:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(0.01, min(SECONDS_TO_PROVE, deadline - time.monotonic())))
            connection.connect(where)
            return connection
        except OSError as error:
            connection.close()
            refused = error
    raise refused


def _with_time_left(call: Call, deadline: float) -> bytes:
    """What is sent: rank 0 waits no longer than any rank does."""
    return json.dumps({**call, "left": deadline - time.monotonic()}).encode()


def _read(connection: socket.socket, size: int) -> bytes:
    read = bytearray()
    while len(read) < size:
        data = connection.recv(min(size - len(read), 1 << 20))
        if not data:
            raise ConnectionResetError("it has closed the connection")
        read += data
    return bytes(read)


# ---- both ----


def _proof(secret: bytes, role: bytes, one: bytes, other: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, b"ringtrain rendezvous, " + role + b": " + one + other + said, "sha256")


def _resolved(address: Address) -> list[tuple[socket.AddressFamily, Any]]:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return [(family, where) for family, _, _, _, where in found]


def _place_to_listen(address: Address) -> tuple[socket.AddressFamily, Any]:
    """Where rank 0 waits. Debian gives a host's own name to 127.0.1.1, which no other host can call: then on every interface."""
    family, where = _resolved(address)[0]
    if is_loopback(address) and not names_this_host(address):
        return family, ("::" if family == socket.AF_INET6 else "0.0.0.0", *where[1:])
    return family, where


def _other_place(address: Address, secret: bytes) -> tuple[socket.AddressFamily, Any]:
    """Where rank 0 is on this host if it has a secret and this rank has none, or the other way round."""
    return (socket.AF_UNIX, _unix_name(address)) if secret else _resolved(address)[0]


def _listens(place: tuple[socket.AddressFamily, Any]) -> bool:
    family, where = place
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(SECONDS_TO_ANSWER)
        try:
            probe.connect(where)
            return family == socket.AF_UNIX or len(_read(probe, NONCE_BYTES)) == NONCE_BYTES
        except OSError:
            return False


def _unix_name(address: Address) -> str:
    return f"\0ringtrain-rendezvous-{os.getuid()}-{address.port}"
