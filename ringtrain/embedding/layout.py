"""Which ranks keep which rows of a table: each its own, and perhaps those of others a second time. Pure.

A part is the rows that a dealing gives to one rank, their owner. What is kept of the table as a whole moves from one layout
to another when ranks have come or gone: each keeper takes what it has from itself, or from the first who still has it.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ringtrain._runtime.arguments import check_among
from ringtrain.embedding.dealing import Dealing

NOBODY = -1  # in a source: all that kept the row are gone
_MOST_REPLICAS = 2


@dataclasses.dataclass(frozen=True)
class Layout:
    """Who keeps what. A rank has its own rows first, and behind them the parts of others, in their order.

    Args:
        dealing: who owns which row.
        keepers: of each part, its owner first.
    """

    dealing: Dealing
    keepers: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """That share the table."""
        return self.dealing.ranks

    @property
    def has_copies(self) -> bool:
        """Whether anybody keeps rows of another rank."""
        return any(len(keepers) > 1 for keepers in self.keepers)

    def parts(self, rank: int) -> list[int]:
        """What a rank keeps, in its order: its own first."""
        others = [part for part, keepers in enumerate(self.keepers) if part != rank and rank in keepers]
        return [rank, *others]

    def count(self, rank: int) -> int:
        """Rows that a rank keeps."""
        return sum(self.dealing.count(part) for part in self.parts(rank))

    def starts(self, rank: int) -> np.ndarray:
        """For each part the place of its first row at a rank that keeps it; -1 at others; int64."""
        starts, end = np.full(self.ranks, -1, np.int64), 0
        for part in self.parts(rank):
            starts[part], end = end, end + self.dealing.count(part)
        return starts

    def places(self, rank: int, ids: np.ndarray) -> np.ndarray:
        """Where rows lie at a rank that keeps them all, int64."""
        return self.starts(rank)[self.dealing.owners(ids)] + self.dealing.places(ids)

    def ids(self, rank: int, places: np.ndarray) -> np.ndarray:
        """The rows at some places of a rank, int64."""
        parts = np.array(self.parts(rank))
        ends = np.cumsum([self.dealing.count(part) for part in parts.tolist()])
        number = np.searchsorted(ends, places, side="right")
        ids = np.empty(len(places), np.int64)
        for each, part in enumerate(parts.tolist()):
            here = number == each
            ids[here] = self.dealing.ids(part, places[here] - (ends[each] - self.dealing.count(part)))
        return ids


def laid_out(dealing: Dealing, hosts: Sequence[Sequence[int]], replicas: int) -> Layout:
    """The layout over the ranks of some hosts.

    Example:
        >>> laid_out(Dealing(8, 4), [[0, 1], [2, 3]], 2).keepers
        ((0, 2), (1, 3), (2, 1), (3, 0))

    A second copy goes to the next rank on another host, in an order that takes the hosts in turn, so that equal hosts keep
    equally much; to the next rank if there is one host; to nobody if there is one rank.

    Args:
        dealing: over all these ranks.
        hosts: the ranks of each.
        replicas: 1, or 2 for second copies.
    """
    if replicas == 1 or dealing.ranks == 1:
        return Layout(dealing, tuple((rank,) for rank in range(dealing.ranks)))
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    deepest = max(len(host) for host in hosts)
    order = [host[turn] for turn in range(deepest) for host in hosts if turn < len(host)]
    second = {}
    for place, rank in enumerate(order):
        following = order[place + 1 :] + order[:place]
        elsewhere = [each for each in following if host_of[each] != host_of[rank]]
        second[rank] = (elsewhere or following)[0]
    return Layout(dealing, tuple((rank, second[rank]) for rank in range(dealing.ranks)))


def check_replicas(replicas: int) -> None:
    """Raises InvalidArgumentError for a number of copies that is not there."""
    demand = "embedding: replicas must be 1, or 2 for second copies on other hosts"
    check_among(demand, replicas, range(1, _MOST_REPLICAS + 1))


def sources(former: Layout, stays: Mapping[int, int], ranks: int) -> np.ndarray:
    """From whom each rank takes rows of each former part: (parts, ranks), ranks of the present world, or ``NOBODY``.

    Args:
        former: who kept what.
        stays: ranks of that world that are still there, and what they are now.
        ranks: that there are now.
    """
    found = np.full((former.ranks, ranks), NOBODY)
    for part, keepers in enumerate(former.keepers):
        living = [stays[each] for each in keepers if each in stays]
        for rank in range(ranks if living else 0):
            found[part, rank] = rank if rank in living else living[0]
    return found


def lost(former: Layout, stays: Collection[int]) -> list[int]:
    """Parts, with rows in them, that nobody keeps any more who is still there."""
    return [
        part
        for part, keepers in enumerate(former.keepers)
        if former.dealing.count(part) and not any(each in stays for each in keepers)
    ]


def words_for(former: Layout, parts: Sequence[int]) -> str:
    """Which rows some parts are, and who kept them."""
    dealing = former.dealing
    told = []
    for part in parts:
        first, last = dealing.ids(part, np.array([0, dealing.count(part) - 1])).tolist()
        step = f" in steps of {dealing.ranks}" if dealing.kind == "modulo" and dealing.ranks > 1 else ""
        keepers = " and ".join(map(str, former.keepers[part]))
        told.append(f"rows {first} to {last}{step} (of former rank {keepers})")
    return ", ".join(told)
