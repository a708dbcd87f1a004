"""The ways between neighbours of a ring of hosts: which are measured at a time, and which of them, or which host, is slow; pure.

An allreduce sends from each host to the next, on all ways at once, and is as fast as the slowest of them. Hosts are named by
their place in the ring. `examine` measures, `doctor` says what is found.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

Way = tuple[int, int]  # from, to: places of two hosts

LONG = 2.5e-3  # seconds that a byte takes, from which TCP asks what a way needs (line.h)
SLOW = 0.6  # of the fastest way: what carries less is worth a look
HELD_BACK = 0.75  # of what a way carries alone
MOST_ALONE = 8  # ways that are measured one by one; of more, those of different hosts at a time


def forward(hosts: int) -> list[Way]:
    """Those that an allreduce uses: from each host to the next."""
    return [(place, (place + 1) % hosts) for place in range(hosts)] if hosts > 1 else []


def backward(hosts: int) -> list[Way]:
    """The others between neighbours; of two hosts there are none."""
    return [(end, start) for start, end in forward(hosts)] if hosts > 2 else []


def pairs(hosts: int) -> list[Way]:
    """Neighbours, each pair once."""
    return forward(hosts) if hosts > 2 else forward(hosts)[:1]


def apart(ways: Sequence[Way]) -> list[list[Way]]:
    """Rounds in which no host has part in two ways; a ring needs three at most for each direction, however many hosts it has."""
    rounds: list[list[Way]] = []
    for way in ways:
        free = (each for each in rounds if not any(set(way) & set(other) for other in each))
        fitting = next(free, None)
        if fitting is None:
            rounds.append([way])
        else:
            fitting.append(way)
    return rounds


def one_by_one(hosts: int) -> list[list[Way]]:
    """Rounds in which each way is measured with little beside it: nothing, or only ways between other hosts."""
    ways = forward(hosts) + backward(hosts)
    return [[way] for way in ways] if len(ways) <= MOST_ALONE else apart(ways)


def suspects(alone: Mapping[Way, float]) -> list[list[Way]]:
    """Of many hosts, rounds in which the slowest ways are measured once more, with nothing beside them: log2 of their number."""
    if len(alone) <= MOST_ALONE:
        return []
    slowest = sorted(alone, key=lambda way: alone[way])
    return [[way] for way in slowest[: math.ceil(math.log2(len(alone)))]]


# ---- judging ----


@dataclass(frozen=True)
class Finding:
    """What is slow.

    Attributes:
        what: "sends", "receives" or "host": what a host sends, what it receives, or both; "link": both ways between two
            hosts; "way": one of them.
        hosts: that host; the two between which the link is; from which to which.
        ways: the slow ones that this explains.
    """

    what: str
    hosts: tuple[int, ...]
    ways: tuple[Way, ...]


def slow_ways(alone: Mapping[Way, float]) -> list[Way]:
    """Those that carry much less than the fastest."""
    fastest = max(alone.values(), default=0.0)
    return [way for way, rate in alone.items() if rate < SLOW * fastest]


def explain(slow: Collection[Way], ways: Collection[Way]) -> list[Finding]:
    """The fewest hosts and links that explain the slow ones among all ways.

    A host explains all that it sends, or receives, if all of that is slow and it has more than one neighbour.
    """
    left, found = set(slow), []
    while left:
        candidates = [each for each in _candidates(ways) if set(each.ways) <= set(slow) and left & set(each.ways)]
        best = max(candidates, key=lambda each: len(left & set(each.ways)))  # the first of equals
        found.append(best)
        left -= set(best.ways)
    return found


def _candidates(ways: Collection[Way]) -> Iterator[Finding]:
    """All that may be the reason, those first that are simpler: a host before a link."""
    for host in sorted({place for way in ways for place in way}):
        sent, received = ([way for way in ways if way[end] == host] for end in (0, 1))
        for what, its in (("host", sent + received), ("sends", sent), ("receives", received)):
            if len(sent) > 1 and len(received) > 1:
                yield Finding(what, (host,), tuple(its))
    for way in ways:
        if way[0] < way[1] and way[::-1] in ways:
            yield Finding("link", way, (way, way[::-1]))
    for way in ways:
        yield Finding("way", way, (way,))


def held_back(alone: Mapping[Way, float], at_once: Mapping[Way, float], slow: Collection[Way]) -> list[Way]:
    """Those of the ring that carry less once all hosts send, of those that are not slow anyway.

    Nor those of which the other way is slow: what confirms their bytes waits there behind other bytes.
    """
    hosts = len({place for way in alone for place in way})
    return [way for way in forward(hosts) if not {way, way[::-1]} & set(slow) and at_once[way] < HELD_BACK * alone[way]]


def half_duplex(ways: Collection[Way], hosts: int) -> list[int]:
    """Hosts that send less while they receive, and receive less while they send, if these explain all of the ways."""
    if hosts == 2:
        return []  # which of the two it is cannot be told
    found = [
        place for place in range(hosts) if {((place - 1) % hosts, place), (place, (place + 1) % hosts)} <= set(ways)
    ]
    explained = {way for way in ways if set(way) & set(found)}
    return found if explained == set(ways) and len(found) <= hosts // 3 else []
