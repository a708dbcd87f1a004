"""Loaders over an ``ElasticSampler`` in a job with ``--batch constant``: they take from it batches, and not single samples.

Between ``DataLoader(dataset, batch_size, sampler=sampler)`` and the sampler stands a ``BatchSampler`` of torch's own, which
cuts what it draws into batches of one size. Here the size depends on the number of ranks, which may change between two
batches. So torch's class asks a sampler that makes batches itself; all others it goes on to cut.
"""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch.utils.data import BatchSampler


@runtime_checkable
class MakesBatches(Protocol):
    """A sampler that may make batches itself."""

    @property
    def makes_batches(self) -> bool:
        """Whether it does."""

    def batches(self, batch_size: int, drops_last: bool) -> Iterator[list[int]]:
        """Indices of this rank, batch by batch."""

    def batch_count(self, batch_size: int, drops_last: bool) -> int:
        """How many an iteration has."""


def serve_loaders() -> None:
    """Has torch's ``BatchSampler`` ask samplers that make batches themselves; in this process, from now on."""
    if getattr(BatchSampler.__iter__, "asks_samplers", False):
        return
    cut, count = BatchSampler.__iter__, BatchSampler.__len__

    def iterate(self: BatchSampler) -> Iterator[list[int]]:
        return self.sampler.batches(self.batch_size, self.drop_last) if _is_served(self) else cut(self)

    def length(self: BatchSampler) -> int:
        return self.sampler.batch_count(self.batch_size, self.drop_last) if _is_served(self) else count(self)

    iterate.asks_samplers = True  # type: ignore[attr-defined]
    BatchSampler.__iter__, BatchSampler.__len__ = iterate, length


def _is_served(batch_sampler: BatchSampler) -> bool:
    return isinstance(batch_sampler.sampler, MakesBatches) and batch_sampler.sampler.makes_batches
