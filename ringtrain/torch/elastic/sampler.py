"""``ElasticSampler``: deals what an epoch has left over the ranks that there are; ``ringtrain.sharding`` decides who reads what."""

from collections.abc import Iterator, Sized
from typing import Any, Protocol

import torch

from ringtrain import sharding
from ringtrain.context import current
from ringtrain.elastic.order import SampleOrder
from ringtrain.errors import InvalidArgumentError
from ringtrain.torch.elastic.workers import follow_loader, loader_with_workers

__all__ = ["ElasticSampler"]


class Follower(Protocol):
    """What is told when samples are drawn."""

    def before_draw(self) -> None:
        """This rank draws for the step that comes next; between two steps another world may begin here."""


class ElasticSampler(torch.utils.data.Sampler[int]):
    """This rank's indices of what is left of an epoch, for ``DataLoader(dataset, batch_size, sampler=sampler)``.

    Progress is one number for all ranks: the samples that all of them have processed. After a change of the world what is
    left is dealt anew, with a few samples twice where it cannot be divided evenly.

    In a ``State(model=..., optimizer=...)`` it counts by itself: what was drawn for a step is processed once that is
    released, and what a rank has drawn that was lost before is dealt again. ``record_batch`` does nothing then. An epoch
    is one pass: a second one raises ``InvalidArgumentError``, while one behind a ``break`` goes on where that has left it.

    Args:
        dataset: the whole data set.
        shuffle: whether each epoch has an order of its own, drawn from ``seed`` and the epoch.
        seed: the same on all ranks.

    Attributes:
        epoch: of the next iteration.
        dealing: a number that another one takes the place of when what was drawn ahead is given up.
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
        self.dealing = 0
        self._follower: Follower | None = None
        self._has_given_all = False  # of the epoch, to an iteration
        self._open = SampleOrder(0)
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch of which nothing has been processed. To be called at the end of the epoch before.

        In a ``State(model=..., optimizer=...)`` the epoch that has begun goes on, since a rank that joins is in its middle.
        """
        if self._follower is not None and epoch == self.epoch:
            return
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """This rank has processed a batch of so many samples, and each other rank has, too."""
        if self._follower is None:
            self.processed_num += batch_size * self.num_replicas

    # ---- in a State(model=..., optimizer=...) ----

    def follow(self, follower: Follower) -> None:
        """Counts by itself from now on."""
        self._follower = follower
        self.reset()

    def deal(self, size: int, place: int) -> None:
        """Deals the next window to so many ranks, of which this is the one at that place."""
        if (size, place) != (self._open.size, self._open.place):
            self.dealing += 1
        self.num_replicas, self.rank = size, place
        self._open.deal(size, place)

    def finish_window(self, contributors: set[int] | None) -> None:
        """What was taken since the last call is processed, but for what was drawn at places that are no contributors."""
        if contributors is not None:
            self.dealing += 1
        self._open.release(contributors)
        self.processed_num = self._open.next_position - len(self._open.given_back)

    def draw(self) -> int | None:
        """This rank's next index, for the step that comes next; None if there is none left."""
        self.before_draw()
        return self._index_at(self._open.draw())

    # ---- for a loader with worker processes ----

    def before_draw(self) -> None:
        """To be called before a batch is taken for the step that comes next."""
        assert self._follower is not None
        self._follower.before_draw()

    def begin_ahead(self) -> None:
        """Begins to draw for later steps; what was drawn so before is given up."""
        self.dealing += 1
        self._open.forget_ahead()

    def draw_ahead(self) -> int | None:
        """This rank's next index, for whatever step; None if there is none left."""
        return self._index_at(self._open.draw_ahead())

    def take(self, count: int) -> None:
        """So many of the indices that were drawn ahead are used in the step that comes next, the earliest first."""
        self._open.take(count)

    # ----

    def _index_at(self, position: int | None) -> int | None:
        if position is None:
            self._has_given_all = True
            return None
        return int(self._order[position])

    def _refuse_second_pass(self) -> None:
        if self._has_given_all and self._open.draws_left == 0:
            raise InvalidArgumentError(
                f"ElasticSampler: expected one pass over the samples of epoch {self.epoch} but found another one, for which "
                "none are left. Have State.epochs count each pass as an epoch, and read other data with another sampler."
            )

    def _open_at(self, next_position: int, given_back: list[int]) -> None:
        self.dealing += 1
        self._has_given_all = False
        self._open = SampleOrder(len(self.dataset), next_position, given_back)
        self._open.deal(self.num_replicas, self.rank)

    def reset(self) -> None:
        """Deals what is left over the ranks of the present world."""
        context = current()
        self.num_replicas, self.rank = context.size, context.rank
        order = sharding.order(len(self.dataset), self.seed if self.shuffle else None, self.epoch)
        self._order = order
        self.remaining_indices = order[self.processed_num :].tolist()
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self._open_at(self.processed_num, [])

    def state_dict(self) -> dict[str, Any]:
        """Epoch and progress, the same on all ranks."""
        state = {"epoch": self.epoch, "processed_num": self.processed_num}
        return {**state, "given_back": list(self._open.given_back)} if self._open.given_back else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on there, in the present world."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()
        if given_back := state_dict.get("given_back"):
            self._open_at(self.processed_num + len(given_back), given_back)

    def __iter__(self) -> Iterator[int]:
        if self._follower is not None:
            loader = loader_with_workers()
            if loader is None or not loader.is_followed:
                self._refuse_second_pass()
            return _Draws(self) if loader is None else follow_loader(loader, self)
        left = self.remaining_indices
        return iter([left[place % len(left)] for place in range(self.rank, self.total_size, self.num_replicas)])

    def __len__(self) -> int:
        """Samples that an iteration gives this rank."""
        return self.num_samples if self._follower is None else self._open.draws_left


class _Draws(Iterator[int]):
    """Draws until nothing is left; and again if something was given back since."""

    def __init__(self, sampler: ElasticSampler):
        self._sampler = sampler

    def __next__(self) -> int:
        index = self._sampler.draw()
        if index is None:
            raise StopIteration
        return index
