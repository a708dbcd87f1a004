"""How ranks meet without a launcher: rank 0 serves (`server`), the others call it, and it answers all when the last has come.

Where rank 0 is found is a place's: an address that all know (`by_address`), or a note that rank 0 leaves (`by_note`). Both ends
prove a secret that the ranks were given, or that rank 0 has drawn and left in the note. Who has come, and what all are told,
`introducing` decides.
"""

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ringtrain._rendezvous.handshake import Caller, HandshakeError
from ringtrain._rendezvous.introducing import ONE_SECRET, Answer, Call, Gathering, introduction
from ringtrain._rendezvous.meeting import SECONDS_FOR_THE_ANSWER, Introduction, of_the_late, user_of
from ringtrain._rendezvous.server import Client, Server
from ringtrain.errors import InvalidArgumentError, TimeoutError

SECONDS_BETWEEN_CALLS = (0.02, 0.5)  # at first, and at most
SECONDS_BETWEEN_LOOKS = 0.25  # of rank 0, at its place
SECONDS_TO_ANSWER = 1.0
SECONDS_TO_CALL = 5.0  # until both ends are proven
SECONDS_TO_SEND = 5.0  # the answer
Where = tuple[int, Any]  # a family of sockets, and an address of it


class Found(NamedTuple):
    """Rank 0, as others find it.

    Attributes:
        places: to call, one after the other.
        name: of where it is, for people.
        secret: that both ends prove; b"" where the kernel knows the user of either.
        is_ours: whether the ranks were given the secret, so that another one is an error.
    """

    places: Sequence[Where]
    name: str
    secret: bytes
    is_ours: bool


class GatheringPlace(Protocol):
    """Where ranks meet. absent: after `find` has not, what became of rank 0, for people."""

    absent: str

    def listen(self) -> tuple[list[socket.socket], bytes]:
        """Of rank 0: where it listens from now on, and the secret. Raises InvalidArgumentError."""

    def look(self, own: Call) -> str:
        """Of rank 0, now and then: why there can be no world, "" if nothing is known."""

    def leave(self) -> None:
        """Of rank 0: it listens no more."""

    def find(self) -> Found | None:
        """Of the others: where rank 0 is now, if that is known. Raises InvalidArgumentError."""

    def object(self, call: Call) -> None:
        """Of the others, when rank 0 could not be called. Raises InvalidArgumentError if it is known why."""


def meet(place: GatheringPlace, call: Call) -> Introduction:
    """Waits until all ranks have come, and returns what they were told.

    Raises:
        InvalidArgumentError: rank 0 cannot listen there, another secret is in use, or the ranks do not fit together.
        TimeoutError: some rank did not come; the text names it.
    """
    answer, secret = _serve(place, call) if call["rank"] == 0 else _ask(place, call)
    if "late" in answer:
        raise TimeoutError(answer["late"])
    if "refusal" in answer:
        raise InvalidArgumentError(answer["refusal"])
    return introduction(call["rank"], answer, secret)


# ---- rank 0 ----


def _serve(place: GatheringPlace, own: Call) -> tuple[Answer, bytes]:
    """Hears all ranks' calls, and answers them at once."""
    listeners, secret = place.listen()
    with contextlib.closing(Server(listeners, secret)) as server:
        try:
            answer = _gather(place, own, server)
        finally:
            place.leave()  # before the others go on, who may soon meet there again
        server.send_all(server.proven(), dict(answer))
        server.flush(SECONDS_TO_SEND)
    return answer, secret


def _gather(place: GatheringPlace, own: Call, server: Server) -> Answer:
    ranks = Gathering(own, time.monotonic())
    next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
    while not (answer := ranks.answer(time.monotonic(), server.refused)):
        for caller, said in server.wait(min(next_look, ranks.deadline) - time.monotonic()):
            if isinstance(said, str):
                ranks.go(caller)
            else:
                ranks.come(caller, said, time.monotonic())
        if time.monotonic() >= next_look:
            ranks.refuse(place.look(own))
            next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
    return answer


# ---- the other ranks ----


def _ask(place: GatheringPlace, call: Call) -> tuple[Answer, bytes]:
    """Looks for rank 0 and calls it until it hears, and waits for its answer."""
    deadline, pause = time.monotonic() + call["seconds"], SECONDS_BETWEEN_CALLS[0]
    while True:
        if found := place.find():
            try:
                return tell(found, call, deadline), found.secret
            except HandshakeError as error:
                if found.is_ours and error.has_another:
                    raise InvalidArgumentError(
                        f"init: secret must be the same on all ranks, but rank 0 at '{found.name}' has another than rank "
                        f"{call['rank']}. {ONE_SECRET}"
                    ) from None
                why = str(error)
            except OSError as error:  # it does not listen yet, or has ended
                why = error.strerror or str(error)
            what = f"rank 0 could not be reached at '{found.name}' ({why})"
            place.object(call)
        else:
            what = place.absent
        if time.monotonic() + pause > deadline:
            raise TimeoutError(of_the_late(f"all {call['size']} ranks", call["seconds"], what))
        time.sleep(pause)
        pause = min(2 * pause, SECONDS_BETWEEN_CALLS[1])


def tell(found: Found, call: Call, deadline: float) -> Answer:
    """Rank 0's answer to a call. Raises OSError, HandshakeError."""
    with contextlib.closing(_called(found, deadline)) as rank0:
        left = max(0.0, deadline - time.monotonic())
        rank0.say({**call, "left": left})  # rank 0 waits no longer than any rank does
        answer: Answer = rank0.receive_until(time.monotonic() + left + SECONDS_FOR_THE_ANSWER)[0]
        return answer


def _called(found: Found, deadline: float) -> Client:
    """A connection with rank 0, at the first of its places where one that knows the secret listens."""
    problem: Exception = ConnectionError("its name has no address")
    for family, where in found.places:
        seconds = max(0.01, min(SECONDS_TO_CALL, deadline - time.monotonic()))
        try:
            return Client.to(family, where, found.secret, seconds)
        except (OSError, HandshakeError) as error:
            problem = error
    raise problem


def answers(place: Where) -> bool:
    """Whether somebody listens there who may be a rank 0, with whatever secret; at a Unix socket one of this user's."""
    family, where = place
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(SECONDS_TO_ANSWER)
        try:
            probe.connect(where)
            if family == socket.AF_UNIX and user_of(probe) != os.getuid():
                return False
            probe.sendall(Caller(b"").take())
            return bool(probe.recv(1))
        except OSError:
            return False
