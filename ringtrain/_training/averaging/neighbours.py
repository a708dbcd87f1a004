"""The process set of the ranks on this rank's host, or at its site, for workers that are hosts or sites."""

import weakref

import numpy as np

from ringtrain._binding.log import logger
from ringtrain._runtime.context import Context, current
from ringtrain._runtime.operations import allgather
from ringtrain._runtime.process_sets import ProcessSet, RankPlace, add_process_set, global_process_set, ranks_by_host

_of_context: "weakref.WeakKeyDictionary[Context, dict[str, ProcessSet | None]]" = weakref.WeakKeyDictionary()


def set_of_this(kind: str) -> ProcessSet | None:
    """The set of the ranks on this host, registered at the first call; None for a rank that is alone there.

    All ranks of the world call this together.

    Args:
        kind: "host" or "site".
    """
    context = current()
    sets = _of_context.setdefault(context, {})
    if kind not in sets:
        sets[kind] = _registered(context, _by_site(context) if kind == "site" else _by_host(context))
    return sets[kind]


def _registered(context: Context, parts: list[list[int]]) -> ProcessSet | None:
    if len(parts) == 1:
        return global_process_set if context.size > 1 else None
    sets = [add_process_set(ranks) for ranks in parts if len(ranks) > 1]  # all of them, on every rank
    return next((each for each in sets if each.included()), None)


def _by_host(context: Context) -> list[list[int]]:
    own = RankPlace(context.rank, context.local_rank, context.local_size, context.cross_rank)
    places = allgather(np.array([own]), "local_steps.places")
    return ranks_by_host([RankPlace(*place) for place in places.tolist()])


def _by_site(context: Context) -> list[list[int]]:
    sites = allgather(np.array([context.site]), "local_steps.sites").tolist()
    if len(set(sites)) == 1 and context.rank == 0 and context.size > 1:
        logger.warning(
            "local steps: within='site' makes all ranks one worker, since no hosts are at different sites. Name sites in the host "
            "file: host slots=4 site=ams."
        )
    return [[rank for rank, each in enumerate(sites) if each == site] for site in dict.fromkeys(sites)]
