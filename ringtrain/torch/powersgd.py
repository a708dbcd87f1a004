"""PowerSGD (Vogels et al., arXiv:1905.13727): a gradient travels as two thin matrices, and what these miss comes later.

With D the gradient, a matrix, plus what this rank's gradients have lost so far, and Q the right factor of the step before:

    P = orthogonalised(sum of D Q);  L = D' P;  Q = reduced L;  the result is P Q', and D - P L' is lost here

So what a rank keeps is its own rounding error, which does not grow, and what all have delivered and all keep adds up to
what was to be delivered. P and Q are reduced, and what is made of them on each rank is done in one order, by additions,
multiplications, divisions and roots of single elements: results have the same bits on ranks with other processors.
``gradients`` sends the factors; ``exchange`` says which step compresses, and whether its result was used.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ringtrain.arguments import integer
from ringtrain.errors import InvalidArgumentError
from ringtrain.gradients.residuals import note_forgotten
from ringtrain.gradients.session import Session
from ringtrain.torch.tensors import buffer_of

_BLOCK = 1 << 16  # elements that are worked on while they are in a cache
_TINY = 1e-150  # below it a column is nothing; its square is still a normal float64


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
            if integer(f"PowerSGD: {name}", getattr(self, name)) < 1:
                raise InvalidArgumentError(f"PowerSGD: {name} must be at least 1, but is {getattr(self, name)}.")
        if not self.min_compression_rate >= 1:
            raise InvalidArgumentError(
                f"PowerSGD: min_compression_rate must be at least 1, but is {self.min_compression_rate!r}."
            )

    def shape_of(self, parameter: torch.Tensor) -> "Shape | None":
        """How the gradients of a parameter are approximated; None for one whose gradients travel as they are."""
        if not parameter.is_floating_point() or parameter.dim() < 2 or not parameter.numel():
            return None
        rows = parameter.shape[0]
        columns = parameter.numel() // rows
        rank = min(self.rank, rows, columns)
        shrinks = rank * (rows + columns) * self.min_compression_rate <= rows * columns
        return Shape(rows, columns, rank) if shrinks else None


class Shape(NamedTuple):
    """A gradient as a matrix, and the rank of what is sent for it."""

    rows: int
    columns: int
    rank: int


class Beginning:
    """When an optimizer begins to compress: after the same step on all ranks, those included that come later.

    Each rank says in each round whether it has had enough exact steps; one that has is enough.

    Args:
        session: whose worlds, and joins, interrupt it.
        start_after: exact steps before the first compressed one.

    Attributes:
        steps: that used their gradients, as far as this rank knows.
    """

    def __init__(self, session: Session, start_after: int):
        self.steps = 0
        self._session = session
        self._start_after = start_after
        self.enter_world()

    @property
    def is_over(self) -> bool:
        """Whether the step under way compresses; the same on all ranks."""
        return self._is_over and self._joins == self._session.context.joins

    @property
    def says(self) -> bool:
        """Whether the step after this one is to compress, as far as this rank knows."""
        return self.steps + 1 >= self._start_after

    def note_round(self, any_says: bool) -> None:
        """A round has closed the step."""
        self._is_next = any_says

    def note_use(self) -> None:
        """The step under way uses its gradients; one that does not might as well not have been."""
        self.steps += 1
        self._is_over, self._joins = self._is_next, self._session.context.joins
        if self._is_over:
            self.steps = max(self.steps, self._start_after)

    def enter_world(self) -> None:
        """The ranks of another world do not know yet what the others have had."""
        self._is_over = self._is_next = False
        self._joins = self._session.context.joins


class Memory:
    """What is kept of one parameter's gradients from step to step.

    Args:
        shape: of the approximation.
        name: of the parameter; also the seed of the first right factor.
        dtype: of what is kept.
        beginning: of the optimizer.

    Attributes:
        shape: as given.
        name: as given.
        dtype: as given.
        residual: what was lost so far (rows x columns); None for nothing.
        factor: the right factor (columns x rank) with which the next step begins.
    """

    def __init__(self, shape: Shape, name: str, dtype: torch.dtype, beginning: Beginning):
        self.shape, self.name, self.dtype = shape, name, dtype
        self.residual: torch.Tensor | None = None
        self.factor: torch.Tensor | None = None
        self._seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
        self._beginning = beginning
        self._pending: tuple[torch.Tensor | None, torch.Tensor | None] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the gradient of the step under way travels as it is, with all that was lost before."""
        return not self._beginning.is_over

    def begin(self, like: torch.Tensor) -> torch.Tensor:
        """A right factor to begin with: the last one, columns of length 1; random ones where it says nothing."""
        first = self._first(like)
        if self.factor is None:
            return first
        factor = self.factor.to(like)
        lengths = torch.linalg.vector_norm(factor, dim=0, dtype=torch.float64)
        usable = (lengths > _TINY) & lengths.isfinite()
        return torch.where(usable, factor / lengths, first).to(like)

    def _first(self, like: torch.Tensor) -> torch.Tensor:
        random = torch.Generator().manual_seed(self._seed)
        drawn = torch.randn(self.shape.columns, self.shape.rank, generator=random) / self.shape.columns**0.5
        return drawn.to(like)

    def keep(self, residual: torch.Tensor | None, factor: torch.Tensor | None) -> None:
        """Notes what the step under way leaves, for when its result is used."""
        self._pending = residual, factor

    def settle(self, used: bool) -> None:
        """The result of the step was used, or was for nothing."""
        if used and self._pending is not None:
            self.residual, self.factor = self._pending
        self._pending = None


class Approximation:
    """One gradient on its way as two factors.

    Args:
        memory: of the parameter.
        gradient: dense, of any layout; read at once.

    Attributes:
        left: the factor that is sent first (rows x rank).
        right: the factor that is sent next (columns x rank), once ``left`` has been reduced and ``go_on`` was called.
    """

    def __init__(self, memory: Memory, gradient: torch.Tensor):
        self._memory = memory
        self._lost = with_residual(gradient, memory)
        self.left = self._lost @ memory.begin(self._lost)
        self.right: torch.Tensor | None = None

    def go_on(self) -> torch.Tensor:
        """``left`` is that of all ranks now: returns the right factor to be sent, and notes what is lost with it here."""
        self.left = orthogonalised(self.left)
        self.right = self._lost.t() @ self.left
        self._lost.addmm_(self.left, self.right.t(), alpha=-1)
        return self.right

    def write(self, gradient: torch.Tensor) -> None:
        """``right`` is that of all ranks now, too: puts the product into the gradient."""
        assert self.right is not None
        shape = self._memory.shape
        if gradient.is_contiguous() and gradient.dtype == self.left.dtype:
            multiply(self.left, self.right, gradient.view(shape.rows, shape.columns))
        else:
            product = multiply(self.left, self.right, torch.empty_like(self._lost))
            gradient.copy_(product.view(gradient.shape))
        self._memory.keep(self._lost, self.right)


def with_residual(gradient: torch.Tensor, memory: Memory) -> torch.Tensor:
    """A copy of a gradient as a matrix, in the dtype of what is kept, plus what was lost before."""
    matrix = torch.empty(memory.shape.rows, memory.shape.columns, dtype=memory.dtype, device=gradient.device)
    matrix.copy_(gradient.reshape(matrix.shape))
    return matrix if memory.residual is None else matrix.add_(memory.residual.to(matrix.device))


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """The columns of a matrix, made orthonormal by the modified Gram-Schmidt process, in order, in float64.

    Columns that are zero, or that come to be, stay so. One NaN or infinity in a column makes all of those after it NaN.

    Args:
        matrix: rows x rank, few columns.
    """
    columns = matrix.t().double().contiguous()
    for place in range(len(columns)):
        column = columns[place]
        column /= _sum((column * column)[None]).sqrt().clamp_min(_TINY)
        rest = columns[place + 1 :]
        if len(rest):
            rest -= _sum(rest * column)[:, None] * column
    return columns.t().to(matrix.dtype).contiguous()


def _sum(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each row, halves added until one element is left: an order that no processor changes."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        total = rows[:, :half] + rows[:, half : 2 * half]
        if rows.shape[1] % 2:
            total[:, 0] += rows[:, -1]
        rows = total
    return rows[:, 0]


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``left @ right.t()`` into ``out``, which is returned; each element added up in the order of the columns.

    Not by a matrix product, whose order, and whose fused operations, differ between processors.
    """
    factors = right.t().contiguous()
    step = len(left) if out.is_cuda else max(1, _BLOCK // out.shape[1])
    for first in range(0, len(left), step):
        block, rows = out[first : first + step], left[first : first + step]
        torch.mul(rows[:, :1], factors[0], out=block)
        for place in range(1, len(factors)):
            block += rows[:, place : place + 1] * factors[place]
    return out


def settle(memories: Sequence[Memory], used: bool) -> None:
    """``Memory.settle`` of all parameters of an optimizer."""
    for memory in memories:
        memory.settle(used)


# ---- what is saved ----

_STEPS, _OF_ALL, _RESIDUAL, _FACTOR = "steps", "exact", "residual", "factor"


def state_of_all_ranks(
    session: Session, prefix: str, memories: Sequence[Memory], beginning: Beginning
) -> dict[str, dict[str, torch.Tensor]]:
    """By gradient the mean of what the ranks have lost, and the right factor; the same on all ranks. Collective.

    Ranks of a world of any size that start with the mean deliver together what these have lost. Under ``steps`` is how
    many exact ones there were.
    """
    steps = torch.tensor([beginning.steps])
    _reduce(session, f"{prefix}.powersgd.steps", steps, "max")
    state = {_STEPS: {_OF_ALL: steps}}
    for memory in memories:
        rows, columns, rank = memory.shape
        if memory.residual is None:
            residual = torch.zeros(rows, columns, dtype=memory.dtype)
        else:
            residual = memory.residual.cpu().clone()
        _reduce(session, f"{prefix}.powersgd.{memory.name}", residual, "average")
        factor = torch.zeros(columns, rank) if memory.factor is None else memory.factor.cpu().clone()
        state[f"{memory.name}/0"] = {_RESIDUAL: residual, _FACTOR: factor}
    return state


def load_state(
    state: Mapping[str, Mapping[str, torch.Tensor]], memories: Sequence[Memory], beginning: Beginning
) -> None:
    """Goes on with what ``state_of_all_ranks`` has returned.

    Raises:
        InvalidArgumentError: it is something else, or of a model with other parameters, or of another rank.
    """
    expected: dict[str, dict[str, tuple[int, ...]]] = {_STEPS: {_OF_ALL: (1,)}}
    for memory in memories:
        rows, columns, rank = memory.shape
        expected[f"{memory.name}/0"] = {_RESIDUAL: (rows, columns), _FACTOR: (columns, rank)}
    found = {name: {part: tuple(parts[part].shape) for part in parts} for name, parts in state.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise InvalidArgumentError(
                f"load_compression_state '{name}': expected {_described(expected.get(name))} but found "
                f"{_described(found.get(name))}. Load what compression_state() of this model, with the same PowerSGD, has returned."
            )
    beginning.steps = int(state[_STEPS][_OF_ALL])
    for memory in memories:
        parts = state[f"{memory.name}/0"]
        memory.keep(parts[_RESIDUAL].clone(), parts[_FACTOR].clone())
        memory.settle(used=True)


def forget(memories: Sequence[Memory], prefix: str) -> None:
    """Another state was loaded: what ranks have lost is forgotten. Right factors stay, being where the next ones begin."""
    note_forgotten(prefix, sum(memory.residual is not None for memory in memories))
    for memory in memories:
        memory.keep(None, memory.factor)
        memory.settle(used=True)


def _described(parts: Mapping[str, tuple[int, ...]] | None) -> str:
    return "nothing" if parts is None else " and ".join(f"{part} of {shape}" for part, shape in parts.items())


def _reduce(session: Session, name: str, tensor: torch.Tensor, reduction: str) -> None:
    buffer = [buffer_of(tensor)]
    session.context.submit(
        "allreduce", name, buffer, buffer, reduction=reduction, process_set=session.process_set_id, waits=True
    ).wait()
