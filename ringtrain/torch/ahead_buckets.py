"""One bucket of ``ahead``: gradients on their way out, this rank's share of them, and the new values on their way back."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch

from ringtrain.errors import InternalError, RingtrainError, UnsupportedError
from ringtrain.gradients.shares import Layout, Piece
from ringtrain.pending import Operation
from ringtrain.torch.gradients import ReductionSettings
from ringtrain.torch.tensors import buffer_of, finish, received


class SharedBucket:
    """Parameters of one dtype, whose gradients are one flat tensor; each rank updates its share of their values.

    Args:
        parameters: in the order in which they lie in it.
        names: theirs; the first one names the bucket's operations.
        first: place of the first of them among the optimizer's parameters; the others follow.
        layout: where they lie.
        member: whose share this rank has.

    Attributes:
        pieces: what this rank updates: a flat parameter for each parameter of which it has a part, with that part.
        is_sent: whether the gradients are on their way, or were in this step.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], names: Sequence[str], first: int, layout: Layout, member: int
    ):
        self.parameters, self.names, self.first, self.layout = list(parameters), list(names), first, layout
        like = parameters[0]
        self._gradients = torch.zeros(layout.total, dtype=like.dtype, device=like.device)
        self._values = torch.zeros(layout.share, dtype=like.dtype, device=like.device)
        self.pieces: list[tuple[Piece, torch.nn.Parameter]] = [
            (piece, torch.nn.Parameter(self._values[piece.at :][: piece.last - piece.first], requires_grad=False))
            for piece in layout.pieces(member)
        ]
        self.is_sent = False
        self._share_memory = torch.empty(layout.share, dtype=like.dtype, device=like.device)
        self._fills_itself = len(layout.counts) == 1 and layout.total == layout.counts[0]
        self._alone: torch.Tensor | None = None  # the gradient that is the whole bucket, which is sent as it is
        self._sum: Operation | None = None
        self._problem: RingtrainError | None = None  # why this rank did not send
        self._share: torch.Tensor | None = None  # of the sum
        self._gathering: Operation | None = None
        self._lands = False  # its result goes straight into the parameter

    @property
    def places(self) -> range:
        """The parameters' places among those of the optimizer."""
        return range(self.first, self.first + len(self.parameters))

    # ---- gradients ----

    def _place_of(self, index: int) -> torch.Tensor:
        count, offset = self.layout.counts[index], self.layout.offsets[index]
        return self._gradients[offset : offset + count].view(self.parameters[index].shape)

    def take_in(self, index: int, gradient: torch.Tensor | None) -> None:
        """Copies the gradient of a parameter, by its place in the bucket, to what is sent; None: zeros.

        One that is the whole bucket is not copied: nobody else may change it from now on.
        """
        if self._can_be_sent(gradient):
            self._alone = gradient
            return
        self._alone = None
        with torch.no_grad():
            if gradient is None:
                self._place_of(index).zero_()
            else:
                self._place_of(index).copy_(gradient)

    def _can_be_sent(self, gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
        like = self._gradients
        return (
            self._fills_itself and gradient is not None and gradient.is_contiguous()
            and gradient.dtype == like.dtype and gradient.device == like.device
        )  # fmt: skip

    def send_gradients(self, prefix: str, how: ReductionSettings, divisor: int) -> None:
        """Each rank gets its share of what all ranks have taken in."""
        sent = self._gradients if self._alone is None else self._alone.reshape(-1)
        name, buffer = f"{prefix}.{self.names[0]}", buffer_of(sent)
        self.is_sent = True
        self._sum = how.session.context.submit(
            "reducescatter", name, [buffer], [buffer_of(self._share_memory)], room=True,
            reduction=how.name, prescale=how.prescale, postscale=how.postscale / divisor,
            process_set=how.session.process_set_id, compression=how.compression,
        )  # fmt: skip

    def refuse(self, problem: RingtrainError) -> None:
        """Sends nothing in this step, for what the peers have been told; whoever awaits the share hears it here."""
        self.is_sent, self._problem = True, problem

    def await_share(self, is_there: Sequence[bool]) -> None:
        """Waits for this rank's share of the gradients, and gives it to the pieces; None to one whose parameter has none."""
        operation, self._sum = self._sum, None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        if operation is not None:
            finish(operation, self._share_memory)
            self._share = self._share_memory
        for piece, parameter in self.pieces:
            there = self._share is not None and is_there[piece.tensor]
            parameter.grad = self._share[piece.at :][: piece.last - piece.first] if there else None  # type: ignore[index]

    def share_of_gradients(self) -> Iterator[torch.Tensor]:
        """The gradients that the pieces have."""
        return (parameter.grad for _, parameter in self.pieces if parameter.grad is not None)

    # ---- values ----

    def read_values(self) -> None:
        """The pieces get what the parameters hold, whoever has written it."""
        with torch.no_grad():
            for piece, parameter in self.pieces:
                parameter.copy_(self.parameters[piece.tensor].detach().reshape(-1)[piece.first : piece.last])

    def send_values(self, prefix: str, how: ReductionSettings) -> Operation:
        """Each rank sends its share of the values to all."""
        name = f"{prefix}.{self.names[0]}.values"
        with torch._C.DisableTorchFunction():  # whoever looks at the parameter otherwise waits for these values
            target = self.parameters[0].detach()
            self._lands = self._fills_itself and target.is_contiguous()
            output = buffer_of(target) if self._lands else None
        self._gathering = how.session.context.submit(
            "allgather", name, [buffer_of(self._values)], [output],
            room=self._lands, process_set=how.session.process_set_id,
        )  # fmt: skip
        return self._gathering

    def take_values(self) -> None:
        """Waits for the values of all ranks, and puts them into the parameters."""
        operation = self._gathering
        if operation is None:
            raise InternalError("values of parameters: expected them to be on their way, but they were never sent.")
        finish(operation, self._values)
        self._gathering = None
        if self._lands:
            torch.autograd.graph.increment_version(self.parameters[0])  # as whoever writes it by torch's functions
            return
        every = received(operation, self._values)
        with torch.no_grad():
            targets = [parameter.detach() for parameter in self.parameters]
            parts = zip(self.layout.offsets, self.layout.counts, targets, strict=True)
            torch._foreach_copy_(targets, [every[at : at + count].view(to.shape) for at, count, to in parts])

    def end_step(self) -> None:
        """What was reduced is used, or given up."""
        for _, parameter in self.pieces:
            parameter.grad = None
        self._share, self._problem, self.is_sent, self._alone = None, None, False, None

    def await_all(self) -> None:
        """Waits for what is under way, so that its memory may be written, and no name stays in flight."""
        operation, self._sum = self._sum, None
        if operation is not None:
            operation.wait()


class SentGradient(torch.Tensor):
    """What stands in ``p.grad`` of a gradient that has gone to the ranks that update their shares with it.

    It has no elements: whatever looks at them raises the error that says what to do. ``zero_()`` makes it real zeros.
    """

    _owner: Any

    @staticmethod
    def of(parameter: torch.Tensor, name: str) -> "SentGradient":
        """The one of a parameter."""
        made: SentGradient = torch.Tensor._make_wrapper_subclass(
            SentGradient, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        made._owner = (parameter, name)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Without elements."""
        return f"SentGradient('{self._owner[1]}', shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        sent = next(_sent_in([*args, *(kwargs or {}).values()]))
        if func in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default):
            return sent
        if func is torch.ops.aten.zero_.default:
            parameter = sent._owner[0]
            parameter.grad = torch.zeros_like(parameter.detach())
            return sent
        raise UnsupportedError(
            f"gradient of '{sent._owner[1]}': expected nobody to use it after backward() with ShardedStep, since each rank has "
            f"a share of the sum alone, but found {func}. Clip with optimizer.clip_grad_norm_(), call zero_grad() before "
            "the next backward(), or choose another mode."
        )


def _sent_in(values: Sequence[Any]) -> Iterator[SentGradient]:
    for value in values:
        if isinstance(value, SentGradient):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _sent_in(value)
