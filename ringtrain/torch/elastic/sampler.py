"""``ElasticSampler``: deals what an epoch has left over the ranks that there are; ``ringtrain.sharding`` decides who reads what."""

from collections.abc import Iterator, Sized
from typing import Any

import torch

from ringtrain import sharding
from ringtrain.context import current

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """This rank's indices of what is left of an epoch, for ``DataLoader(dataset, batch_size, sampler=sampler)``.

    Progress is one number for all ranks: the samples that all of them have processed. After a change of the world what is
    left is dealt anew, with a few samples twice where it cannot be divided evenly.

    Args:
        dataset: the whole data set.
        shuffle: whether each epoch has an order of its own, drawn from ``seed`` and the epoch.
        seed: the same on all ranks.

    Attributes:
        epoch: of the next iteration.
        processed_num: samples of it that all ranks together have processed.
        num_replicas, rank: of the world for which the samples are dealt.
        remaining_indices: what is left, in its order.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0):
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch of which nothing has been processed. To be called at the end of the epoch before."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """This rank has processed a batch of so many samples, and each other rank has, too."""
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Deals what is left over the ranks of the present world."""
        context = current()
        self.num_replicas, self.rank = context.size, context.rank
        order = sharding.order(len(self.dataset), self.seed if self.shuffle else None, self.epoch)
        self.remaining_indices = order[self.processed_num :].tolist()
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Epoch and progress, the same on all ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on there, in the present world."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        return iter([left[place % len(left)] for place in range(self.rank, self.total_size, self.num_replicas)])

    def __len__(self) -> int:
        """Samples that an iteration gives this rank."""
        return self.num_samples
