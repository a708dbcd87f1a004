"""The process set of the ranks that share this rank's host, for workers that are hosts."""

import weakref

import numpy as np

from ringtrain._runtime.context import Context, current
from ringtrain._runtime.operations import allgather
from ringtrain._runtime.process_sets import ProcessSet, add_process_set, global_process_set
from ringtrain._training.adapter.hosts import Place, ranks_by_host

_of_context: "weakref.WeakKeyDictionary[Context, ProcessSet | None]" = weakref.WeakKeyDictionary()


def set_of_this_host() -> ProcessSet | None:
    """The set of the ranks on this host, registered at the first call; None for a rank that has its host alone.

    All ranks of the world call this together.
    """
    context = current()
    if context not in _of_context:
        _of_context[context] = _registered(context)
    return _of_context[context]


def _registered(context: Context) -> ProcessSet | None:
    own = Place(context.rank, context.local_rank, context.local_size, context.cross_rank)
    places = allgather(np.array([own]), "local_steps.places")
    hosts = ranks_by_host([Place(*place) for place in places.tolist()])
    if len(hosts) == 1:
        return global_process_set if context.size > 1 else None
    sets = [add_process_set(ranks) for ranks in hosts if len(ranks) > 1]  # all of them, on every rank
    return next((each for each in sets if each.included()), None)
