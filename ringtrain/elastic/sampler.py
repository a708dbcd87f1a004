"""``BatchSampler``: which samples a rank reads in each step, in whatever framework; dealt anew when ranks come and go.

``batches`` decides who reads what. What is drawn for a step counts once that is released, and what a rank has drawn that
was lost before is dealt again; so each sample of an epoch is in exactly one step that was applied. PyTorch's loaders draw
single samples, and have a sampler of their own (``ringtrain.torch.elastic.sampler``).
"""

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Protocol

import numpy as np

from ringtrain._bootstrap import membership
from ringtrain._runtime.arguments import whole
from ringtrain._runtime.context import current
from ringtrain._runtime.objects import allgather_object, broadcast_object
from ringtrain._training import sharding
from ringtrain.elastic.adapters import register
from ringtrain.elastic.likeness import refusal, unlike
from ringtrain.elastic.order import BatchOrder, GrowingOrder, batches_in, refuse_in_loop_without, refuse_second_pass
from ringtrain.elastic.reading import Reader
from ringtrain.elastic.sample_shares import share_rules
from ringtrain.errors import InvalidArgumentError, MismatchError

_STATES, _OUTLINES = "ringtrain.elastic.samplers", "ringtrain.elastic.sampler_outlines"


class Follower(Protocol):
    """What is told when samples are drawn: a state."""

    def before_draw(self) -> None:
        """This rank is about to draw for the step that comes next; ranks may join and leave here."""

    def note_draw(self) -> None:
        """It has drawn."""


class BatchSampler:
    """This rank's samples of each batch, as indices: ``for indices in sampler``, in the loop over ``state.epochs()``.

    Example:
        >>> sampler = rt.elastic.BatchSampler(len(x), batch_size=32)
        >>> state = rt.elastic.State(weights=weights, sampler=sampler)
        >>> for epoch in state.epochs(90):
        ...     for indices in sampler:
        ...         state.weights -= 0.1 * state.allreduce(gradient(state.weights, x[indices]))

    An epoch has an order, and all ranks together take its batches one by one, each rank a share of about equal size. A
    rank's share of a whole batch has ``batch_size`` samples; with ``--batch constant`` a batch has that times the planned number
    of ranks, and shares are larger the fewer ranks there are. The state weighs averages of gradients by shares. In a batch
    of fewer samples than ranks some read what others do, and weigh nothing.

    Give it to the state, which then counts by itself: ``State(weights=weights, sampler=sampler)``. One that no state has
    deals a pass over its samples to the ranks that there are when it begins, as for a validation.

    Args:
        samples: their number, or the data set, of which ``len`` is taken.
        batch_size: of one rank.
        shuffle: whether each epoch has an order of its own, drawn from ``seed`` and the epoch.
        seed: the same on all ranks, a whole number from 0.
        drop_last: whether the last batch of an epoch is left out if it is smaller.
        most, multiple_of: with ``--batch balanced``: how many samples of a batch this rank has room for, by its memory; and, the same
            on all ranks, of what all shares of a whole batch are multiples, for what is compiled for each size.
        cost: of each sample, as a sentence's length: a sequence, or a function of its index; the same on all ranks. Shares of a
            batch then have equal parts of its cost, or with ``--batch balanced`` such as each rank is fast.

    Attributes:
        share_rules: these three.
        epoch: whose order it deals.
        processed_num: samples of it that all ranks together have processed.
        dealing: a number that another one takes the place of when what was drawn ahead is given up.

    Raises:
        TypeError: an argument of another type.
        InvalidArgumentError: no sample, a batch size below 1, or not one whole batch with ``drop_last``; ``most`` or
            ``multiple_of`` below 1, or in an elastic job without ``--batch balanced``; costs that are no numbers above 0.
    """

    def __init__(
        self,
        samples: int | Sized,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        most: int | None = None,
        multiple_of: int = 1,
        cost: Sequence[float] | Callable[[int], float] | None = None,
    ):
        self._count = whole("BatchSampler: samples", len(samples) if isinstance(samples, Sized) else samples)
        self.batch_size = whole("BatchSampler: batch_size", batch_size)
        self.seed = whole("BatchSampler: seed", seed)
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.epoch = self.processed_num = self.dealing = 0
        self._planned = membership.planned()
        self._follower: Follower | None = None
        self._is_looked_at = False  # draws count nothing
        self._keeps_rest = False  # the follower ends an epoch before what `drop_last` leaves out
        self._has_given_all = False  # of the epoch, to an iteration
        self._batches_given = 0  # of the epoch, to the present iteration
        self._shares: list[int] = []  # of a whole batch by place; none if they are equal
        self._weight = 1  # of the last window that had a batch
        if self._count < 1 or self.batch_size < 1:
            raise InvalidArgumentError(
                f"BatchSampler: samples and batch_size must be 1 at least, but are {self._count} and {self.batch_size}. Give the "
                "number of samples of the whole data set, and of one rank's batch."
            )
        self.share_rules = share_rules("BatchSampler", self._count, most, multiple_of, cost)
        self._reset()
        if self.batches_left == 0:
            raise InvalidArgumentError(
                f"BatchSampler: with drop_last there must be one whole batch at least, which is {self._open.batch} samples on all "
                f"ranks, but there are {self._count}. Use a smaller batch_size, or leave drop_last out."
            )

    # ---- what a script asks ----

    def __iter__(self) -> Iterator[np.ndarray]:
        """Batches of the epoch that are left: int64 arrays of one index at least."""
        return self.loading(_itself)

    def loading(self, load: Callable[[np.ndarray], Any], workers: int = 0) -> Iterator[Any]:
        """What a function makes of each of these batches, by threads ahead of their step if there are ``workers``.

        Where ranks come or go, what was made ahead is dropped, and its samples are dealt again.

        Args:
            load: takes indices, an int64 array; with workers in threads, several at a time.
            workers: threads; 0: when a step asks for it, in the thread that asks.

        Raises:
            InvalidArgumentError: a second pass over an epoch of a state's.
            whatever ``load`` raises, in the step that would have had the batch.
        """
        if whole("BatchSampler: workers", workers) < 0:
            raise InvalidArgumentError(f"BatchSampler: workers must be 0 at least, but is {workers}.")
        if self._follower is None:
            refuse_in_loop_without("BatchSampler")
            return map(load, self._pass())
        refuse_second_pass("BatchSampler", self.epoch, self._has_given_all and self.batches_left == 0)
        self._batches_given = 0
        return Reader(self, load, workers)

    def __len__(self) -> int:
        """Batches of an iteration: those that it has given to this rank, and those that are left if no rank comes or goes."""
        return self._batches_given + self.batches_left

    def __bool__(self) -> bool:
        """There is a sampler, also when nothing is left."""
        return True

    @property
    def batches_left(self) -> int:
        """Batches of the epoch that are left, for each rank, if none comes or goes."""
        return max(0, batches_in(self._open.left, self._open.batch, self.drop_last) - self._open.taken)

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, unless it is the one that has begun. ``State.epochs`` and ``fit`` do it."""
        if epoch != self.epoch:
            self.epoch, self.processed_num, self._batches_given = epoch, 0, 0
            self._reset()

    def state_dict(self) -> dict[str, Any]:
        """Epoch and progress, the same on all ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num, "given_back": list(self._open.given_back)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on there, in the present world; an iteration over the same epoch goes on, too."""
        if state_dict["epoch"] != self.epoch:
            self._batches_given = 0
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self._reset(state_dict["given_back"])

    # ---- for its state ----

    @property
    def outline(self) -> str:
        """What must be the same on all ranks, for each sample to have one place in the order."""
        order = f"shuffled by seed {self.seed}" if self.shuffle else "in their order"
        drops = ", without the last ones" if self.drop_last else ""
        batch = f"{self.batch_size} in a batch{drops}{self.share_rules.text}"
        return f"{type(self).__name__} of {self._count} samples, {order}, {batch}"

    def follow(self, follower: Follower, keeps_rest: bool = False) -> None:
        """Counts by itself from now on.

        Args:
            follower: is told of draws.
            keeps_rest: it ends an epoch by ``batches_left``, so that a draw behind that may be smaller than a batch.
        """
        self._follower, self._keeps_rest = follower, keeps_rest
        self._reset(self._open.given_back)

    def look_only(self, looks: bool) -> None:
        """Whether draws are looks at a first batch, which count nothing; as Keras takes before it trains."""
        self._is_looked_at = looks

    def deal(self, size: int, place: int) -> None:
        """Deals the next window to so many ranks, of which this is the one at that place."""
        if (size, place) != (self._open.size, self._open.place):
            self.dealing += 1
            self._shares = []
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
        return self._open.batch

    @property
    def work(self) -> float:
        """What this rank has to do in the open window, in samples of average cost."""
        return self._open.work / self.share_rules.unit

    @property
    def drawn(self) -> str:
        """What this rank has drawn for the open window, in words that must be the same on all ranks."""
        return f"{self._open.taken} of its batches"

    def finish_window(self, contributors: set[int] | None) -> None:
        """What was taken since the last call is processed, but for what was drawn at places that are no contributors."""
        if contributors is not None:
            self.dealing += 1
        self._weight = self.weight(contributors)
        self._open.release(contributors)
        self.processed_num = self._open.next_position - len(self._open.given_back)

    def weight(self, contributors: set[int] | None) -> int:
        """Samples that this rank brings to the open window, or if it has none, has brought to the last one.

        Args:
            contributors: places that take part; None for all.
        """
        return self._open.weight(contributors) if self._open.taken else self._weight

    # ---- for a reader ----

    @property
    def is_looked_at(self) -> bool:
        """Whether draws count nothing."""
        return self._is_looked_at

    def look(self) -> np.ndarray:
        """This rank's indices of a first batch, which stays where it is."""
        positions = self._new_order(0, [], self._open.size, self._open.place).draw_ahead()
        assert positions is not None
        return self._order[positions]

    def before_draw(self) -> None:
        """To be called before a batch is taken for the step that comes next."""
        assert self._follower is not None
        self._follower.before_draw()

    def draw_ahead(self) -> np.ndarray | None:
        """This rank's indices of the next batch, for whatever step; None if none is left."""
        positions = self._open.draw_ahead()
        return None if positions is None else self._order[positions]

    def take(self) -> None:
        """The earliest draw that was made ahead is used in the step that comes next."""
        assert self._follower is not None
        self._follower.note_draw()
        self._open.take(1)
        self._batches_given += 1

    def begin_ahead(self) -> int:
        """Begins to draw for later steps; what was drawn so before is given up. Returns the number of this dealing."""
        self.dealing += 1
        self._open.forget_ahead()
        return self.dealing

    def note_end(self) -> None:
        """An iteration has had all that there was."""
        self._has_given_all = True

    # ----

    def _pass(self) -> Iterator[np.ndarray]:
        """Of one that no state has, over all its samples."""
        self._reset()
        order = self._new_order(self.processed_num, [], self._open.size, self._open.place)
        while (positions := order.draw()) is not None:
            yield self._order[positions]

    def _reset(self, given_back: Sequence[int] = ()) -> None:
        """Deals what is left over the ranks of the present world."""
        self._order = sharding.order(self._count, self.seed if self.shuffle else None, self.epoch)
        self.dealing += 1
        self._has_given_all = False
        context = current()
        self._open = self._new_order(self.processed_num + len(given_back), given_back, context.size, context.rank)

    def _new_order(self, next_position: int, given_back: Sequence[int], size: int, place: int) -> BatchOrder:
        drops = self.drop_last and not self._keeps_rest
        order = (
            BatchOrder(self._count, self.batch_size * self._planned, drops, next_position, given_back)
            if self._planned
            else GrowingOrder(self._count, self.batch_size, drops, next_position, given_back)
        )
        order.deal(size, place)
        order.share(self._shares)
        order.cost(self.share_rules.costs_in(self._order))
        return order


class _Samplers:
    """How states know samplers."""

    def fits(self, value: Any) -> bool:
        """Those of this module."""
        return isinstance(value, BatchSampler)

    def outline(self, values: Sequence[Any]) -> dict[str, str]:
        """What makes their orders."""
        return {f"sampler {place}": each.outline for place, each in enumerate(values)}

    def take_over(self, values: Sequence[Any]) -> None:
        """Takes the progress of rank 0's. Raises MismatchError if ranks have different ones."""
        outlines = allgather_object(self.outline(values), _OUTLINES)
        if different := unlike(outlines):
            raise MismatchError(refusal(outlines, different[0]))
        theirs = broadcast_object([each.state_dict() for each in values], 0, _STATES)
        for each, state in zip(values, theirs, strict=True):
            each.load_state_dict(state)

    def enter_world(self, values: Sequence[Any]) -> None:
        """Their state deals."""

    def refuse_in_file(self, values: Sequence[Any]) -> None:
        """Files have their progress."""

    def in_file(self, values: Sequence[Any]) -> list[dict[str, Any]]:
        """Their progress."""
        return [each.state_dict() for each in values]

    def take_from_file(self, values: Sequence[Any], kept: Sequence[dict[str, Any]]) -> None:
        """Goes on there."""
        for each, state in zip(values, kept, strict=True):
            each.load_state_dict(state)

    def random_states(self, values: Sequence[Any]) -> None:
        """They draw by their seed and the epoch."""

    def draw_on(self, values: Sequence[Any], states: None) -> None:
        """As above."""


register(_Samplers())


def _itself(indices: np.ndarray) -> np.ndarray:
    return indices
