"""What one rank's optimizer steps with, and its parameters, to be compared with those of the other ranks.

``ringtrain._training.drift`` says when, and what follows. Left out is what a rank has alone by design: rows of sharded
tables, and tensors that only stand for their parts elsewhere, such as the ``DTensor`` of FSDP2.
"""

import weakref
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import numpy as np
import torch

from ringtrain._training.adapter import checks
from ringtrain._training.adapter.numbering import Number
from ringtrain._training.drift import ComparedReplica, Forms, Named, Settings, Words, flat_settings, kind_of_processor
from ringtrain._training.session import NewWorld, Session
from ringtrain._training.watch import Watch
from ringtrain.torch import parameters
from ringtrain.torch.shards import replicated
from ringtrain.torch.tensors import DTYPE_IDS

CALLED = Words("broadcast_parameters() and broadcast_optimizer_state()")
_BARE = {int, float, bool}
_Number = float | list[float] | None
_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}  # how an update is computed, not what comes of it


def replicas_of(optimizer: torch.optim.Optimizer) -> Callable[[], ComparedReplica]:
    """Makes one for each world that the optimizer comes into. It does not keep the optimizer alive."""
    settings, parameters = settings_of(optimizer), parameters_of(optimizer)
    forms = _forms_of(parameters)
    return lambda: ComparedReplica(settings, parameters, forms, CALLED)


class StepComparison:
    """Compares what ranks step with, and the parameters, in steps that have no rounds. It does not keep the optimizer alive.

    Args:
        optimizer: of this rank.
        session: the rank that it acts for.
        number: of the optimizer; names of operations begin with it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, session: Session, number: Number):
        self._settings, self._parameters = settings_of(optimizer), parameters_of(optimizer)
        self._session, self._number = session, number
        session.on_new_world(self._begin)
        self._begin()

    def _begin(self, _: NewWorld = NewWorld.ANEW) -> None:
        forms = _forms_of(self._parameters)
        self._watch = Watch(self._session, self._number.prefix, CALLED, forms, first_look=1)

    def begin(self) -> Callable[[], None]:
        """Sends what this step is made with; returns what ends the step, and raises MismatchError on all ranks."""
        row = self._watch.begin(self._settings())
        return lambda: self._watch.end(row, self._parameters)


def _forms_of(parameters: Callable[[], Named]) -> Forms:
    return Forms(digest_of, on_host, lambda: processor_of(tensor for _, tensor in parameters()))


def parameters_of(optimizer: torch.optim.Optimizer) -> Callable[[], Named]:
    """Lists those that are compared, with their names. It does not keep the optimizer alive."""
    refer = weakref.ref(optimizer)
    return lambda: [] if (found := refer()) is None else _compared(found)


def settings_of(optimizer: torch.optim.Optimizer) -> Callable[[], Settings]:
    """Reads what the optimizer steps with, which it does not keep alive."""
    refer = weakref.ref(optimizer)
    seen: tuple[list[list[_Number]], Settings] = [], {}  # most steps have the settings of the one before

    def settings() -> Settings:
        nonlocal seen
        groups = [] if (found := refer()) is None else found.param_groups
        numbers = [
            [each if type(each) in _BARE else _number(each) for name, each in group.items() if name not in _HOW]
            for group in groups
        ]
        if numbers != seen[0]:
            names = [[name for name in group if name not in _HOW] for group in groups]
            named = [dict(zip(*pair, strict=True)) for pair in zip(names, numbers, strict=True)]
            seen = numbers, flat_settings(named)
        return seen[1]

    return settings


def processor_of(tensors: Iterable[torch.Tensor]) -> str:
    """Of which kind that is, on which some tensors are updated, with all else that decides how it rounds."""
    on_gpu = next((tensor for tensor in tensors if tensor.is_cuda), None)
    kind = kind_of_processor() if on_gpu is None else torch.cuda.get_device_name(on_gpu.device)
    return f"{kind}, torch {torch.__version__}, {torch.get_num_threads()} threads"  # which divide sums among them


def _number(value: Any) -> _Number:
    """Numbers and sequences of numbers; None for all else, and for a tensor on a GPU, which nothing waits for."""
    if type(value) in _BARE:
        return value
    if isinstance(value, torch.Tensor):
        return value.item() if value.is_cpu and value.numel() == 1 and not value.is_complex() else None
    if isinstance(value, (tuple, list)):  # such as that of the parameters, which has no number
        return list(value) if all(type(each) in _BARE for each in value) else None
    return float(value) if isinstance(value, Real) else None


def _compared(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    names = optimizer._parameter_names
    trained = [each for group in optimizer.param_groups for each in parameters.trained(optimizer, group)]
    return [
        (names.get(each, f"number {place}"), each) for place, each in enumerate(replicated(trained)) if _is_plain(each)
    ]


def _is_plain(parameter: torch.Tensor) -> bool:
    has_parts = hasattr(parameter, "__tensor_flatten__")
    is_made = not isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin)
    return not has_parts and is_made and parameter.layout is torch.strided and not parameter.is_meta


def digest_of(parameter: torch.Tensor) -> int:
    """Of the parameter, contiguous, where the core can read it, and of an element type that it has."""
    plain = parameter.detach()
    if not (plain.is_cpu or plain.is_cuda):
        plain = plain.cpu()
    plain = plain.contiguous()
    return checks.digest(plain if plain.dtype in DTYPE_IDS else plain.reshape(-1).view(torch.uint8))


def on_host(tensor: torch.Tensor) -> np.ndarray:
    """A copy of a tensor, float32 or float64; of complex numbers their parts."""
    parts = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    wide = torch.float64 if parts.dtype is torch.float64 else torch.float32
    return parts.to("cpu", wide, copy=True).contiguous().numpy()
