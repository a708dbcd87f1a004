"""What stands in ``p.grad`` of a gradient of which each rank has a part of the sum alone.

So torch's own ``clip_grad_norm_``, ``clip_grad_value_`` and ``GradScaler`` work as they are: norms, and whether all is
finite, are those of all ranks, which ask together; factors and limits are applied to this rank's part.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import torch

from ringtrain._binding.tensor_memory import as_buffer
from ringtrain._training.agreement import advised
from ringtrain._training.session import Session
from ringtrain._training.shares import Piece
from ringtrain.errors import InvalidArgumentError, UnsupportedError

_ALL_ASK = (
    "With it the ranks find out about all gradients together: each asks for norms, clips and steps a GradScaler after the same "
    "backward pass, behind synchronize() where a rank had none."
)
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


class Placeholder(torch.Tensor):
    """A tensor of a parameter's shape without elements: who looks at them raises the error that says what to do.

    Attributes:
        called: the parameter's name.
        piece: of the elements, which this rank has elsewhere.
        refusal: of a kind: the error, with places for the name, and for what was found.
    """

    called: str
    piece: Piece
    refusal: str

    @classmethod
    def like(cls, whole: torch.Tensor, dtype: torch.dtype, name: str, piece: Piece) -> Any:
        """The one of a tensor."""
        how = {"strides": whole.stride(), "dtype": dtype, "device": whole.device}
        made = torch.Tensor._make_wrapper_subclass(cls, whole.shape, **how)
        made.called, made.piece = name, piece
        return made

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        """Without elements."""
        return (
            f"{type(self).__name__}('{self.called}', shape={tuple(self.shape)}, dtype={self.dtype}, has={self.piece})"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UnsupportedError(self.refusal % (self.called, "a copy or a pickle"))

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        name = next((each.called for each in _flat([*args, *(kwargs or {}).values()]) if isinstance(each, cls)), "")
        raise UnsupportedError(cls.refusal % (name, func))


class SentGradient(Placeholder):
    """The gradient of one parameter.

    Attributes:
        part: of the parameter, which this rank updates, with its gradient; None for none.
    """

    refusal = (
        "gradient of '%s': expected nobody to use its elements after backward() with ShardedStep, since each rank has a "
        "share of the sum alone, but found %s. Norms, factors, limits and GradScaler are right, on all ranks together; "
        "call zero_grad() before the next backward(), or use another mode."
    )
    part: torch.nn.Parameter | None
    _parameter: weakref.ref[torch.Tensor]  # which has this one: Python would not find the circle
    _of_all: "SentGradients"
    _norms: dict[float, torch.Tensor]  # by order

    @property
    def parameter(self) -> torch.Tensor:
        """As given."""
        parameter = self._parameter()
        assert parameter is not None  # the optimizer has it, or it has this gradient
        return parameter

    @property
    def is_in_place(self) -> bool:
        """Whether the parameter has it."""
        return self.parameter.grad is self

    def take(self, sums: torch.Tensor) -> None:
        """The part gets its gradient from what this rank has received."""
        self._norms.clear()
        if self.part is not None:
            self.part.grad = sums[self.piece.at :][: len(self.part)]

    def read(self) -> None:
        """The part gets the values that the parameter holds, and that one's gradient, whoever has put them there."""
        if self.part is not None:
            self.part.copy_(self.cut(self.parameter.detach()))
            gradient = self.parameter.grad
            if gradient is not self:
                self.part.grad = None if gradient is None else self.cut(gradient.detach().to_dense())

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a tensor of the parameter's shape."""
        return whole.reshape(-1)[self.piece.first : self.piece.last]

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        target, others = args[0], [*args[1:], *(kwargs or {}).values()]
        listed = list(_flat([target]))
        sent = [each for each in listed if isinstance(each, cls)]
        if func in _DETACHING:
            return target
        if func in _NORMS and len(others) <= 1 and all(each.is_in_place for each in sent):
            norms = [_norm(each, *others) for each in listed]
            return norms[0] if isinstance(target, torch.Tensor) else norms
        if func in _ZEROING:
            for each in listed:
                _zero(each)
        elif func in _UNSCALING:
            sent[0]._of_all.unscale(list(_values_of(listed)), *others)
        elif func in _ELEMENTWISE and not any(_has_elements(each) for each in others):
            values = list(_values_of(listed))
            for each in values if isinstance(target, torch.Tensor) else filter(None, [values]):
                func(each, *args[1:], **(kwargs or {}))
        else:
            super().__torch_dispatch__(func, types, args, kwargs)
        return target if isinstance(target, torch.Tensor) else None


class SentGradients:
    """Those of one optimizer.

    Args:
        session: the rank, and those that share the gradients.
        prefix: of the names of operations, in the one world that the shares have.
    """

    def __init__(self, session: Session, prefix: str):
        self._session, self._prefix = session, prefix
        self._sent: list[SentGradient] = []

    def add(self, parameter: torch.Tensor, name: str, piece: Piece, values: torch.Tensor) -> SentGradient:
        """Makes the one of a parameter, whose part lies in this rank's share of the values."""
        made: SentGradient = SentGradient.like(parameter, parameter.dtype, name, piece)
        made._parameter, made._of_all, made._norms = weakref.ref(parameter), self, {}
        own = values[piece.at :][: piece.last - piece.first]
        made.part = torch.nn.Parameter(own, requires_grad=False) if len(own) else None
        self._sent.append(made)
        return made

    def in_place(self) -> list[SentGradient]:
        """Those that parameters have; the same on all ranks."""
        return [each for each in self._sent if each.is_in_place]

    def compute_norms(self, p: float) -> None:
        """Those of all gradients, by one operation; on all ranks together."""
        if not p > 0:
            raise InvalidArgumentError(f"norm of gradients: p must be above 0, or inf, but is {p!r}.")
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
        operation = session.context.submit(
            "allreduce", f"{self._prefix}.{what}", [buffer], [buffer],
            reduction=reduction, process_set=session.process_set_id, waits=True,
        )  # fmt: skip
        with advised(_ALL_ASK):
            operation.wait()
        return [float(each) for each in own]


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, (list, tuple)) else [value]


def _values_of(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The memory to be changed; norms that were asked for before are known no more."""
    for each in tensors:
        if not isinstance(each, SentGradient):
            yield each
            continue
        each._norms.clear()
        if each.part is not None and each.part.grad is not None:
            yield each.part.grad


def _has_elements(value: object) -> bool:
    return isinstance(value, (list, tuple, Placeholder)) or (isinstance(value, torch.Tensor) and value.dim() > 0)


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
