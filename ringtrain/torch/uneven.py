"""Batches for ranks with unequal numbers of them, where none may leave before all are done."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

from ringtrain._runtime.operations import Max, allreduce
from ringtrain._runtime.process_sets import ProcessSet, global_process_set

_Batch = TypeVar("_Batch")


def until_all_are_done(
    batches: Iterable[_Batch], empty: _Batch, process_set: ProcessSet = global_process_set
) -> Iterator[_Batch]:
    """This rank's batches, and then empty ones until every rank has had all of its own. All ranks go through it.

    Example:
        >>> for ids, labels in hvd.until_all_are_done(loader, empty=(ids[:0], labels[:0])):
        ...     loss = loss_of_each(model(ids), labels).sum() / usual_batch

    ``join()`` does not serve a model with sharded embeddings: a rank that has left serves its rows to nobody. Ranks
    that go on with empty batches do. Their loss must be a sum over the samples, not a mean, which is NaN of none.

    Args:
        batches: of this rank; any number, also none.
        empty: what is given when they are used up, of the same shape but for 0 samples.
        process_set: the ranks that train together.
    """
    own = iter(batches)
    has_more = True
    while True:
        if has_more:
            try:
                batch = next(own)
            except StopIteration:
                has_more, batch = False, empty
        if not allreduce(np.array([has_more], np.int32), "until_all_are_done", Max, process_set=process_set)[0]:
            return
        yield batch
