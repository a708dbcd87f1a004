"""How rows change by their gradients: rules that look at the rows that have one, and at nothing else.

A rule is pure: blocks of rows in, blocks of rows out. ``apply`` has a rule change what lies in storage. Rows without a
gradient stay as they are, their moments too, which the frameworks call lazy or sparse.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ringtrain._runtime.arguments import check_least
from ringtrain.embedding.initial import Initializer
from ringtrain.embedding.storage import Rows, Storage
from ringtrain.errors import InvalidArgumentError

State = dict[str, np.ndarray]


@dataclasses.dataclass
class RowOptimizer:
    """Base of all rules.

    Attributes:
        lr: learning rate; may be set between two steps.
        STATE: what is kept of each row: by name, whether it is one number and not one for each column.
    """

    lr: float = 0.01
    STATE: ClassVar[Mapping[str, bool]] = {}

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_least(f"embedding: {name} of an optimizer of rows", value, 0)

    def begins_with(self, name: str) -> float:
        """The first value of a state."""
        return 0.0

    def change(self, gradients: np.ndarray, state: State, step: int) -> tuple[np.ndarray, State]:
        """What is subtracted from rows, and their new state.

        Args:
            gradients: (n, width).
            state: by name, (n, width) or (n, 1).
            step: number of this step of the table, from 1.
        """
        raise NotImplementedError


@dataclasses.dataclass
class SGD(RowOptimizer):
    """``row -= lr * gradient``, or with ``momentum`` of the rows that have a gradient, ``torch.optim.SGD``'s.

    Example:
        >>> table = hvd.layers.ShardedEmbedding(10**6, 64, optimizer=hvd.layers.SGD(lr=0.1))

    Args:
        lr: the learning rate.
        momentum: of the rows that have a gradient; 0 for none.
    """

    momentum: float = 0.0
    STATE: ClassVar[Mapping[str, bool]] = {"momentum_buffer": False}

    def change(self, gradients: np.ndarray, state: State, step: int) -> tuple[np.ndarray, State]:
        if not self.momentum:
            return self.lr * gradients, {}
        buffer = self.momentum * state["momentum_buffer"] + gradients
        return self.lr * buffer, {"momentum_buffer": buffer}


@dataclasses.dataclass
class Adagrad(RowOptimizer):
    """``torch.optim.Adagrad``, of the rows that have a gradient.

    Example:
        >>> table = hvd.layers.ShardedEmbedding(10**6, 64, optimizer=hvd.layers.Adagrad(lr=0.01))

    Args:
        lr: the learning rate.
        eps: is added to the root, against a division by zero.
        initial_accumulator_value: what the sums of squares begin with.
    """

    eps: float = 1e-10
    initial_accumulator_value: float = 0.0
    STATE: ClassVar[Mapping[str, bool]] = {"sum": False}

    def begins_with(self, name: str) -> float:
        return self.initial_accumulator_value

    def change(self, gradients: np.ndarray, state: State, step: int) -> tuple[np.ndarray, State]:
        total = state["sum"] + self._square(gradients)
        return self.lr * gradients / (np.sqrt(total) + self.eps), {"sum": total}

    def _square(self, gradients: np.ndarray) -> np.ndarray:
        return gradients * gradients


@dataclasses.dataclass
class RowWiseAdagrad(Adagrad):
    """Adagrad with one number for each row: it grows by the mean of the squares of the row's gradient.

    Example:
        >>> table = hvd.layers.ShardedEmbedding(10**6, 64, optimizer=hvd.layers.RowWiseAdagrad(lr=0.01))

    Args:
        lr, eps, initial_accumulator_value: as for ``Adagrad``.
    """

    STATE: ClassVar[Mapping[str, bool]] = {"sum": True}

    def _square(self, gradients: np.ndarray) -> np.ndarray:
        return np.mean(gradients * gradients, axis=1, keepdims=True, dtype=gradients.dtype)


@dataclasses.dataclass
class SparseAdam(RowOptimizer):
    """``torch.optim.SparseAdam``, of the rows that have a gradient.

    Example:
        >>> table = hvd.layers.ShardedEmbedding(10**6, 64, optimizer=hvd.layers.SparseAdam(lr=0.001))

    Args:
        lr: the learning rate.
        beta1, beta2: how much of the averages of gradients and of their squares stays in a step.
        eps: is added to the root, against a division by zero.
    """

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    STATE: ClassVar[Mapping[str, bool]] = {"exp_avg": False, "exp_avg_sq": False}

    def change(self, gradients: np.ndarray, state: State, step: int) -> tuple[np.ndarray, State]:
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean = mean + (1 - self.beta1) * (gradients - mean)
        square = square + (1 - self.beta2) * (gradients * gradients - square)
        rate = self.lr * np.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)
        return float(rate) * (mean / (np.sqrt(square) + self.eps)), {"exp_avg": mean, "exp_avg_sq": square}


BY_NAME = {"sgd": SGD, "adagrad": Adagrad, "rowwise_adagrad": RowWiseAdagrad, "sparse_adam": SparseAdam}


def checked(optimizer: str | RowOptimizer) -> RowOptimizer:
    """A rule, or a fresh one by its name. Raises InvalidArgumentError."""
    if isinstance(optimizer, RowOptimizer):
        return optimizer
    if not isinstance(optimizer, str) or optimizer not in BY_NAME:
        raise InvalidArgumentError(
            f"embedding: optimizer must be a RowOptimizer or one of {', '.join(BY_NAME)}, but is {optimizer!r}."
        )
    return BY_NAME[optimizer]()


def apply(
    rule: RowOptimizer, rows: Rows, state: Mapping[str, Rows], places: np.ndarray, gradients: np.ndarray, step: int
) -> None:
    """Changes the rows at some places, each once, and their state, by the rows' gradients."""
    kept = {name: each.gather(places) for name, each in state.items()}
    less, changed = rule.change(gradients, kept, step)
    rows.put(places, rows.gather(places) - less)
    for name, values in changed.items():
        state[name].put(places, values)
    for each in (rows, *state.values()):
        each.let_go()


def state_of(rule: RowOptimizer, rows: Rows, storage: Storage) -> dict[str, Rows]:
    """Fresh state for a table's rows, stored as they are."""
    count, width = rows.array.shape
    made = {}
    for name, one in rule.STATE.items():
        if name == "momentum_buffer" and not getattr(rule, "momentum", 0):
            continue
        columns, value, dtype = 1 if one else width, rule.begins_with(name), rows.array.dtype
        made[name] = Rows(count, columns, dtype, _constant(columns, value, dtype), storage)
    return made


def _constant(width: int, value: float, dtype: np.dtype) -> Initializer:
    return lambda places: np.full((len(places), width), value, dtype)
