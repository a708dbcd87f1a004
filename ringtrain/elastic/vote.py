"""What each rank says once it holds a part of a step: nine bytes, of which all ranks get the maximum.

The first says what the rank wishes for behind the part: that the world pauses, so that ranks join or leave, or that all stop.
The others are a checksum of what it has drawn, and the checksum's complement: their maxima add up to nothing but ones where
all ranks have drawn the same, and nowhere else.
"""

import zlib
from collections.abc import Generator
from enum import IntEnum

import numpy as np

from ringtrain._binding.tensor_memory import as_buffer
from ringtrain._bootstrap.member import Member
from ringtrain._runtime.context import current
from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.pending import Operation
from ringtrain.elastic.worlds import let_all_know
from ringtrain.errors import MismatchError

_WHOLE = "ringtrain.elastic.whole"
_DRAWN = "ringtrain.elastic.drawn"
_ALL_BITS = 0xFFFFFFFF  # of a checksum


class Wish(IntEnum):
    """Of a rank; who stops lets nobody in."""

    NOTHING = 0
    PAUSE = 1
    STOP = 2


class Vote:
    """One rank's, from part to part and world to world.

    Args:
        member: this process in its elastic job, which is asked to pause there.

    Attributes:
        wants_stop: this rank is to stop before the training comes to its end. It says so with what it releases next.
        all_stop: some rank has, which all ranks know since they have released the same part; for ever.
        pauses: all have agreed to leave this world between two steps.
    """

    def __init__(self, member: Member):
        self._member = member
        self.wants_stop = self.all_stop = self.pauses = False

    def enter_world(self) -> None:
        """Nobody has wished for anything yet."""
        self.pauses = False

    def cast(self, drawn: str) -> Generator[Operation, None, None]:
        """Returns when all members hold the part, and with it know what any of them wishes for.

        Args:
            drawn: which samples are in the step, in words.

        Raises:
            MismatchError: on all of them, if they have drawn differently: a wrong average now, and later a standstill.
        """
        said = np.frombuffer(row(self._wish(), drawn), np.uint8)
        buffers = [as_buffer(said)]
        operation = current().submit("allreduce", _WHOLE, buffers, buffers, reduction="max", waits=True)
        while not operation.finished():
            yield operation
        operation.wait()
        wish, are_alike = outcome(said.tobytes())
        self.pauses = wish == Wish.PAUSE
        self.all_stop = self.all_stop or wish == Wish.STOP
        if not are_alike:
            raise MismatchError(_unlike_draws(drawn))

    def _wish(self) -> Wish:
        if self.wants_stop or self.all_stop:
            return Wish.STOP
        return Wish.PAUSE if self._member.wants_pause else Wish.NOTHING


def row(wish: Wish, drawn: str) -> bytearray:
    """The bytes of one rank. Pure."""
    checksum = zlib.crc32(drawn.encode())
    return bytearray((wish, *checksum.to_bytes(4, "little"), *(_ALL_BITS - checksum).to_bytes(4, "little")))


def outcome(most: bytes) -> tuple[Wish, bool]:
    """What the maximum of all rows says: the greatest wish, and whether all have drawn the same. Pure."""
    return Wish(most[0]), int.from_bytes(most[1:5], "little") + int.from_bytes(most[5:], "little") == _ALL_BITS


def _unlike_draws(own: str) -> str:
    everyone = allgather_object(own, _DRAWN)
    let_all_know()
    other = next(rank for rank, drawn in enumerate(everyone) if drawn != everyone[0])
    return (
        f"elastic.State: all ranks must draw the same for a step, but rank 0 has drawn {everyone[0]}, and rank {other} "
        f"{everyone[other]}. Use one batch_size, and as many batches a step, on all ranks."
    )
