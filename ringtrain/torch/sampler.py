"""The sampler that distributes a data set over the ranks for a ``DataLoader``; ``ringtrain._training.sharding`` decides who reads what.

It knows how far the epoch has come, so that a run resumes between two batches, on as many ranks as it then has.
"""

from collections.abc import Iterator, Sized
from numbers import Integral
from typing import Any

import numpy as np
import torch

from ringtrain._runtime.arguments import check_among, integer
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, place_in, size_of
from ringtrain._training import sharding
from ringtrain.errors import InvalidArgumentError


class DistributedSampler(torch.utils.data.Sampler[int]):
    """This rank's indices of each epoch, for ``DataLoader(dataset, batch_size, sampler=sampler)``.

    Example:
        >>> sampler = hvd.DistributedSampler(dataset, seed=1)
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
        >>> for epoch in range(sampler.epoch, 10):
        ...     sampler.set_epoch(epoch)
        ...     for x, y in loader:
        ...         train_on(x, y)

    Its arguments are those of ``torch.utils.data.DistributedSampler``, in that order, and two more by name.

    Args:
        dataset: the whole data set, or its number of samples.
        num_replicas: how many share it; None for all ranks of the process set.
        rank: which of them this one is; None for its place in the process set.
        shuffle: whether each epoch has an order of its own; else it is the data set's.
        seed: of the order, the same on all ranks; None is ``shuffle=False``.
        drop_last: whether the samples that are too few for all ranks are left out; else some come twice.
        policy: ``"pad"``, ``"truncate"`` or ``"uneven"``, as ``ringtrain.shard`` explains; None as ``drop_last`` says.
        process_set: the ranks that share the data; this rank must be one.

    Raises:
        InvalidArgumentError: as ``ringtrain.shard``; or there is no such rank among ``num_replicas``.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int | None = 0,
        drop_last: bool = False,
        *,
        policy: str | None = None,
        process_set: ProcessSet = global_process_set,
    ):
        self.epoch = 0
        self._count = int(dataset) if isinstance(dataset, (int, Integral)) else len(dataset)
        self._policy = policy or ("truncate" if drop_last else "pad")
        self._seed = seed if shuffle else None
        self._rank, self._size = _place(num_replicas, rank, process_set)
        # Places in the epoch, counted in samples that all ranks together have read.
        self._start = 0  # where the current iteration began,
        self._read = 0  # where it is,
        self._next_start = 0  # and where the next one will begin
        self._indices(0)  # wrong arguments are reported here

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iteration. A resumed epoch that is named again goes on where it was."""
        if epoch != self.epoch:
            self._start = self._read = self._next_start = 0
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self._start = self._read = self._next_start
        self._next_start = 0
        for index in self._indices(self._start).tolist():
            self._read += self._size
            yield index

    def __len__(self) -> int:
        """Samples that the next iteration gives this rank."""
        return len(range(self._next_start + self._rank, self._end(self._next_start), self._size))

    def state_dict(self, samples: int | None = None) -> dict[str, Any]:
        """The place in the epoch, the same on all ranks that have taken equally many steps; for a checkpoint.

        Args:
            samples: samples that this rank has trained on in this iteration, if a loader with workers has asked for
                more ahead of time; None for those it has asked for.
        """
        if samples is not None:
            most = len(range(self._start + self._rank, self._end(self._start), self._size))
            demand = f"state_dict: samples must be in [0, {most}], those of this rank in the iteration"
            check_among(demand, integer("state_dict: samples", samples), range(most + 1))
        read = self._read if samples is None else self._start + samples * self._size
        return {"epoch": self.epoch, "read": read, "seed": self._seed, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on at a place that ``state_dict`` gave, also with another number of ranks: no sample comes twice.

        Raises:
            InvalidArgumentError: the state is of another data set or seed, so the place would mean other samples.
        """
        missing = [name for name in ("epoch", "read", "seed", "count") if name not in state]
        if missing:
            raise InvalidArgumentError(
                f"load_state_dict: the state must be that of a sampler, but lacks {', '.join(missing)}. Give what state_dict() returned."
            )
        for name, mine in (("count", self._count), ("seed", self._seed)):
            demand = f"load_state_dict: {name} must be that of the saved run, {state[name]}"
            check_among(demand, mine, [state[name]], "Make the sampler as that run did")
        self.epoch = state["epoch"]
        self._start = self._read = self._next_start = state["read"]

    def _indices(self, start: int) -> np.ndarray:
        return sharding.indices(self._count, self._rank, self._size, self._policy, self._seed, self.epoch, start)

    def _end(self, start: int) -> int:
        return sharding.epoch_end(self._count, self._size, self._policy, start)


def _place(num_replicas: int | None, rank: int | None, process_set: ProcessSet) -> tuple[int, int]:
    """Which of how many this rank is: as it was told, and else as the process set has it."""
    size = size_of(process_set) if num_replicas is None else num_replicas
    place = place_in(process_set) if rank is None else rank
    size, place = integer("DistributedSampler: num_replicas", size), integer("DistributedSampler: rank", place)
    demand = f"DistributedSampler: rank must be in [0, {size}), the number of replicas"
    check_among(demand, place, range(size), "Leave both out, or give both")
    return place, size
