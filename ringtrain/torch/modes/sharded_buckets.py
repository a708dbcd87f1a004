"""Buckets of ``ShardedStep``: sums of gradients on their way to the ranks that update with them, and new values on their way back."""

from collections.abc import Callable, Sequence

import torch

from ringtrain._runtime.process_sets import ranks_of
from ringtrain._training.agreement import advised
from ringtrain._training.shares import Piece, laid_out
from ringtrain.errors import InvalidArgumentError, RingtrainError
from ringtrain.torch.gradients import Group, OptimizedParameter, ReductionSettings, dense_gradient
from ringtrain.torch.modes.sharded_gradients import SentGradients
from ringtrain.torch.tensors import buffer_of, finish, received

_ALL_STEP = (
    "With it the ranks exchange the values of a step: those that submitted it have stepped, the missing ones wait elsewhere. Run as "
    "many backward passes, zero_grad() and step() on every rank."
)


class SharedBucket(Group):
    """Parameters of one dtype, whose gradients are sent as one flat tensor; each rank updates its share of their values.

    Args:
        name: of its operations.
        members: the parameters, in the order in which they lie in it.
        how: of the optimizer.
        gradients: those of the optimizer that were sent.

    Attributes:
        parameters: of the members.
        sent: what stands for their gradients; it has the parts that this rank updates.
        has_sums: whether gradients have come that no step has used, on all ranks alike.
    """

    def __init__(self, name: str, members: list[OptimizedParameter], how: ReductionSettings, gradients: SentGradients):
        super().__init__(name, members)
        self._context, self._process_set = how.session.context, how.session.process_set_id
        ranks = ranks_of(self._context, self._process_set) or []
        self.parameters = [member.parameter for member in members]
        self._layout = laid_out([each.numel() for each in self.parameters], len(ranks))
        self._values = self.parameters[0].detach().new_zeros(self._layout.share)
        self._flat: torch.Tensor | None = None  # what is sent; made anew where an operation may still read it
        self._sums: torch.Tensor | None = None  # what is received
        self._is_one = self._layout.counts == (self._layout.total,)
        pieces = {piece.tensor: piece for piece in self._layout.pieces(ranks.index(self._context.rank))}
        self.sent = [
            gradients.add(member.parameter, member.name, pieces.get(place, Piece(place, 0, 0, 0)), self._values)
            for place, member in enumerate(members)
        ]
        self.has_sums = False
        self._came: Sequence[OptimizedParameter] = ()  # whose gradients are under way

    # ---- gradients ----

    def submit(
        self, members: Sequence[OptimizedParameter], how: ReductionSettings, postscale: float, weight: int | None = None,
        keeps_inputs: bool = False, waits: bool = False,
    ) -> None:  # fmt: skip
        """Each rank gets its share of the sums of some members' gradients, and of zeros in place of the others."""
        self.submitted = True
        try:
            self.require_world(how)
            buffer = buffer_of(self._filled(members, how))
        except Exception as problem:  # seen by this rank alone: the others must not wait for it
            how.session.context.refuse("reducescatter", self.name, how.session.process_set_id, problem)
        if self._sums is None or any(sent.is_in_place for sent in self.sent):  # of a pass before in this step
            self._sums = torch.empty_like(self._values)
        self._operation = self._context.submit(
            "reducescatter", self.name, [buffer], [buffer_of(self._sums)], room=True,
            reduction=how.name, prescale=how.prescale, postscale=postscale,
            process_set=self._process_set, compression=how.compression, weight=weight, waits=waits,
        )  # fmt: skip
        self._came = members
        for member in members:
            member.parameter.grad = self.sent[self._place(member)]

    def require_world(self, how: ReductionSettings) -> None:
        """Raises the error that says what to do where the world of the shares has ended."""
        if how.session.context is not self._context or not self._context.usable:
            raise InvalidArgumentError(
                f"step '{self.name}': expected the world in which ranks took shares of the optimizer's state but found that it has "
                "ended, and the shares with it. In the new world wrap a new optimizer, and load a state that was consolidated."
            )

    def _place(self, member: OptimizedParameter) -> int:
        return member.index - self.members[0].index

    @torch.no_grad()
    def _filled(self, members: Sequence[OptimizedParameter], how: ReductionSettings) -> torch.Tensor:
        """The bucket's elements; one gradient that is all of them is not copied: nobody else changes it any more."""
        dense, like = [dense_gradient(member.parameter.grad, member.name, how) for member in members], self._values
        if self._is_one and dense[0].is_contiguous() and dense[0].dtype is like.dtype:
            return dense[0].reshape(-1)
        if self._flat is None:
            self._flat = like.new_zeros(self._layout.total)
        elif len(members) < len(self.members):
            self._flat.zero_()
        views = self._views(self._flat)
        torch._foreach_copy_([views[self._place(member)] for member in members], dense)
        return self._flat

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Where the elements of each parameter lie in all of the bucket's, in its shape."""
        runs = zip(self.parameters, self._layout.offsets, self._layout.counts, strict=True)
        return [flat[offset : offset + count].view(each.shape) for each, offset, count in runs]

    def hold(self) -> RingtrainError | None:
        """Waits for this rank's share; returns the error. Then no parameter of these has a gradient."""
        try:
            if self._operation is not None:
                self._operation.wait()
        except RingtrainError as problem:
            for member in self._came:
                member.parameter.grad = None
            self._came = ()
            return problem
        return None

    def release(self, _: object = None) -> None:
        """Gives the sums to this rank's parts."""
        for member in self._came:
            self.sent[self._place(member)].take(self._sums)
            member.note_result()
        self.has_sums |= bool(self._came)
        self.forget()

    def forget(self) -> None:
        """Lets go of what was submitted; memory that an operation may still use is left to it."""
        if self._operation is not None and not self._operation.finished():
            self._flat = self._sums = None
        self._came = ()
        super().forget()

    # ---- values ----

    def is_due(self) -> bool:
        """Whether a step is to update these parameters, on all ranks alike.

        Raises InvalidArgumentError for gradients that no backward pass has brought.
        """
        if self.has_sums or any(sent.is_in_place for sent in self.sent):
            return True
        for member in self.members:
            if member.parameter.grad is not None:
                raise InvalidArgumentError(
                    f"gradient of '{member.name}': expected it from backward() but found another one in its place, which ranks have "
                    "not reduced. Put it there before step() and synchronize(), or use another mode."
                )
        return False

    @torch.no_grad()
    def read(self) -> dict[torch.Tensor, torch.Tensor]:
        """For an update: this rank's parts, by parameter, with the values and gradients that are there now."""
        self.has_sums = False
        for sent in self.sent:
            sent.read()
        return {sent.parameter: sent.part for sent in self.sent if sent.part is not None}

    def exchange_values(self) -> Callable[[], None]:
        """Each rank sends its share of the values to all; returns when they are there, with what takes them."""
        target = self.parameters[0].detach()
        lands = self._is_one and target.is_contiguous()
        operation = self._context.submit(
            "allgather", f"{self.name}.values", [buffer_of(self._values)], [buffer_of(target) if lands else None],
            room=lands, process_set=self._process_set,
        )  # fmt: skip
        with advised(_ALL_STEP):
            finish(operation, self._values)
        return lambda: self._take(None if lands else received(operation, self._values))

    @torch.no_grad()
    def _take(self, every: torch.Tensor | None) -> None:
        if every is None:  # they are in the parameter
            torch.autograd.graph.increment_version(self.parameters[0])  # as who writes it by torch's functions
            return
        torch._foreach_copy_([parameter.detach() for parameter in self.parameters], self._views(every))
