"""What stands in ``p.grad`` of a gradient of which each rank has a part of the sum alone.

So torch's own ``clip_grad_norm_``, ``clip_grad_value_`` and ``GradScaler`` work as they are: norms, and whether all is
finite, are those of all ranks, which ask together; factors and limits are applied to this rank's part.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ringtrain._binding.buffers import as_buffer
from ringtrain._training.session import Session
from ringtrain._training.shares import Piece
from ringtrain.errors import UnsupportedError
from ringtrain.torch.modes.base import State
from ringtrain.torch.modes.sharded_checkpoint import StateShard

_aten = torch.ops.aten
_DETACHING = {_aten.detach.default, _aten.detach_.default}
_ZEROING = {_aten.zero_.default, _aten._foreach_zero_.default}
_NORMS = {_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar}
_UNSCALING = {_aten._amp_foreach_non_finite_check_and_unscale_.default}
# Each element by itself, with numbers that are the same for all.
_ELEMENTWISE = {
    _aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar, _aten.neg_.default,
    _aten.clamp_.default, _aten.clamp_min_.default, _aten.clamp_max_.default, _aten.nan_to_num_.default,
    _aten._foreach_mul_.Tensor, _aten._foreach_mul_.Scalar, _aten._foreach_div_.Tensor, _aten._foreach_div_.Scalar,
    _aten._foreach_clamp_min_.Scalar, _aten._foreach_clamp_max_.Scalar,
}  # fmt: skip


class SentGradient(torch.Tensor):
    """The gradient of one parameter. It has no elements: who looks at them raises the error that says what to do.

    Attributes:
        part: of the parameter, which this rank updates, with its gradient; None for none.
    """

    part: torch.nn.Parameter | None
    _parameter: weakref.ref[torch.Tensor]  # which has this one: Python would not find the circle
    _piece: Piece
    _name: str
    _of_all: "SentGradients"
    _norms: dict[float, torch.Tensor]  # by order

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        """Without elements."""
        return f"SentGradient('{self._name}', shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def parameter(self) -> torch.Tensor:
        """As given."""
        parameter = self._parameter()
        assert parameter is not None  # the optimizer has it, or it has this gradient
        return parameter

    def share_in(self, values: torch.Tensor, piece: Piece) -> None:
        """Makes the part in this rank's share of the values."""
        self._piece = piece
        self.part = torch.nn.Parameter(values[piece.at :][: piece.last - piece.first], requires_grad=False)

    @property
    def is_in_place(self) -> bool:
        """Whether the parameter has it."""
        return self.parameter.grad is self

    def take(self, sums: torch.Tensor) -> None:
        """The part gets its gradient from what this rank has received."""
        self._norms.clear()
        if self.part is not None:
            self.part.grad = sums[self._piece.at :][: len(self.part)]

    def read(self) -> None:
        """The part gets the values that the parameter holds, and that one's gradient, whoever has put them there."""
        if self.part is not None:
            self.part.copy_(self._cut(self.parameter.detach()))
            gradient = self.parameter.grad
            if gradient is not self:
                self.part.grad = None if gradient is None else self._cut(gradient.detach().to_dense())

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1)[self._piece.first : self._piece.last]

    # ---- the optimizer's state ----

    def part_of(self, value: object) -> object:
        """Its part of a value of the parameter's state: of the elements, where that has some for each, else all of it."""
        if not isinstance(value, torch.Tensor):
            return value
        return (self._cut(value.detach()) if value.shape == self.parameter.shape else value.detach()).clone()

    def own_state(self, state: dict[torch.Tensor, State]) -> tuple[Piece, State] | None:
        """The part's, with its place; None where there is none."""
        return None if self.part not in state else (self._piece, dict(state[self.part]))

    def shards_of(self, name: str, state: dict[torch.Tensor, State]) -> State:
        """The part's, of which values with an element for each of the parameter's are shards of the whole ones."""
        assert self.part is not None
        return {
            key: StateShard.of(name, self.shape, value, self._piece) if _fits(value, self._piece) else value
            for key, value in state[self.part].items()
        }

    def take_shards(self, values: State) -> State:
        """The part's state of such shards, or of whole values."""
        return {key: each.own if isinstance(each, StateShard) else self.part_of(each) for key, each in values.items()}

    def put_together(self, whole: State, piece: Piece, part: State) -> None:
        """Adds what a rank has of the state to that of the parameter."""
        for key, value in part.items():
            if _fits(value, piece):
                if key not in whole:
                    whole[key] = torch.zeros(self.parameter.shape, dtype=value.dtype)
                whole[key].view(-1)[piece.first : piece.last] = value
            else:
                whole[key] = value

    # ---- what is done with it ----

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target, others = args[0], [*args[1:], *kwargs.values()]
        listed = target if isinstance(target, (list, tuple)) else [target]
        among = itertools.chain(listed, *(each if isinstance(each, (list, tuple)) else [each] for each in others))
        sent = [each for each in among if isinstance(each, SentGradient)]
        if func in _DETACHING:
            return target
        if func in _NORMS and len(others) <= 1 and all(each.is_in_place for each in sent):
            norms = [_norm(each, *others) for each in listed]
            return norms[0] if listed is not target else norms
        if func in _ZEROING:
            for each in listed:
                _zero(each)
        elif func in _UNSCALING:
            sent[0]._of_all.unscale(list(_values_of(listed)), *others)
        elif func in _ELEMENTWISE and not any(_has_elements(each) for each in others):
            values = list(_values_of(listed))
            for each in [values] if listed is target and values else values:
                func(each, *args[1:], **kwargs)
        else:
            raise UnsupportedError(_refusal(sent, func))
        return target if listed is not target else None


class SentGradients:
    """Those of one optimizer.

    Args:
        session: the rank, and those that share the gradients.

    Attributes:
        prefix: of the names of operations, in the one world that the shares have.
    """

    def __init__(self, session: Session):
        self.prefix = ""
        self._session = session
        self._sent: list[SentGradient] = []

    def add(self, parameter: torch.Tensor, name: str) -> SentGradient:
        """Makes the one of a parameter."""
        made: SentGradient = torch.Tensor._make_wrapper_subclass(
            SentGradient, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        made._parameter, made.part, made._name, made._of_all, made._norms = weakref.ref(parameter), None, name, self, {}
        self._sent.append(made)
        return made

    def in_place(self) -> list[SentGradient]:
        """Those that parameters have; the same on all ranks."""
        return [each for each in self._sent if each.is_in_place]

    def compute_norms(self, p: float) -> None:
        """Those of all gradients, by one operation; on all ranks together."""
        sent, infinite = self.in_place(), p == float("inf")
        own = np.zeros(len(sent))
        for place, each in enumerate(sent):
            if each.part is not None and each.part.grad is not None:
                norm = float(torch.linalg.vector_norm(each.part.grad, p, dtype=torch.float64))
                own[place] = norm if infinite else norm**p
        for each, total in zip(sent, self._reduced("norms", own, "max" if infinite else "sum"), strict=True):
            each._norms[p] = torch.tensor(total if infinite else total ** (1 / p), dtype=each.dtype)

    def unscale(self, values: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        """For a ``GradScaler``; it finds an infinity where any rank has one."""
        if values:
            torch._amp_foreach_non_finite_check_and_unscale_(values, found_inf, inverse_scale)
        found_inf.fill_(self._reduced("found_inf", np.array([float(found_inf)]), "max")[0])

    def _reduced(self, what: str, own: np.ndarray, reduction: str) -> list[float]:
        buffer, session = as_buffer(own), self._session
        session.context.submit(
            "allreduce", f"{self.prefix}.{what}", [buffer], [buffer],
            reduction=reduction, process_set=session.process_set_id, waits=True,
        ).wait()  # fmt: skip
        return [float(each) for each in own]


def _fits(value: object, piece: Piece) -> bool:
    """Whether a value of a part's state has an element for each of the part's."""
    return isinstance(value, torch.Tensor) and value.shape == (piece.last - piece.first,)


def _values_of(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The memory to be changed; norms that were asked for before are known no more."""
    for each in tensors:
        if not isinstance(each, SentGradient):
            yield each
            continue
        each._norms.clear()
        if each.part is not None and each.part.grad is not None:
            yield each.part.grad


def _has_elements(value: object) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.dim() > 0)


def _norm(tensor: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    if not isinstance(tensor, SentGradient):
        return torch.linalg.vector_norm(tensor, p)
    if float(p) not in tensor._norms:
        tensor._of_all.compute_norms(float(p))
    return tensor._norms[float(p)]


def _zero(tensor: torch.Tensor) -> None:
    if isinstance(tensor, SentGradient):
        tensor.parameter.grad = torch.zeros_like(tensor.parameter.detach())
    else:
        tensor.zero_()


def _refusal(sent: Sequence[SentGradient], func: Callable) -> str:
    name = sent[0]._name if sent else ""
    return (
        f"gradient of '{name}': expected nobody to use its elements after backward() with ShardedStep, since each rank has a "
        f"share of the sum alone, but found {func}. Norms, factors, limits and GradScaler are right, on all ranks together; "
        "call zero_grad() before the next backward(), or use another mode."
    )
