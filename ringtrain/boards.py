"""How ranks meet on a board, to which each can pin notes that all can read: each pins a call, rank 0 an offer to all.

A board is a folder (`by_files`) or a store of torch's (`stores`). Notes of ranks that are no more may be there, even
under the same names. So an offer has the nonce of each call that it answers, a rank agrees to an offer that has its own,
and rank 0 says "go" when all have agreed to the same one. The offer has what the world's secret is made of; it is taken
off before anybody goes on.

A rank whose call has given way to another's knows that two processes have come as this rank, and pins that: all who meet
are told. Whoever finds a call in his place cannot know whether its process lives, and leaves it the time to see his own.
"""

import secrets
import time
from typing import Any, Protocol

from ringtrain.errors import InvalidArgumentError, TimeoutError
from ringtrain.introducing import (
    A_RANK_EACH,
    Answer,
    Call,
    answer_to,
    answer_to_the_present,
    introduction,
    read_call,
)
from ringtrain.meeting import SECONDS_FOR_THE_ANSWER, Introduction, of_the_late

SECONDS_BETWEEN_LOOKS = (0.002, 0.1)  # at first, and at most
SECONDS_TO_BE_SEEN = 0.5  # by another process of the same rank, if there is one
NONCE_BYTES = 16
_NOTHING: dict[str, Any] = {"id": "", "nonces": [], "answer": {}}  # is offered yet


class Board(Protocol):
    """What ranks need of it."""

    name: str

    def write(self, name: str, value: Any) -> None:
        """Pins a note, in the place of one of that name."""

    def read(self, name: str) -> Any:
        """A note; None if there is none of that name."""

    def remove(self, *names: str) -> None:
        """Takes notes off, if they are there."""

    def wait(self, names: list[str], seconds: float) -> None:
        """Returns when all are there, or at any time before."""

    def look_anew(self) -> None:
        """What is read from now on is not older than this call."""


def meet(board: Board, call: Call, secret: bytes) -> Introduction:
    """Waits until all ranks have come, and returns what they were told.

    Args:
        board: that all ranks can read.
        call: this rank's.
        secret: 32 bytes that all ranks know; b"" without one.

    Raises:
        TimeoutError: some rank did not come; the text names it.
        InvalidArgumentError: the ranks do not fit together.
    """
    place = _Place(board, call)
    try:
        answer = place.refusal or (_invite(place, call) if call["rank"] == 0 else _follow(place, call))
    finally:
        place.leave()
    if "late" in answer:
        raise TimeoutError(answer["late"])
    if "refusal" in answer:
        raise InvalidArgumentError(answer["refusal"])
    return introduction(call["rank"], answer, secret)


def agreements(size: int) -> list[str]:
    """Names of the notes that ranks take off once they have read rank 0's last word."""
    return [f"agreed.{rank}" for rank in range(1, size)]


def _note(board: Board, name: str) -> dict[str, Any]:
    """{} for one that is not there, or was left by something else."""
    found = board.read(name)
    return found if isinstance(found, dict) else {}


def _nonces(note: dict[str, Any]) -> list[Any]:
    """Whom a note answers."""
    found = note.get("nonces")
    return found if isinstance(found, list) else []


class _Place:
    """A rank's place on the board: its call, under a nonce of its own."""

    def __init__(self, board: Board, call: Call):
        self.board = board
        self.nonce = secrets.token_hex(NONCE_BYTES)
        self._rank = call["rank"]
        self._name = f"call.{self._rank}"
        found = _note(board, self._name)
        board.write(self._name, {"nonce": self.nonce, "call": call})
        self.refusal: Answer = {}
        until = time.monotonic() + SECONDS_TO_BE_SEEN if found else 0.0
        while not self.refusal and time.monotonic() < until:
            time.sleep(SECONDS_BETWEEN_LOOKS[0])
            self.look([])

    def look(self, nonces: list[Any]) -> Answer:
        """What is told if two processes have come as this rank, or as one with these nonces; {} if none is known to have."""
        other = _note(self.board, self._name).get("nonce", self.nonce)
        if other != self.nonce:
            self.board.write("twice", {"rank": self._rank, "nonces": [self.nonce, other]})
        twice = _note(self.board, "twice")
        if any(nonce in _nonces(twice) for nonce in (*nonces, self.nonce)):
            text = f"init: one process of rank {twice['rank']} must call init() at a time, but two have. {A_RANK_EACH}"
            self.refusal = {"refusal": text}
        return self.refusal

    def leave(self) -> None:
        """Takes off what this rank has pinned; if there were two of one, once all have had the time to see it."""
        if self.refusal:
            time.sleep(SECONDS_TO_BE_SEEN)
        if _note(self.board, self._name).get("nonce") == self.nonce:
            self.board.remove(self._name)
        if self.nonce in _nonces(_note(self.board, "twice")):
            self.board.remove("twice")


class _Looks:
    """Pauses between looks at the board, which grow."""

    def __init__(self, board: Board):
        self._board = board
        self._pause = SECONDS_BETWEEN_LOOKS[0]

    def pause(self) -> None:
        time.sleep(self._pause)
        if self._pause == SECONDS_BETWEEN_LOOKS[1]:
            self._board.look_anew()
        self._pause = min(1.5 * self._pause, SECONDS_BETWEEN_LOOKS[1])


def _invite(place: _Place, own: Call) -> Answer:
    """Rank 0: offers until all have agreed."""
    board, size, offered = place.board, own["size"], _NOTHING
    deadline = time.monotonic() + own["seconds"]
    board.wait([f"call.{rank}" for rank in range(1, size)], own["seconds"])
    looks = _Looks(board)
    while True:
        calls, nonces = _read_calls(board, own)
        if refusal := place.look([nonce for nonce in nonces if nonce]):
            return _tell_end(place, nonces, refusal)
        if len(calls) == size and nonces != offered["nonces"]:
            offered = {"id": secrets.token_hex(NONCE_BYTES), "nonces": nonces, "answer": answer_to(calls, size)}
            board.write("offer", offered)
        agreed = [rank for rank, name in enumerate(agreements(size), 1) if board.read(name) == offered["id"]]
        if offered["id"] and len(agreed) == size - 1:
            board.remove("offer")
            board.write("go", {"id": offered["id"]})
            answer: Answer = offered["answer"]
            return answer
        if time.monotonic() > deadline:
            present = {rank: call for rank, call in calls.items() if not offered["id"] or rank in (0, *agreed)}
            return _tell_end(place, nonces, answer_to_the_present(present, size))
        looks.pause()


def _tell_end(place: _Place, nonces: list[str], answer: Answer) -> Answer:
    """Tells those who have come that there is no world."""
    place.board.remove("offer")
    place.board.write("go", {"nonces": nonces, "answer": answer})
    return answer


def _read_calls(board: Board, own: Call) -> tuple[dict[int, Call], list[str]]:
    """The calls that are there, by rank, and the nonce of each rank's, "" for none."""
    calls, nonces = {0: own}, [""] * own["size"]
    for rank in range(1, own["size"]):
        found = _note(board, f"call.{rank}")
        call = read_call(found.get("call"), own["size"])
        if call and call["rank"] == rank:
            calls[rank], nonces[rank] = call, str(found["nonce"])
    return calls, nonces


def _follow(place: _Place, own: Call) -> Answer:
    """The other ranks: agrees to rank 0's offers until it says go."""
    board, rank, nonce, agreed = place.board, own["rank"], place.nonce, _NOTHING
    deadline = time.monotonic() + own["seconds"] + SECONDS_FOR_THE_ANSWER
    try:
        looks = _Looks(board)
        while time.monotonic() < deadline:
            offer, go = _note(board, "offer"), _note(board, "go")
            if agreed["id"] and go.get("id") == agreed["id"]:
                told: Answer = agreed["answer"]
                return told
            if nonce in _nonces(go):
                told = go["answer"]
                return told
            if refusal := place.look([_note(board, "call.0").get("nonce", "")]):
                return refusal
            if nonce in _nonces(offer) and offer["id"] != agreed["id"]:
                agreed = offer
                board.write(f"agreed.{rank}", offer["id"])
                looks = _Looks(board)
            looks.pause()
        what = f"rank 0 left no word in '{board.name}'"
        raise TimeoutError(of_the_late(f"all {own['size']} ranks", own["seconds"], what))
    finally:
        board.remove(f"agreed.{rank}")
