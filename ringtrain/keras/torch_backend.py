"""Gradients of Keras on PyTorch; see ``backends`` for who asks."""

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import torch
from numpy.typing import ArrayLike

import ringtrain.torch as hvd
from ringtrain._binding import tables
from ringtrain._runtime.process_sets import ProcessSet, size_of
from ringtrain._training import residuals
from ringtrain._training.drift import Settings
from ringtrain._training.grouping import Groups
from ringtrain._training.session import Session
from ringtrain._training.watch import Comparison, Forms, Watch
from ringtrain.elastic.followed import followed, surviving
from ringtrain.embedding.table import SelfUpdatingTable, with_rows
from ringtrain.keras.presence import Combine, reduce_present
from ringtrain.keras.stepping import CALLED
from ringtrain.keras.types import Flag

if TYPE_CHECKING:
    from ringtrain.keras.reduction_settings import Settings as ReductionSettings
from ringtrain.torch.compression import Compressor, compression_in_the_core
from ringtrain.torch.drift import digest_of, processor_of
from ringtrain.torch.drift import on_host as on_host_exactly

columns: list[str] = []
compiles_operations = carries_variables = False
rows_come_late = True
Compression = hvd.Compression


class _Eager:
    """PyTorch knows one scope only."""


_EAGER = _Eager()


def unconverted(method: Callable) -> Callable:
    """The method: PyTorch does not convert control flow."""
    return method


def operations_for(value: ArrayLike) -> ModuleType:
    """The module whose operations take a value."""
    return hvd


def tensor(value: ArrayLike) -> torch.Tensor:
    """A value as the operations take it."""
    return keras.ops.convert_to_tensor(value)


def own_name(name: str | None) -> str | None:
    """A name given to an operation."""
    return name


def is_compiled() -> bool:
    """PyTorch's compiler leaves operations between ranks out by itself."""
    return False


def is_traced() -> bool:
    """Whether what runs now becomes a graph: PyTorch runs it at once."""
    return False


def on_host(
    function: Callable[..., list[np.ndarray]],
    inputs: Sequence[torch.Tensor | float],
    results: Sequence[tuple[tuple[int, ...], str]],
) -> list[np.ndarray]:
    """Calls a function with arrays; returns its arrays, of these shapes and dtypes."""
    return function(*(keras.ops.convert_to_numpy(each) for each in inputs))


def apply(
    plain: Any,
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[torch.Tensor],
    variables: Sequence[keras.Variable],
) -> None:
    """The update of the user's class, whose methods ``plain`` has."""
    plain.apply(gradients, variables)


def cond(condition: Flag, true: Callable[[], Any], false: Callable[[], Any]) -> Any:
    """What one of two functions returns; their errors keep their words, which ``keras.ops.cond`` puts its own around."""
    return true() if condition else false()


def begin_anew(prefix: str) -> None:
    """All ranks make new steps: nothing is remembered of those before."""


def is_given(variable: keras.Variable) -> bool:
    """Whether a variable has its value in the step that runs: each has."""
    return True


def wire_of(compression: type[Compressor] | None) -> str | None:
    """The core's name for what a compression does; None for a class of the user's own."""
    return "none" if compression is None else compression_in_the_core(compression)


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with all its rows."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def each_index_once(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, since Keras' layers make dense ones here."""
    return gradient


def divided_by_size(gradient: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """The gradient over the number of a set's ranks."""
    return gradient * (1.0 / size_of(process_set))


def scopes() -> list[object]:
    """What is being run now, as ``tensorflow.keras_backend`` has it."""
    return [_EAGER]


def reduce(
    gradients: Sequence[torch.Tensor | None],
    names: Sequence[str],
    variables: Sequence[keras.Variable],
    settings: "ReductionSettings",
) -> list[torch.Tensor | None]:
    """The gradients combined over the ranks as ``reduction.Settings`` say; each group of them is one operation."""
    arguments: dict[str, Any] = {
        "op": settings.op,
        "prescale_factor": 1.0 / settings.gradient_predivide_factor,
        "postscale_factor": settings.gradient_predivide_factor,
        "process_set": settings.process_set,
        "compression": settings.compression or hvd.Compression.none,
    }

    if (state := followed()) is not None:
        state.check_gradients("DistributedOptimizer", settings.op)

    def combine(places: list[int], completed: list[torch.Tensor]) -> list[torch.Tensor]:
        sent = [dense(completed[place]) for place in places]
        weight = None if state is None else state.share(settings.op)
        return hvd.grouped_allreduce(sent, name=names[places[0]], weight=weight, **arguments)

    groups = 1 if settings.groups is None else settings.groups

    def add_up() -> list[torch.Tensor | None]:
        return _reduce_present(gradients, names, variables, settings, groups, combine)

    if state is None or not gradients or (compared := state.take_comparison()) is None:
        return with_rows(state, variables, settings.op, add_up)
    return with_rows(state, variables, settings.op, lambda: compared.around(add_up, compared.rate))


def watch(session: Session, name: str, parameters: Sequence[keras.Variable]) -> Watch:
    """What compares the ranks' steps with each other."""
    forms = Forms(digest_of, on_host_exactly, lambda: processor_of(variable.value for variable in parameters))
    return Watch(session, name, CALLED, forms)


def comparison(
    watch: Watch,
    settings: Settings,
    rate: keras.Variable | torch.Tensor | float | None,
    parameters: Sequence[tuple[str, keras.Variable]],
) -> Comparison:
    """What a step compares, as ``tensorflow.watching.comparison`` has it."""
    number = None if rate is None else keras.ops.convert_to_tensor(rate)
    if number is not None and number.is_cuda:  # no step waits for the GPU
        number = None
    found = None if number is None else _as_numpy(number)
    return Comparison(watch, settings, found, parameters, lambda variable: variable.value.detach())


def watched(
    compared: Comparison, process_set: ProcessSet, reduce: Callable[[], list[torch.Tensor | None]]
) -> list[torch.Tensor | None]:
    """What ``reduce`` returns, once ranks have found that they step alike; as ``tensorflow.watching.watched`` has it."""
    if (state := followed()) is not None:
        with state.comparing(compared):
            return reduce()
    return compared.around(reduce, compared.rate)


def _as_numpy(number: torch.Tensor) -> np.ndarray:
    wide = number.detach()
    return (wide if wide.dtype in (torch.float32, torch.float64) else wide.float()).numpy()


def completed(
    gradients: Sequence[torch.Tensor | None],
    names: Sequence[str],
    variables: Sequence[keras.Variable],
    settings: "ReductionSettings",
) -> list[torch.Tensor | None]:
    """The gradients with zeros for those that only other ranks have."""
    return _reduce_present(gradients, names, variables, settings, 1, lambda places, found: [found[at] for at in places])


def like(result: np.ndarray, gradient: torch.Tensor) -> torch.Tensor:
    """What ``on_host`` has returned in the place of a gradient."""
    exact = result.astype("float32") if result.dtype.name == "bfloat16" else result
    return torch.from_numpy(exact).to(gradient.device, gradient.dtype)


def here(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient as it is: PyTorch knows one scope only."""
    return gradient


def keeps_residuals(compression: type[Compressor]) -> bool:
    """Whether the core makes up for what a compression has lost of the gradients before."""
    return compression_in_the_core(compression) in tables.WITHOUT_FEEDBACK


def settle_residuals(used: Flag, session: Session, prefix: str) -> None:
    """``residuals.settle``."""
    residuals.settle(session, prefix, bool(used))


def maxima(
    gradients: Sequence[torch.Tensor | None],
    names: Sequence[str],
    variables: Sequence[keras.Variable],
    settings: "ReductionSettings",
) -> list[torch.Tensor | None]:
    """The largest of the ranks' values, element by element."""

    def combine(places: list[int], completed: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            hvd.allreduce(completed[place], op=hvd.Max, name=names[place], process_set=settings.process_set)
            for place in places
        ]

    return surviving(lambda: _reduce_present(gradients, names, variables, settings, 1, combine))


def _reduce_present(
    gradients: Sequence[torch.Tensor | None],
    names: Sequence[str],
    variables: Sequence[keras.Variable],
    settings: "ReductionSettings",
    groups: Groups,
    combine: Combine,
) -> list[torch.Tensor | None]:
    with torch.no_grad():
        return reduce_present(
            gradients, names, variables, settings, groups, combine, lambda variable: torch.zeros_like(variable.value)
        )


class _Rows(torch.autograd.Function):
    """The rows that a table gives, whose gradients wait there."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, anchor: torch.Tensor, table: SelfUpdatingTable, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, places, ctx.trip = table.look_up(ids.detach().cpu().numpy())
        ctx.table = table
        found = torch.from_numpy(rows).to(ids.device), torch.from_numpy(places).to(ids.device)
        ctx.mark_non_differentiable(found[1])
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor, _: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        zero = ctx.table.bring(ctx.trip, gradient.detach().cpu().contiguous().numpy())
        return torch.tensor(float(zero), device=gradient.device), None, None


def rows_of(table: SelfUpdatingTable, ids: torch.Tensor, anchor: keras.Variable) -> torch.Tensor:
    """Rows of a ``SelfUpdatingTable``, whose gradients wait there; ``anchor`` gets that of ``SelfUpdatingTable.bring``."""
    if ids.is_meta:  # Keras asks for shapes, as on a rank that joins while the others are in a step
        return torch.empty((*ids.shape, table.width), device="meta")
    value = anchor.value if hasattr(anchor, "value") else anchor
    rows, places = _Rows.apply(value, table, ids)
    return torch.nn.functional.embedding(places, rows)


class _Stream(torch.utils.data.IterableDataset):
    """What a reader yields, from its beginning each time."""

    def __init__(self, reader: Callable[[], Iterator[object]]):
        self._reader = reader

    def __iter__(self) -> Iterator[object]:
        return self._reader()


def dataset(reader: Callable[[], Iterator[object]], example: object) -> torch.utils.data.DataLoader:
    """What ``fit`` reads, batch by batch: each is asked for when its step begins, and none ahead.

    Args:
        reader: makes an iterator over batches of arrays.
        example: accepted for the other backend's sake.
    """
    return torch.utils.data.DataLoader(_Stream(reader), batch_size=None)
