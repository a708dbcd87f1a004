"""Which samples of a data set a rank reads: one order for all ranks, and every ``size``-th sample of it for each.

``indices`` decides and knows neither a world nor a framework; ``shard`` asks it for this rank, and so does
``torch.sampler``. Ranks that read b samples a step read together the b * size samples that one process with the whole
batch reads, so an epoch's progress is one number for all of them, and a run can go on with another number of ranks.
"""

import operator
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from ringtrain._runtime.process_sets import ProcessSet, global_process_set, place_in, size_of
from ringtrain.errors import InvalidArgumentError

POLICIES = ("pad", "truncate", "uneven")


class Shard(Sequence):
    """A rank's samples of an indexable data set; they are fetched when they are asked for.

    Attributes:
        data: the whole data set.
        indices: places in it, int64, in the order in which this rank reads them.
    """

    def __init__(self, data: Any, indices: np.ndarray):
        self.data = data
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int | slice) -> Any:
        """The sample at a place; a shorter shard for a slice. Raises IndexError past the end."""
        if isinstance(place, slice):
            return Shard(self.data, self.indices[place])
        return self.data[int(self.indices[place])]


def shard(
    data: Any,
    policy: str = "pad",
    seed: int | None = 0,
    epoch: int = 0,
    start: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """This rank's share of an epoch: indices for a number of samples, a ``Shard`` for a data set. Sends nothing.

    Example:
        >>> for index in rt.shard(len(images), seed=1, epoch=epoch):
        ...     train_on(images[index], labels[index])

    Args:
        data: number of samples, a data set with ``len()`` and ``[index]``, or a ``tf.data.Dataset`` of single samples,
            before ``batch``; of the same length on all ranks. A ``tf.data.Dataset`` keeps its order, which must be the
            same on all ranks: shuffle the share, or the whole with a seed; ``seed`` and ``epoch`` do not matter there.
        policy: what happens to a remainder that cannot be divided evenly. ``"pad"``: every sample is read, and some
            ranks read one from the start of the order again, so that all take equally many steps. ``"truncate"``: the
            last samples of the order are left out, for the same end. ``"uneven"``: every sample is read exactly once,
            and some ranks read one less; they call ``join()`` when they are done.
        seed: of the order, the same on all ranks; None for the data set's own order.
        epoch: each epoch has an order of its own; without a seed it does not matter.
        start: samples that all ranks together have read of this epoch already; 0 for the whole.
        process_set: the ranks that share the data; this rank must be one.

    Returns:
        int64 array of indices, a ``Shard``, or a ``tf.data.Dataset``.

    Raises:
        InvalidArgumentError: no such policy, a negative number, a data set without length or indices, or fewer samples
            than ranks with ``"truncate"``. A ``tf.data.Dataset`` of unknown length says so.
    """
    if hasattr(data, "cardinality") and hasattr(data, "shard"):
        return _stream_share(data, place_in(process_set), size_of(process_set), policy, start)
    count = _count_of(data)
    chosen = indices(count, place_in(process_set), size_of(process_set), policy, seed, epoch, start)
    return chosen if isinstance(data, Integral) else Shard(data, chosen)


def indices(
    count: int, rank: int, size: int, policy: str = "pad", seed: int | None = 0, epoch: int = 0, start: int = 0
) -> np.ndarray:
    """What rank ``rank`` of ``size`` reads of ``count`` samples: places ``start + rank``, ``start + rank + size``, … of
    the epoch's order. The arguments are those of ``shard``; the result is an int64 array."""
    places = np.arange(start + rank, epoch_end(count, size, policy, start), size, dtype=np.int64)
    return order(count, seed, epoch)[places % max(count, 1)]


def epoch_end(count: int, size: int, policy: str = "pad", start: int = 0) -> int:
    """The place in an endless repetition of the order at which ``size`` ranks that begin at ``start`` end together."""
    _check_policy(policy, count, size)
    left = max(count - _natural("start", start), 0)
    if policy == "pad":
        left += -left % size
    elif policy == "truncate":
        left -= left % size
    return start + left


def order(count: int, seed: int | None, epoch: int) -> np.ndarray:
    """The order in which an epoch's samples are read, int64, the same with every release of NumPy.

    A shuffled order sorts random keys, which NumPy promises never to change, unlike its ``permutation``.
    """
    epoch = _natural("epoch", epoch)
    if seed is None:
        return np.arange(count, dtype=np.int64)
    key = np.array([_natural("seed", seed), epoch], np.uint64)
    keys = np.random.Philox(key=key).random_raw(count)
    return np.argsort(keys, kind="stable")


def _stream_share(dataset: Any, rank: int, size: int, policy: str, start: int) -> Any:
    """A rank's elements of a ``tf.data.Dataset``, which knows no indices."""
    count = int(dataset.cardinality())
    if count == -2:
        raise InvalidArgumentError(
            "shard: data must have a known length, but is a tf.data.Dataset that has none. "
            "Apply tf.data.experimental.assert_cardinality(n) to it first."
        )
    if count == -1:
        return dataset.skip(start).shard(size, rank)  # endless: all ranks can go on as long as the others
    end = epoch_end(count, size, policy, start)
    longer = dataset.repeat() if end > count else dataset
    return longer.skip(start).take(end - start).shard(size, rank)


def _count_of(data: Any) -> int:
    if isinstance(data, Integral):
        return _natural("number of samples", data)
    if isinstance(data, Mapping) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise InvalidArgumentError(
            f"shard: data must be a number of samples, or have len() and [index], but is a {type(data).__name__}. "
            "Pass the number of samples, and pick them by the indices."
        )
    return len(data)


def _check_policy(policy: str, count: int, size: int) -> None:
    if policy not in POLICIES:
        raise InvalidArgumentError(f"shard: policy must be one of {', '.join(POLICIES)}, but is {policy!r}.")
    if policy == "truncate" and 0 < count < size:
        raise InvalidArgumentError(
            f"shard: policy 'truncate' must find a sample for each of {size} ranks, but finds {count}. Use 'pad'."
        )


def _natural(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 63:
        raise InvalidArgumentError(f"shard: {name} must be an int from 0 to 2**63 - 1, but is {value!r}.")
    return number
