"""Loaders with worker processes under an ``ElasticSampler``: batches that are drawn before the step that uses them.

Such a loader has its sampler drawn some batches ahead. They count when the script takes them, in their order. When the
samples are dealt to other ranks meanwhile, the loader is restarted before the script takes the next batch: what the
workers have made ahead is dropped, and its samples are dealt again. So whatever ranks have drawn ahead, in the same or in
different amounts, no sample is lost, and all ranks take equally many batches.

That a batch is taken only the loader's iterator can tell, to which neither the script nor the sampler has a handle. When
it first asks the sampler for indices it becomes a ``FollowedIterator``, which is the same and tells.
"""

import queue
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ringtrain._runtime.arguments import check_among
from ringtrain.errors import UnsupportedError

Drawn = Any  # an index, or the indices of a batch; None if there are none left


class SourceForWorkers(Protocol):
    """What is drawn from: a sampler."""

    dealing: int

    def before_draw(self) -> None:
        """To be called before a batch is taken for the step that comes next."""

    def begin_ahead(self) -> None:
        """Begins to draw for later steps; what was drawn so before is given up."""

    def draw_ahead(self) -> Drawn:
        """The next index, or the indices of a batch, for whatever step; None if there are none left."""

    def take(self, count: int) -> None:
        """So many of the draws that were made ahead are used in the step that comes next, the earliest first."""


class LoaderWithWorkers(NamedTuple):
    """A loader, and its iterator, which has worker processes."""

    loader: torch.utils.data.DataLoader
    iterator: _MultiProcessingDataLoaderIter

    @property
    def begins_pass(self) -> bool:
        """Whether its iterator asks for the first time in a pass, and not since the samples are dealt in another way."""
        return not (isinstance(self.iterator, FollowedIterator) and self.iterator._restarts)


class DrawsAhead(Iterator[Drawn]):
    """What a loader draws in one dealing, and how much of it the script has taken.

    Args:
        source: drawn from.
        iterator: the loader's. It holds this object, and so is not held.
    """

    def __init__(self, source: SourceForWorkers, iterator: _MultiProcessingDataLoaderIter):
        source.begin_ahead()
        self._source = source
        self._dealing = source.dealing
        self._iterator = weakref.ref(iterator)
        self._sizes: Counter[int] = Counter()  # draws, by the number of a batch that is drawn and not taken
        self._taken = 0  # batches

    def __next__(self) -> Drawn:
        iterator = self._iterator()
        drawn = None if self.is_over or iterator is None else self._source.draw_ahead()
        if drawn is None or iterator is None:
            raise StopIteration
        self._sizes[iterator._send_idx] += 1
        return drawn

    @property
    def is_over(self) -> bool:
        """Whether what was drawn here is dealt in another way now."""
        return self._dealing != self._source.dealing

    def before_batch(self) -> None:
        """The script takes the next batch."""
        self._source.before_draw()

    def note_taken(self, batches: int) -> None:
        """The script has taken so many batches."""
        if not self.is_over:
            self._source.take(sum(self._sizes.pop(number, 0) for number in range(self._taken, batches)))
        self._taken = batches


class FollowedIterator(_MultiProcessingDataLoaderIter):
    """A loader's iterator that counts what the script takes, and starts anew when the samples are dealt in another way."""

    _loader: torch.utils.data.DataLoader
    _draws: DrawsAhead
    _restarts = False

    def __next__(self) -> object:
        self._draws.before_batch()
        if self._draws.is_over:
            self._withdraw()
            self._restarts = True
            self._reset(self._loader)  # the sampler is asked for an iterator, and gives this one new draws
            self._restarts = False
        try:
            return super().__next__()
        finally:  # a batch that could not be made is taken, too
            self._draws.note_taken(self._rcvd_idx)

    def _withdraw(self) -> None:
        """Takes back what no worker has begun to make, so that the restart need not wait for it."""
        for indices in self._index_queues:
            try:
                while True:
                    indices.get_nowait()
            except queue.Empty:
                pass


def follow_loader(found: LoaderWithWorkers, source: SourceForWorkers) -> DrawsAhead:
    """Has a loader draw ahead, and count.

    Raises:
        UnsupportedError: the loader returns batches in another order than it has drawn them, or is of a kind that is not
            known here.
    """
    loader, iterator = found
    kind = type(iterator)
    if kind not in (_MultiProcessingDataLoaderIter, FollowedIterator):
        raise UnsupportedError(
            "ElasticSampler: a loader with worker processes must be torch.utils.data.DataLoader, where elastic.State has "
            f"steps survive a change of the world, but its iterator is a {kind.__module__}.{kind.__qualname__}. Use "
            "DataLoader, or num_workers=0."
        )
    demand = "ElasticSampler: in_order of the loader must be True, where elastic.State has steps survive a change of the world"
    advice = "Then it is known which samples a step has used"
    check_among(demand, getattr(iterator, "_in_order", True), [True], advice, UnsupportedError)
    draws = DrawsAhead(source, iterator)
    iterator.__class__ = FollowedIterator
    assert isinstance(iterator, FollowedIterator)
    iterator._loader, iterator._draws = loader, draws
    return draws


def loader_with_workers() -> LoaderWithWorkers | None:
    """The one that asks for an iterator over its sampler, within which this is called; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if hasattr(type(found), "__next__") and getattr(found, "_index_queues", None):
            loader = frame.f_locals.get("loader", getattr(found, "_loader", None))
            if loader is not None:
                return LoaderWithWorkers(loader, found)
        frame = frame.f_back
    return None
