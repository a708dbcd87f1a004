"""A place for `at_rank_zero` where rank 0 leaves a note that all can read: where it listens, and a secret that it has drawn.

A board for the note is a folder (`by_files`) or a store of torch's (`stores`). A note of a rank 0 that is no more may be there:
nobody answers at that address, or somebody with another secret, and so it is read again. Two processes that are rank 0 leave
one note, of the later one; the other finds it there, tells all who have called it, and calls that one.
"""

import contextlib
import ipaddress
import platform
import re
import secrets
import socket
import time
from typing import Any, Protocol

from ringtrain._rendezvous.at_rank_zero import Found, Where, answers, meet, tell
from ringtrain._rendezvous.handshake import HandshakeError
from ringtrain._rendezvous.introducing import ONE_SECRET, Call, on_its_host_alone, two_processes
from ringtrain._rendezvous.meeting import SECRET_BYTES, Introduction, endpoint
from ringtrain.errors import InvalidArgumentError

NOTE = "rank-0"
UNREACHED, REFUSAL = "unreached", "refusal"  # of a rank that cannot call the loopback of rank 0's host, and the answer
SECONDS_TO_TELL = 2.0  # another process that is rank 0


class Board(Protocol):
    """What ranks need of it."""

    name: str

    def write(self, name: str, value: Any) -> None:
        """Leaves a note, in the place of one of that name."""

    def read(self, name: str) -> Any:
        """A note; None if there is none of that name."""

    def remove(self, *names: str) -> None:
        """Takes notes off, if they are there."""

    def leave(self) -> None:
        """Whoever left notes there has taken them off."""

    def look_anew(self) -> None:
        """What is read from now on is not older than this call."""


class Noted:
    """See `at_rank_zero.GatheringPlace`. listens: where rank 0 may listen, as the core reads it; secret: b"" if the ranks have none."""

    def __init__(self, board: Board, listens: str, secret: bytes):
        self.absent = f"rank 0 left no word in '{board.name}'"
        self._board, self._listens, self._secret = board, listens, secret
        self._own: dict[str, Any] = {}
        self._looks = 0
        self._unreached = ""  # of which rank 0's note this rank has said so

    def listen(self) -> tuple[list[socket.socket], bytes]:
        listeners = [_listener(each) for each in self._listens.split(",")]
        drawn = b"" if self._secret else secrets.token_bytes(SECRET_BYTES)
        self._own = {
            "id": secrets.token_hex(16),
            "addresses": [endpoint(*map(str, listener.getsockname()[:2])) for listener in listeners],
            "host": platform.node(),
            "secret": drawn.hex(),
        }
        self._board.remove(UNREACHED, REFUSAL)
        self._board.write(NOTE, self._own)
        return listeners, self._secret or drawn

    def look(self, own: Call) -> str:
        note = _read(self._board, NOTE)
        if not note:
            self._board.write(NOTE, self._own)
        elif note["id"] != self._own["id"]:
            with contextlib.suppress(OSError, HandshakeError, InvalidArgumentError):
                if found := self._found(note):
                    tell(found, own, time.monotonic() + SECONDS_TO_TELL)
            return two_processes(0)
        if self._board.read(UNREACHED) != self._own["id"]:
            return ""
        refusal = on_its_host_alone([0])
        self._board.write(REFUSAL, {"id": self._own["id"], "text": refusal})
        return refusal

    def leave(self) -> None:
        note = _read(self._board, NOTE)
        if note and note["id"] == self._own["id"]:
            self._board.remove(NOTE)
        self._board.leave()

    def find(self) -> Found | None:
        self._looks += 1
        if self._looks > 5:  # by now the pauses are long
            self._board.look_anew()
        self._heed_refusal()
        note = _read(self._board, NOTE)
        if not note:
            return None
        if note["host"] != platform.node() and all(map(_is_loopback, note["addresses"])):
            self._complain(note)
            return None
        return self._found(note)

    def _complain(self, note: dict[str, Any]) -> None:
        """To rank 0, which answers by a note if it lives."""
        if self._unreached != note["id"]:
            self._unreached = note["id"]
            self._board.write(UNREACHED, self._unreached)
        self.absent = f"rank 0 listens on its host '{note['host']}' alone, at '{','.join(note['addresses'])}'"

    def _heed_refusal(self) -> None:
        refusal = self._board.read(REFUSAL) if self._unreached else None
        if isinstance(refusal, dict) and refusal.get("id") == self._unreached:
            raise InvalidArgumentError(str(refusal.get("text")))

    def object(self, call: Call) -> None:
        """What is written there may be of a rank 0 that is no more."""

    def _found(self, note: dict[str, Any]) -> Found | None:
        places, addresses = [_place(each) for each in note["addresses"]], ",".join(note["addresses"])
        if bool(note["secret"]) == bool(self._secret):
            if not any(map(answers, places)):  # a note of a job that is no more
                return None
            with_one, without = ("this rank", "rank 0") if self._secret else ("rank 0", "this rank")
            raise InvalidArgumentError(
                f"init: secret must be given on all ranks that meet in '{self._board.name}' or on none, but {with_one} has one, and "
                f"{without} has none. {ONE_SECRET}"
            )
        return Found(places, addresses, self._secret or bytes.fromhex(note["secret"]), bool(self._secret))


def meet_by_note(board: Board, call: Call, listens: str, secret: bytes) -> Introduction:
    """`at_rank_zero.meet`, by a note on this board."""
    return meet(Noted(board, listens, secret), call)


def _read(board: Board, name: str) -> dict[str, Any]:
    """{} for a note that is not there, or was left by something else."""
    note = board.read(name)
    if not isinstance(note, dict) or not all(isinstance(note.get(key), str) for key in ("id", "host", "secret")):
        return {}
    addresses = note.get("addresses")
    is_one = isinstance(addresses, list) and all(isinstance(each, str) and _split(each) for each in addresses)
    return note if is_one and re.fullmatch("([0-9a-f]{64})?", note["secret"]) else {}


def _split(address: str) -> tuple[str, str] | None:
    """Host and ports of "10.0.0.1:0", "[fd00::1]:20000-20999"."""
    matched = re.fullmatch(r"\[?([0-9a-fA-F.:]+?)\]?:([0-9]+(?:-[0-9]+)?)", address)
    return (matched[1], matched[2]) if matched else None


def _place(address: str) -> Where:
    host, port = _split(address) or ("", "0")
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))


def _is_loopback(address: str) -> bool:
    host, _ = _split(address) or ("0.0.0.0", "")
    return ipaddress.ip_address(host).is_loopback


def _listener(address: str) -> socket.socket:
    """At a port of a range, else at any: one that is named is where the rank listens for its world."""
    host, ports = _split(address) or (address, "0")
    first, _, last = ports.partition("-")
    tried = range(int(first), int(last) + 1) if last else [0]
    problem: OSError = OSError("it has no port")
    for port in tried:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            problem = error
    raise InvalidArgumentError(
        f"init: rank 0 must find a free port at '{address}' where the others can call it, but: {problem.strerror or problem}. Give "
        "RINGTRAIN_PORT_RANGE more ports than there are ranks on a host."
    )
