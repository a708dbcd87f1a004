"""PowerSGD (Vogels et al., arXiv:1905.13727) in every framework: a gradient travels as two thin matrices.

With D the gradient, a matrix, plus what this rank's gradients have lost so far, and Q the right factor of the step before:

    P = orthogonalised(sum of D Q);  L = D' P;  Q = reduced L;  the result is P Q', and D - P L' is lost here

So what a rank keeps is its own rounding error, which does not grow, and what all have delivered and all keep adds up to
what was to be delivered. P and Q are reduced, and what is made of them on each rank is done in one order, by additions,
multiplications, divisions and roots of single elements: results have the same bits on ranks with other processors.

Here are the settings, when an optimizer begins, what is kept, and the arithmetic that gives replicas their bits, over the
``arrays`` of any framework. ``torch.gradients`` sends the factors of each gradient behind the backward pass, ``on_host`` those
of a step of Keras or TensorFlow at once.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ringtrain._runtime.arguments import check_least, integer
from ringtrain._training.arrays import Arrays
from ringtrain._training.residuals import note_forgotten
from ringtrain._training.session import NewWorld, Session
from ringtrain.errors import InvalidArgumentError

TINY = 1e-150  # below it a column is nothing; its square is still a normal float64
STEPS, OF_ALL, RESIDUAL, FACTOR = "steps", "exact", "residual", "factor"  # in a state that is saved
_BLOCK = 1 << 16  # elements that are worked on while they are in a cache


class Shape(NamedTuple):
    """A gradient as a matrix, and the rank of what is sent for it."""

    rows: int
    columns: int
    rank: int


@dataclass(frozen=True)
class PowerSGD:
    """Sends a gradient of two dimensions or more as factors of low rank: for a DistributedOptimizer's ``compression``.

    A gradient of n x m elements (all dimensions but the first are m) becomes ``rank * (n + m)``; others travel as they
    are. What a gradient has lost is added to the next one on this rank, and taken back if the step is skipped.

    Args:
        rank: of the approximation, 1 or more. 1 to 4 are usual: more is better, and more bytes.
        start_after: exact steps before the first compressed one, at least 1; a tenth of the training is usual. Later the
            first step in another world, and after a ``join``, is an exact one too, which sends all that was lost.
        min_compression_rate: gradients that would not shrink by this factor travel exact.

    Raises:
        InvalidArgumentError: a number that cannot be.
    """

    rank: int = 2
    start_after: int = 100
    min_compression_rate: float = 2.0

    def __post_init__(self) -> None:
        for name in ("rank", "start_after"):
            check_least(f"PowerSGD: {name}", integer(f"PowerSGD: {name}", getattr(self, name)), 1)
        check_least("PowerSGD: min_compression_rate", self.min_compression_rate, 1)

    def shape_of(self, dimensions: Sequence[int]) -> Shape | None:
        """How gradients of these dimensions are approximated, if they are floats; None: they travel as they are."""
        if len(dimensions) < 2 or 0 in dimensions:
            return None
        rows, columns = dimensions[0], 1
        for extent in dimensions[1:]:
            columns *= extent
        rank = min(self.rank, rows, columns)
        shrinks = rank * (rows + columns) * self.min_compression_rate <= rows * columns
        return Shape(rows, columns, rank) if shrinks else None


class Beginning:
    """When an optimizer begins to compress: after the same step on all ranks, those included that come later.

    Each rank says in each round whether it has had enough exact steps; one that has is enough. In another world the first
    step is exact, unless all ranks have loaded what they had kept themselves: each says so, and awaits what the others say.

    Args:
        session: whose worlds, and joins, interrupt it.
        start_after: exact steps before the first compressed one.

    Attributes:
        steps: that used their gradients, as far as this rank knows.
        is_open: whether the others have yet to say that the step under way may compress, as this rank could.
    """

    def __init__(self, session: Session, start_after: int):
        self.steps = 0
        self._session = session
        self._start_after = start_after
        session.on_new_world(self._begin)
        self._begin()

    @property
    def is_over(self) -> bool:
        """Whether the step under way compresses; the same on all ranks."""
        return self._is_over and self._joins == self._session.context.joins

    @property
    def says(self) -> bool:
        """Whether the step after this one is to compress, as far as this rank knows."""
        return self.steps + 1 >= self._start_after

    @property
    def is_exact(self) -> bool:
        """Whether this rank cannot compress in the step under way."""
        return not (self.is_over or self.is_open)

    def go_on(self, compresses: bool) -> None:
        """This rank has loaded what it had kept itself; whether its next step was to compress."""
        self._is_over, self.is_open = False, compresses

    def decide(self, any_is_exact: bool) -> None:
        """A round has told whether another rank cannot compress in the step under way."""
        if self.is_open:
            self.is_open = False
            self._is_over, self._joins = not any_is_exact, self._session.context.joins

    def note_round(self, any_says: bool) -> None:
        """A round has closed the step."""
        self._is_next = any_says

    def note_use(self) -> None:
        """The step under way uses its gradients; one that does not might as well not have been."""
        self.steps += 1
        self._is_over, self._joins = self._is_next, self._session.context.joins
        if self._is_over:
            self.steps = max(self.steps, self._start_after)

    def _begin(self, _: NewWorld = NewWorld.ANEW) -> None:
        """The ranks of another world do not know yet what the others have had."""
        self._is_over = self._is_next = self.is_open = False
        self._joins = self._session.context.joins


class Memory:
    """What is kept of one parameter's gradients from step to step.

    Args:
        arrays: of the framework.
        shape: of the approximation.
        name: of the parameter; also the seed of the first right factor.
        beginning: of the optimizer.
        is_double: whether what is lost is kept as float64; else as float32.

    Attributes:
        arrays, shape, name, is_double: as given.
        residual: what was lost so far (rows x columns); None for nothing.
        factor: the right factor (columns x rank) with which the next step begins.
    """

    def __init__(self, arrays: Arrays[Any], shape: Shape, name: str, beginning: Beginning, is_double: bool = False):
        self.arrays, self.shape, self.name, self.is_double = arrays, shape, name, is_double
        self.residual: Any = None
        self.factor: Any = None
        self._beginning = beginning
        self._pending: tuple[Any, Any] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the gradient of the step under way travels as it is, with all that was lost before."""
        return not self._beginning.is_over

    def keep(self, residual: Any, factor: Any) -> None:
        """Notes what the step under way leaves, for when its result is used."""
        self._pending = residual, factor

    def settle(self, used: bool) -> None:
        """The result of the step was used, or was for nothing."""
        if used and self._pending is not None:
            self.residual, self.factor = self._pending
        self._pending = None

    def added_to(self, gradient: Any) -> Any:
        """A copy of a gradient as a matrix, in the dtype of what is kept, plus what was lost before."""
        matrix = self.arrays.matrix(gradient, self.shape.rows, self.shape.columns)
        if self.residual is not None:
            matrix += self.arrays.like(self.residual, matrix)
        return matrix

    def begin(self, like: Any) -> Any:
        """A right factor to begin with: the last one, columns of length 1; random ones where it says nothing."""
        arrays, (_, columns, rank) = self.arrays, self.shape
        seed = int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=4).digest(), "little")
        first = arrays.like(arrays.drawn(seed, columns, rank) / columns**0.5, like)
        if self.factor is None:
            return first
        factor = arrays.like(self.factor, like)
        lengths = arrays.lengths(factor)
        usable = (lengths > TINY) & (lengths < np.inf)
        return arrays.like(arrays.where(usable, factor / arrays.where(usable, lengths, 1.0), first), like)


class Approximation:
    """One gradient on its way as two factors.

    Args:
        memory: of the parameter.
        gradient: dense, of any layout; read at once.

    Attributes:
        left: the factor that is sent first (rows x rank).
        right: the factor that is sent next (columns x rank), once ``left`` has been reduced and ``go_on`` was called.
    """

    def __init__(self, memory: Memory, gradient: Any):
        self._memory = memory
        self._lost = memory.added_to(gradient)
        self.left = self._lost @ memory.begin(self._lost)
        self.right: Any = None

    def go_on(self) -> Any:
        """``left`` is that of all ranks now: returns the right factor to be sent, and notes what is lost with it here."""
        arrays = self._memory.arrays
        self.left = orthogonalised(arrays, self.left)
        self.right = self._lost.T @ self.left
        arrays.subtract_product(self._lost, self.left, self.right)
        return self.right

    def write(self, gradient: Any) -> None:
        """``right`` is that of all ranks now, too: puts the product into the gradient."""
        arrays, (rows, columns, _) = self._memory.arrays, self._memory.shape
        fits = arrays.is_contiguous(gradient) and gradient.dtype == self.left.dtype
        product = gradient.reshape(rows, columns) if fits else arrays.empty_like(self._lost)
        multiply(self.left, arrays.like(self.right.T, self.right), product, arrays.is_on_host(product))
        if not fits:
            gradient[...] = product.reshape(gradient.shape)
        self._memory.keep(self._lost, self.right)


def settle(memories: Iterable[Memory], used: bool) -> None:
    """``Memory.settle`` of all parameters of an optimizer."""
    for memory in memories:
        memory.settle(used)


def forget(memories: Sequence[Memory], prefix: str) -> None:
    """Another state was loaded: what ranks have lost is forgotten. Right factors stay, being where the next ones begin."""
    note_forgotten(prefix, sum(memory.residual is not None for memory in memories))
    for memory in memories:
        memory.keep(None, memory.factor)
        memory.settle(used=True)


# ---- arithmetic ----


def orthogonalised(arrays: Arrays[Any], matrix: Any) -> Any:
    """The columns of a matrix (rows x rank, few columns), made orthonormal in order, in float64."""
    columns = arrays.wide(matrix.T)
    orthogonalise(columns, arrays.sqrt)
    return arrays.like(columns.T, matrix)


def orthogonalise(columns: Any, root: Callable[[Any], Any]) -> None:
    """Makes the rows of ``columns`` orthonormal in place, by the modified Gram-Schmidt process, in order.

    Those that are zero, or that come to be, stay so. One NaN or infinity in a row makes all of those after it NaN.

    Args:
        columns: few long rows of float64; the columns of a matrix, transposed.
        root: the square root, correctly rounded.
    """
    for place in range(len(columns)):
        column = columns[place]
        column /= root(halved_sum((column * column)[None])).clip(TINY)
        rest = columns[place + 1 :]
        if len(rest):
            rest -= halved_sum(rest * column)[:, None] * column


def halved_sum(rows: Any) -> Any:
    """The sum of each row, halves added until one element is left: an order that no processor changes."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        total = rows[:, :half] + rows[:, half : 2 * half]
        if rows.shape[1] % 2:
            total[:, 0] += rows[:, -1]
        rows = total
    return rows[:, 0]


def multiply(left: Any, factors: Any, out: Any, in_blocks: bool = True) -> None:
    """``left @ factors`` into ``out``; each element added up in the order of the columns of ``left``.

    Not by a matrix product, whose order, and whose fused operations, differ between processors.

    Args:
        left: rows x rank.
        factors: rank x columns.
        out: rows x columns.
        in_blocks: as they fit into a processor's cache; else all at once.
    """
    step = max(1, _BLOCK // out.shape[1]) if in_blocks else len(left)
    for first in range(0, len(left), step):
        block, rows = out[first : first + step], left[first : first + step]
        block[...] = factors[0]
        block *= rows[:, :1]
        for place in range(1, len(factors)):
            block += rows[:, place : place + 1] * factors[place]


# ---- what is saved ----


def state_of_all_ranks(
    session: Session, prefix: str, arrays: Arrays[Any], memories: Iterable[Memory], beginning: Beginning
) -> dict[str, dict[str, Any]]:
    """By gradient the mean of what the ranks have lost, and the right factor; the same on all ranks. Collective.

    Ranks of a world of any size that start with the mean deliver together what these have lost. Under ``steps`` is how
    many exact ones there were.
    """
    state = state_of_this_rank(arrays, memories, beginning)
    for key, parts in state.items():
        name, part, how = ("steps", OF_ALL, "max") if key == STEPS else (key.rpartition("/")[0], RESIDUAL, "average")
        buffer = [arrays.buffer(parts[part])]
        session.context.submit(
            "allreduce", f"{prefix}powersgd.{name}", buffer, buffer,
            reduction=how, process_set=session.process_set_id, waits=True,
        ).wait()  # fmt: skip
    return state


def state_of_this_rank(
    arrays: Arrays[Any], memories: Iterable[Memory], beginning: Beginning
) -> dict[str, dict[str, Any]]:
    """The same of what this rank has lost itself."""
    kept = {f"{memory.name}/0": _kept_in(memory) for memory in memories}
    return {STEPS: {OF_ALL: arrays.from_host(np.array([beginning.steps]))}, **kept}


def _kept_in(memory: Memory) -> dict[str, Any]:
    arrays, (rows, columns, rank) = memory.arrays, memory.shape
    nothing = {
        RESIDUAL: np.zeros((rows, columns), np.float64 if memory.is_double else np.float32),
        FACTOR: np.zeros((columns, rank), np.float32),
    }
    kept = {RESIDUAL: memory.residual, FACTOR: memory.factor}
    return {part: arrays.from_host(nothing[part]) if kept[part] is None else arrays.saved(kept[part]) for part in kept}


def load_state(state: Mapping[str, Mapping[str, Any]], memories: Sequence[Memory], beginning: Beginning) -> None:
    """Goes on with what ``state_of_all_ranks`` has returned, or ``state_of_this_rank`` on this one.

    Raises:
        InvalidArgumentError: it is something else, or of a model with other parameters, or of another rank.
    """
    check_state(state, {memory.name: memory.shape for memory in memories})
    beginning.steps = int(state[STEPS][OF_ALL][0])
    for memory in memories:
        parts, saved = state[f"{memory.name}/0"], memory.arrays.saved
        memory.keep(saved(parts[RESIDUAL]) if parts[RESIDUAL].any() else None, saved(parts[FACTOR]))
        memory.settle(used=True)


def check_state(state: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, Shape]) -> None:
    """Raises InvalidArgumentError unless a state has what gradients of these names and shapes leave, and nothing else."""
    expected: dict[str, dict[str, tuple[int, ...]]] = {STEPS: {OF_ALL: (1,)}}
    for name, (rows, columns, rank) in shapes.items():
        expected[f"{name}/0"] = {RESIDUAL: (rows, columns), FACTOR: (columns, rank)}
    found = {name: {part: tuple(parts[part].shape) for part in parts} for name, parts in state.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise InvalidArgumentError(
                f"load_compression_state '{name}': expected {_described(expected.get(name))} but found "
                f"{_described(found.get(name))}. Load what compression_state() of this model, with the same PowerSGD, has returned."
            )


def _described(parts: Mapping[str, tuple[int, ...]] | None) -> str:
    return "nothing" if parts is None else " and ".join(f"{part} of {shape}" for part, shape in parts.items())
