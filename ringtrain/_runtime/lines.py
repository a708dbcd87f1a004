"""What TCP has found of the ways to other ranks, and what it has taken for them."""

from typing import NamedTuple

from ringtrain._binding._native import lib, take_answer
from ringtrain._runtime.context import Context


class Line(NamedTuple):
    """The way to a rank that this one sends tensors to.

    Attributes:
        rank: the other one.
        streams: connections for tensors over each link.
        congestion: the kernel's name of what controls their rate.
        round_trip_seconds: the least that was seen.
        rate: bytes a second that were delivered of late, of all connections together.
        loss: share of the packets that were sent again.
    """

    rank: int
    streams: int
    congestion: str
    round_trip_seconds: float
    rate: float
    loss: float


def lines_of(context: Context) -> list[Line]:
    """Of the ranks that this one has sent tensors to; [] where a library connects them."""
    found = [line.split("|") for line in take_answer(lib.rt_lines(context.native)).splitlines()]
    return [
        Line(int(rank), int(streams), congestion, float(seconds), float(rate), float(loss))
        for rank, streams, congestion, seconds, rate, loss in found
    ]
