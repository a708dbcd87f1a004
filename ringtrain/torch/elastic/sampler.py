"""``ElasticSampler``: deals what an epoch has left over the ranks that there are; ``_training.sharding`` decides who reads what."""

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Protocol, TypedDict

import torch

from ringtrain._bootstrap import membership
from ringtrain._runtime.context import current
from ringtrain._training import sharding
from ringtrain.elastic.order import BatchOrder, SampleOrder, batches_in, refuse_in_loop_without, refuse_second_pass
from ringtrain.elastic.sample_shares import share_rules
from ringtrain.errors import InvalidArgumentError, NotInitializedError, UnsupportedError
from ringtrain.torch.elastic.batches import serve_loaders
from ringtrain.torch.elastic.workers import Drawn, follow_loader, loader_with_workers

__all__ = ["ElasticSampler"]


class DrawListener(Protocol):
    """What is told when samples are drawn."""

    def before_draw(self) -> None:
        """This rank draws for the step that comes next; between two steps another world may begin here."""


class _Place(TypedDict):
    epoch: int
    processed_num: int


class EpochProgress(_Place, total=False):
    """Where in an epoch the ranks are; ``given_back`` has places of samples that are to be dealt again, if there are any."""

    given_back: list[int]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """This rank's indices of what is left of an epoch, for ``DataLoader(dataset, batch_size, sampler=sampler)``.

    Example:
        >>> sampler = hvd.elastic.ElasticSampler(dataset)
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler)

    Progress is one number for all ranks: the samples that all of them have processed. After a change of the world what is
    left is dealt anew, with a few samples twice where it cannot be divided evenly.

    In a ``State(model=..., optimizer=...)`` it counts by itself: what was drawn for a step is processed once that is
    released, and what a rank has drawn that was lost before is dealt again. ``record_batch`` does nothing then. An epoch
    is one pass: a second one raises ``InvalidArgumentError``, while one behind a ``break`` goes on where that has left it.
    ``len(loader)`` is the number of batches of the pass, those that it has given and those that are left: it changes only
    when ranks come or go, and at the end it is the number that there were.

    In a job with ``--batch constant`` a loader's batch of ``batch_size`` times the planned number of ranks is dealt over
    those that there are: each has a share of it, which is larger the fewer they are. Then also ``len(loader)`` is the
    same whatever their number.

    Args:
        dataset: the whole data set.
        shuffle: whether each epoch has an order of its own, drawn from ``seed`` and the epoch.
        seed: the same on all ranks.
        most, multiple_of: with ``--batch balanced``: how many samples of a batch this rank has room for, by its memory; and, the same
            on all ranks, of what all shares of a whole batch are multiples, for what is compiled for each size.
        cost: of each sample, as a sentence's length: a sequence, or a function of its index; the same on all ranks. Shares of a
            batch then have equal parts of its cost, or with ``--batch balanced`` such as each rank is fast.

    Attributes:
        share_rules: these three.
        epoch: of the next iteration.
        dealing: a number that another one takes the place of when what was drawn ahead is given up.
        processed_num: samples of it that all ranks together have processed.
        num_replicas, rank: of the world for which the samples are dealt.
        remaining_indices: what is left, in its order.

    Raises:
        InvalidArgumentError: ``most`` or ``multiple_of`` below 1, or in an elastic job without ``--batch balanced``; costs that are
            no numbers above 0, or without a constant batch.
        UnsupportedError: with ``--batch constant``, from what draws single samples, such as a batch sampler of one's own.
    """

    _open: SampleOrder | BatchOrder

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int = 0,
        *,
        most: int | None = None,
        multiple_of: int = 1,
        cost: Sequence[float] | Callable[[int], float] | None = None,
    ):
        size, _ = self._dealt_to()
        self.share_rules = share_rules("ElasticSampler", len(dataset), most, multiple_of, cost)
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.dealing = 0
        self._follower: DrawListener | None = None
        self._has_given_all = False  # of the epoch, to an iteration
        self._draws_given = self._samples_given = 0  # of the epoch, to the present iteration
        self._planned = membership.planned()
        if cost is not None and not self._planned and size > 1:
            raise InvalidArgumentError(
                "ElasticSampler: cost must come with --elastic --batch constant or balanced, where ranks share batches, but this job has "
                "neither. Add the flag to ringtrainrun, or leave it out."
            )
        # Samples that a loader's batch has on all ranks together, and whether it drops a smaller one. No loader has asked yet.
        self._cut = max(1, len(dataset)), False
        self._shares: list[int] = []  # of a whole batch by place; none if they are equal
        self._weight = 1  # of the last window that had a batch
        if self._planned:
            serve_loaders()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch of which nothing has been processed. To be called at the end of the epoch before.

        In a ``State(model=..., optimizer=...)`` the epoch that has begun goes on, since a rank that joins is in its middle.
        """
        if self._follower is not None and epoch == self.epoch:
            return
        self.epoch = epoch
        self.processed_num = 0
        self._begin_counting()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """This rank has processed a batch of so many samples, and each other rank has, too."""
        if self._follower is None:
            self.processed_num += batch_size * self.num_replicas

    # ---- in a State(model=..., optimizer=...) ----

    def follow(self, follower: DrawListener) -> None:
        """Counts by itself from now on."""
        self._follower = None
        self.reset()
        self._follower = follower

    def deal(self, size: int, place: int) -> None:
        """Deals the next window to so many ranks, of which this is the one at that place."""
        if (size, place) != (self._open.size, self._open.place):
            self.dealing += 1
            self._shares = []
        self.num_replicas, self.rank = size, place
        self._open.deal(size, place)

    def share(self, counts: Sequence[int]) -> None:
        """Deals so many samples of a whole batch to each place from the next window on; none for equal shares."""
        if counts != self._shares:
            self.dealing += 1
            self._shares = list(counts)
            self._open.share(counts)

    @property
    def batch(self) -> int:
        """Samples that a whole batch has on all ranks together."""
        return self._cut[0]

    @property
    def work(self) -> float:
        """What this rank has to do in the open window, in samples of average cost."""
        return self._open.work / self.share_rules.unit

    @property
    def drawn(self) -> str:
        """What this rank has drawn for the open window, in words that must be the same on all ranks."""
        of = f"batches of {self._open.batch} samples" if isinstance(self._open, BatchOrder) else "samples"
        return f"{self._open.taken} {of}"

    @property
    def has_drawn(self) -> bool:
        """Whether something is drawn for the open window."""
        return self._open.taken > 0

    def finish_window(self, contributors: set[int] | None) -> None:
        """What was taken since the last call is processed, but for what was drawn at places that are no contributors."""
        if contributors is not None:
            self.dealing += 1
        weight = self.weight(contributors)
        self._weight = self._weight if weight is None else weight
        self._open.release(contributors)
        self.processed_num = self._open.next_position - len(self._open.given_back)

    def weight(self, contributors: set[int] | None) -> int | None:
        """This rank's samples of the open window, or if it has none of the last one; None unless batches are constant.

        Of a batch that has fewer samples than there are ranks some have none, and compute the same as others.

        Args:
            contributors: places that take part; None for all.
        """
        if not isinstance(self._open, BatchOrder):
            return None
        return self._open.weight(contributors) if self._open.taken else self._weight

    def draw(self) -> Drawn:
        """This rank's next index, or its indices of the next batch, for the step that comes next; None if none are left."""
        self.before_draw()
        drawn = self.draw_ahead()
        if drawn is not None:
            self.take(1)
        return drawn

    # ---- for a loader with worker processes ----

    def before_draw(self) -> None:
        """To be called before a batch is taken for the step that comes next."""
        assert self._follower is not None
        self._follower.before_draw()

    def begin_ahead(self) -> None:
        """Begins to draw for later steps; what was drawn so before is given up."""
        self.dealing += 1
        self._open.forget_ahead()

    def draw_ahead(self) -> Drawn:
        """This rank's next index, or its indices of the next batch, for whatever step; None if none are left."""
        return self._drawn(self._open.draw_ahead())

    def take(self, count: int) -> None:
        """So many of the draws that were made ahead are used in the step that comes next, the earliest first."""
        self._samples_given += self._open.take(count)
        self._draws_given += count

    # ---- batches of one size whatever the number of ranks ----

    @property
    def makes_batches(self) -> bool:
        """Whether a loader takes batches from here, and not samples."""
        return self._planned > 0

    def batches(self, batch_size: int, drops_last: bool) -> Iterator[list[int]]:
        """This rank's shares of the batches that are left, each of one sample at least.

        Args:
            batch_size: of one rank, if there are as many as planned.
            drops_last: whether the last batch of an epoch is left out if it is smaller.
        """
        self._cut_into(batch_size * self._planned, drops_last)
        if self._follower is None:
            yield from self._shares_of_present_world()
        else:
            yield from self._iterator()

    def batch_count(self, batch_size: int, drops_last: bool) -> int:
        """Batches of an iteration: those that it has given to this rank, and those that are left."""
        left = batches_in(self._open.left, batch_size * self._planned, drops_last)
        return left if self._follower is None else self._draws_given + left - self._open.taken

    def _cut_into(self, batch: int, drops_last: bool) -> None:
        if self._cut == (batch, drops_last):
            return
        if self._open.taken:
            raise InvalidArgumentError(
                f"ElasticSampler: with --batch constant all batches of a step must have one size, but one of {self._cut[0]} samples "
                f"on all ranks is under way, and one of {batch} is asked for. Make one loader, or end the step before."
            )
        self._cut = batch, drops_last
        self.dealing += 1
        self._open = self._new_order(self._open.next_position, self._open.given_back)

    def _shares_of_present_world(self) -> Iterator[list[int]]:
        shares = self._new_order(self.processed_num, [])
        while (share := self._drawn(shares.draw())) is not None:
            yield share

    # ----

    def _dealt_to(self) -> tuple[int, int]:
        """Among how many samples are dealt where nobody else says so, and this one's place."""
        try:
            context = current()
        except NotInitializedError:
            raise NotInitializedError(
                "ElasticSampler: init() must be called before, since samples are dealt to the ranks that there are, but was not. Make "
                "the sampler behind it."
            ) from None
        return context.size, context.rank

    def _drawn(self, position: int | list[int] | None) -> Drawn:
        if position is None:
            self._has_given_all = True
            return None
        return self._order[position].tolist()

    def _begin_counting(self) -> None:
        self._draws_given = self._samples_given = 0

    def _open_at(self, next_position: int, given_back: list[int]) -> None:
        self.dealing += 1
        self._has_given_all = False
        self._open = self._new_order(next_position, given_back)

    def _new_order(self, next_position: int, given_back: list[int]) -> SampleOrder | BatchOrder:
        count = len(self.dataset)
        order: SampleOrder | BatchOrder = (
            BatchOrder(count, *self._cut, next_position, given_back)
            if self.makes_batches
            else SampleOrder(count, next_position, given_back)
        )
        order.deal(self.num_replicas, self.rank)
        order.share(self._shares)
        order.cost(self.share_rules.costs_in(self._order))
        return order

    def reset(self) -> None:
        """Deals what is left over the ranks of the present world; in a ``State(model=..., optimizer=...)`` as the open step is dealt."""
        if self._follower is None:  # else `deal` says, since contributors are places among those to whom it was dealt
            self.num_replicas, self.rank = self._dealt_to()
        order = sharding.order(len(self.dataset), self.seed if self.shuffle else None, self.epoch)
        self._order = order
        self.remaining_indices = order[self.processed_num :].tolist()
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self._open_at(self.processed_num, [])

    @property
    def outline(self) -> str:
        """What must be the same on all ranks, for each sample to have one place in the order."""
        order = f"shuffled by seed {self.seed}" if self.shuffle else "in their order"
        return f"{type(self).__name__} of {len(self.dataset)} samples, {order}{self.share_rules.text}"

    def _follow_world(self) -> None:
        """One of no ``State`` is told of no change: what is left is dealt where it is read next."""
        if self._follower is None and (self.num_replicas, self.rank) != self._dealt_to():
            self.reset()

    def state_dict(self) -> EpochProgress:
        """Epoch and progress, the same on all ranks."""
        state: EpochProgress = {"epoch": self.epoch, "processed_num": self.processed_num}
        if self._open.given_back:
            state["given_back"] = list(self._open.given_back)
        return state

    def load_state_dict(self, state_dict: EpochProgress) -> None:
        """Goes on there, in the present world; an iteration over the same epoch goes on, too."""
        if state_dict["epoch"] != self.epoch:
            self._begin_counting()
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()
        if given_back := state_dict.get("given_back"):
            self._open_at(self.processed_num + len(given_back), given_back)

    def __iter__(self) -> Iterator[int]:
        if self._follower is not None:
            if self.makes_batches:
                raise UnsupportedError(
                    "ElasticSampler: with --batch constant samples must be drawn by a DataLoader with batch_size=, but are by "
                    "something else. Leave out a batch sampler of your own, and batch_size=None."
                )
            return self._iterator()
        refuse_in_loop_without("ElasticSampler")
        self._follow_world()
        left = self.remaining_indices
        return iter([left[place % len(left)] for place in range(self.rank, self.total_size, self.num_replicas)])

    def _iterator(self) -> Iterator[Drawn]:
        loader = loader_with_workers()
        if loader is None or loader.begins_pass:
            refuse_second_pass("ElasticSampler", self.epoch, self._has_given_all and self._open.draws_left == 0)
            self._begin_counting()
        return _Draws(self) if loader is None else follow_loader(loader, self)

    def __len__(self) -> int:
        """Samples of an iteration: those that it has given to this rank, and those that are left if no rank comes or goes."""
        self._follow_world()
        if self._follower is None:
            return self.num_samples
        left = self._open.shares_left() if isinstance(self._open, BatchOrder) else self._open.draws_left
        return self._samples_given + left


class _Draws(Iterator[Drawn]):
    """Draws until nothing is left; and again if something was given back since."""

    def __init__(self, sampler: ElasticSampler):
        self._sampler = sampler

    def __next__(self) -> Drawn:
        drawn = self._sampler.draw()
        if drawn is None:
            raise StopIteration
        return drawn
