"""PowerSGD of PyTorch's gradients: what ``ringtrain.gradients.powersgd`` says, with tensors, on the CPU and on GPUs.

``gradients`` sends the factors; ``exchange`` says which step compresses, and whether its result was used.
"""

from collections.abc import Mapping, Sequence

import torch

from ringtrain.gradients import powersgd
from ringtrain.gradients.powersgd import FACTOR, OF_ALL, RESIDUAL, STEPS, TINY, Beginning, PowerSGD, Shape
from ringtrain.gradients.powersgd import forget as forget
from ringtrain.gradients.powersgd import settle as settle
from ringtrain.gradients.session import Session
from ringtrain.torch.tensors import buffer_of


def shape_of(how: PowerSGD, parameter: torch.Tensor) -> Shape | None:
    """How the gradients of a parameter are approximated; None for one whose gradients travel as they are."""
    return how.shape_of(parameter.shape) if parameter.is_floating_point() else None


class Memory(powersgd.Memory[torch.Tensor]):
    """What is kept of one parameter's gradients from step to step.

    Args:
        shape: of the approximation.
        name: of the parameter; also the seed of the first right factor.
        dtype: of what is kept.
        beginning: of the optimizer.

    Attributes:
        dtype: as given.
    """

    def __init__(self, shape: Shape, name: str, dtype: torch.dtype, beginning: Beginning):
        super().__init__(shape, name, beginning)
        self.dtype = dtype

    def begin(self, like: torch.Tensor) -> torch.Tensor:
        """A right factor to begin with: the last one, columns of length 1; random ones where it says nothing."""
        first = self._first(like)
        if self.factor is None:
            return first
        factor = self.factor.to(like)
        lengths = torch.linalg.vector_norm(factor, dim=0, dtype=torch.float64)
        usable = (lengths > TINY) & lengths.isfinite()
        return torch.where(usable, factor / lengths, first).to(like)

    def _first(self, like: torch.Tensor) -> torch.Tensor:
        random = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(self.shape.columns, self.shape.rank, generator=random) / self.shape.columns**0.5
        return drawn.to(like)


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
    """The columns of a matrix (rows x rank, few columns), made orthonormal in order, in float64."""
    columns = matrix.t().double().contiguous()
    powersgd.orthogonalise(columns, torch.sqrt)
    return columns.t().to(matrix.dtype).contiguous()


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``left @ right.t()`` into ``out``, which is returned."""
    powersgd.multiply(left, right.t().contiguous(), out, in_blocks=not out.is_cuda)
    return out


# ---- what is saved ----


def state_of_all_ranks(
    session: Session, prefix: str, memories: Sequence[Memory], beginning: Beginning
) -> dict[str, dict[str, torch.Tensor]]:
    """By gradient the mean of what the ranks have lost, and the right factor; the same on all ranks. Collective.

    Ranks of a world of any size that start with the mean deliver together what these have lost. Under ``steps`` is how
    many exact ones there were.
    """
    steps = torch.tensor([beginning.steps])
    _reduce(session, f"{prefix}.powersgd.steps", steps, "max")
    state = {STEPS: {OF_ALL: steps}}
    for memory in memories:
        kept = state[f"{memory.name}/0"] = _kept_in(memory)
        _reduce(session, f"{prefix}.powersgd.{memory.name}", kept[RESIDUAL], "average")
    return state


def state_of_this_rank(memories: Sequence[Memory], beginning: Beginning) -> dict[str, dict[str, torch.Tensor]]:
    """The same of what this rank has lost itself."""
    kept = {f"{memory.name}/0": _kept_in(memory) for memory in memories}
    return {STEPS: {OF_ALL: torch.tensor([beginning.steps])}, **kept}


def _kept_in(memory: Memory) -> dict[str, torch.Tensor]:
    rows, columns, rank = memory.shape
    residual, factor = memory.residual, memory.factor
    return {
        RESIDUAL: torch.zeros(rows, columns, dtype=memory.dtype) if residual is None else residual.cpu().clone(),
        FACTOR: torch.zeros(columns, rank) if factor is None else factor.cpu().clone(),
    }


def load_state(
    state: Mapping[str, Mapping[str, torch.Tensor]], memories: Sequence[Memory], beginning: Beginning
) -> None:
    """Goes on with what ``state_of_all_ranks`` has returned, or ``state_of_this_rank`` on this one.

    Raises:
        InvalidArgumentError: it is something else, or of a model with other parameters, or of another rank.
    """
    powersgd.check_state(state, {memory.name: memory.shape for memory in memories})
    beginning.steps = int(state[STEPS][OF_ALL])
    for memory in memories:
        parts = state[f"{memory.name}/0"]
        residual = parts[RESIDUAL].clone() if parts[RESIDUAL].any() else None
        memory.keep(residual, parts[FACTOR].clone())
        memory.settle(used=True)


def _reduce(session: Session, name: str, tensor: torch.Tensor, reduction: str) -> None:
    buffer = [buffer_of(tensor)]
    session.context.submit(
        "allreduce", name, buffer, buffer, reduction=reduction, process_set=session.process_set_id, waits=True
    ).wait()
