"""Which ranks share a host, from the places that each rank knows of itself. Pure."""

from collections.abc import Sequence
from typing import NamedTuple


class RankPlace(NamedTuple):
    """Where a rank is, as ``ringtrain`` tells it."""

    rank: int
    local_rank: int
    local_size: int
    cross_rank: int


def ranks_by_host(places: Sequence[RankPlace]) -> list[list[int]]:
    """The ranks of each host, ascending.

    Example:
        >>> ranks_by_host([Place(0, 0, 2, 0), Place(1, 0, 1, 1), Place(2, 1, 2, 0)])
        [[0, 2], [1]]

    A host's number is the cross rank of its local rank 0. The cross rank of another rank counts those hosts alone that
    have its local rank.
    """
    sizes = {place.cross_rank: place.local_size for place in places if place.local_rank == 0}
    hosts: dict[int, list[int]] = {host: [] for host in sorted(sizes)}
    for place in sorted(places):
        having = [host for host in hosts if sizes[host] > place.local_rank]
        hosts[having[place.cross_rank]].append(place.rank)
    return list(hosts.values())
