"""One step late: a step applies the gradients of the step before, whose exchange has gone on while these were computed.

    x[t + 1] = x[t] - update(mean gradient of step t - 1)

``optimizer`` makes one ``OneStepLateMode`` for ``mode=OneStepLate()``. A step takes what the step before has sent, sends this
rank's gradients, and gives the optimizer what it has taken; so an exchange has the whole of a forward and a backward pass.
The first step has nothing to apply, and ``flush`` applies what is left at the end. Whether gradients may be used, and what
compression has lost of them, is decided when they arrive, from equal bits on all ranks.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch

from ringtrain._runtime.context import Context
from ringtrain._training.adapter.numbering import Number
from ringtrain._training.feedback import Feedback
from ringtrain._training.late import LateGradients, StepInTransit, check_shape
from ringtrain._training.mode import Mode
from ringtrain._training.needs import check_needs
from ringtrain._training.presence import DENSE, FROZEN, MISSING, is_there
from ringtrain._training.rounds import Rounds, Stage
from ringtrain._training.session import NewWorld
from ringtrain._training.trained import Parameter
from ringtrain.errors import InvalidArgumentError, RingtrainError
from ringtrain.torch.arrays import TORCH
from ringtrain.torch.eager import eager
from ringtrain.torch.gradients import ReductionSettings, dense_gradient
from ringtrain.torch.modes.base import AroundSteps, State, closure_of
from ringtrain.torch.modes.synchronous import state_with_losses
from ringtrain.torch.modes.wrapping import Wrapping
from ringtrain.torch.tensors import buffer_of


class OneStepLateMode(AroundSteps):
    """The gradients of one optimizer that steps one step late.

    Args:
        settings: how gradients are combined, the same on all ranks.
        averages_passes: whether the sum of a step's backward passes is divided by their number.
    """

    unweighed = "late"
    ends_first = False

    def __init__(self, settings: ReductionSettings, averages_passes: bool):
        self._settings = settings
        self._session = settings.session
        self._number = Number(self._session, "optimizer")
        self._averages_passes = averages_passes
        self._late = LateGradients(TORCH)
        self._has_exchanged = False  # in the step under way
        self._flushes = False
        self._listed: Callable[[], list[Parameter]] = list  # what was announced last
        self._shown: list[tuple[torch.Tensor, torch.Tensor, LateGradient]] = []  # put in place by ``synchronize``
        self._go_on(NewWorld.NUMBERED)
        self._session.on_new_world(self._go_on)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, wrapping: Wrapping) -> "OneStepLateMode":
        """Over all ranks of the process set."""
        return cls(wrapping.settings(optimizer, wrapping.process_set), wrapping.averages_passes)

    @staticmethod
    def works_alone(described: Mode) -> bool:
        """One rank's gradients are late, too."""
        return True

    # ---- worlds ----

    @property
    def context(self) -> Context:
        """The rank that this optimizer acts for, in the current epoch."""
        return self._session.context

    def order(self) -> int:
        """Its place among the optimizers of its world."""
        return self._number.value

    def enter_world(self, change: NewWorld) -> None:
        """Goes on in the present world; what has not arrived in the one before is lost."""
        self._session.follow(change)

    def _go_on(self, change: NewWorld) -> None:
        if change is not NewWorld.NUMBERED:
            self._late.flight, self._has_exchanged = None, False
        self.prefix = self._number.prefix
        terms, replica = self._settings.terms, self._settings.replica()
        self._rounds = Rounds(
            self._session, f"{self.prefix}.used", terms, replica, comes_alike=True, trained=lambda: self._listed()
        )

    # ---- steps ----

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """Sends this rank's gradients, and puts those that the step is going to apply into their place, to be clipped."""
        if not self._has_exchanged:
            self._exchange(optimizer)
            self._show_late(optimizer)

    def _exchange(self, optimizer: torch.optim.Optimizer, scaler: bool = False) -> None:
        """Takes the gradients of the step before, sends those that lie in the parameters, and puts the former there.

        Raises:
            RingtrainError: the exchange of the step before has failed, or ranks have other settings.
        """
        self._session.follow()
        trained = _trained(optimizer)
        self._arrive()
        arrived = self._late.take()
        self._send(optimizer, trained, scaler)
        for parameter in trained:
            parameter.grad = arrived.get(parameter)
        self._has_exchanged = True

    def _show_late(self, optimizer: torch.optim.Optimizer) -> None:
        """A script sees tensors of the same memory, which no ``GradScaler`` unscales: each rank has done that before."""
        for parameter in _trained(optimizer):
            if parameter.grad is not None:
                late = LateGradient.of(parameter.grad)
                self._shown.append((parameter, parameter.grad, late))
                parameter.grad = late

    def _take_late(self) -> None:
        """The plain tensors again, which the user's class updates with."""
        late, self._shown = self._shown, []
        for parameter, plain, shown in late:
            if parameter.grad is shown:
                parameter.grad = plain

    @eager
    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, object]) -> None:
        """Before the user's step: it applies the gradients of the step before."""
        if closure_of(args, kwargs) is not None:
            check_needs(["OneStepLate"], {"closure": True}, "step")
        if self._flushes:
            return
        self._take_late()
        scaler = getattr(optimizer, "found_inf", None) is not None
        scale = None
        if scaler:  # it has looked at this rank's gradients; what is applied now was looked at when it came
            scale = optimizer.grad_scale
            # The scaler has found no gradient in the first step, or not looked.
            if self._has_exchanged and (scale is not None or not isinstance(optimizer.found_inf, torch.Tensor)):
                _refuse_scaled()
            optimizer.grad_scale = optimizer.found_inf = None  # the user's class would use them
        if not self._has_exchanged:
            if scale is not None:
                _unscale(_trained(optimizer), float(scale))
            self._exchange(optimizer, scaler)
        elif self._late.flight is not None:
            self._late.flight.skips = scaler

    @eager
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped."""
        if not self._flushes:
            self._has_exchanged = False
            self._rounds.note_step()

    def discard(self, zeros: bool) -> None:
        """The gradients in the parameters are given up; this rank's next ones are those of a step."""
        self._has_exchanged = False
        self._shown = []

    def scales(self, by_itself: bool) -> bool:
        """True has ``GradScaler`` call ``step()`` where it found an infinity, too: what is applied is of the step before."""
        return True

    def flush(self, optimizer: torch.optim.Optimizer) -> None:
        """Applies the gradients that are left; the next step has nothing to apply, as the first one."""
        self._session.follow()
        self._arrive()
        arrived = self._late.take()
        if not arrived:
            return
        trained = _trained(optimizer)
        for parameter in trained:
            parameter.grad = arrived.pop(parameter, None)
        self._flushes = True
        try:
            optimizer.step()
        finally:
            self._flushes = False
        for parameter in trained:
            parameter.grad = None

    # ---- the way out ----

    def _send(self, optimizer: torch.optim.Optimizer, trained: Sequence[torch.Tensor], scaler: bool) -> None:
        names = optimizer._parameter_names
        self._listed = lambda: [Parameter(names[parameter]) for parameter in trained]
        own = bytes(
            (MISSING if each.grad is None else DENSE) | (0 if each.requires_grad else FROZEN) for each in trained
        )
        agreed = self._rounds.announce(own, Stage.CLOSING).codes
        if MISSING in agreed:  # the others say whether zeros are needed
            agreed = self._rounds.wait_for_answer().codes
        flight = self._late.flight = StepInTransit(self._rounds, skips=scaler)
        divisor = optimizer.backward_passes_per_step if self._averages_passes else 1
        for parameter, code in zip(trained, agreed, strict=True):
            if is_there(code):
                try:
                    self._submit(flight, parameter, names[parameter], divisor)
                except RingtrainError as problem:
                    flight.problem = flight.problem or problem

    def _submit(self, flight: StepInTransit, parameter: torch.Tensor, name: str, divisor: int) -> None:
        how, context, process_set = self._settings, self._session.context, self._session.process_set_id
        name = f"{self.prefix}.{name}"
        try:
            # The gradient's own memory, in which the result will be: nothing else of the program refers to it any more.
            sent = (
                _zeros(parameter) if parameter.grad is None else dense_gradient(parameter.grad, name, how).contiguous()
            )
            buffer = [buffer_of(sent)]
        except Exception as problem:  # seen by this rank alone: the others must not wait for it
            context.refuse("allreduce", name, process_set, problem)
        operation = context.submit(
            "allreduce", name, buffer, buffer,
            reduction=how.name, prescale=how.prescale, postscale=how.postscale / divisor, process_set=process_set,
            compression=how.compression,
        )  # fmt: skip
        flight.operations.append((operation, sent))
        flight.arrays[parameter] = sent

    # ---- the way back ----

    def _arrive(self) -> None:
        """Waits for the gradients of the step before, which every rank has sent; without those that are not used.

        Raises:
            RingtrainError: an operation has failed, or ranks have other settings. All is forgotten then.
        """
        if not self._late.arrive(self._losses().settle):
            self._late.arrived = {}

    def _losses(self) -> Feedback:
        how = self._settings
        return Feedback(TORCH, self._session, f"{self.prefix}.", how.averages, how.keeps_residuals)

    # ---- what is saved ----

    def state_dict(self, optimizer: torch.optim.Optimizer, of_user: Callable[[], State]) -> State:
        """The user's, and under ``delayed`` the gradients that the next step applies, by name.

        They are the same on all ranks, so any may save it, at any step, and a world of any size go on with it.
        """
        state = state_with_losses(of_user(), self._feedback() if self.context.usable else None)
        return {**state, "delayed": self.common_state(optimizer)}

    def load_state_dict(self, optimizer: torch.optim.Optimizer, of_user: Callable[[State], None], state: State) -> None:
        """The user's; all ranks call it. Without ``delayed`` in it the next step applies nothing."""
        self.take_common_state(optimizer, state.get("delayed"))
        of_user(state)
        feedback = self._feedback()
        if feedback is not None:
            feedback.take(state.get("compression"))

    def common_state(self, optimizer: torch.optim.Optimizer) -> State | None:
        """The gradients that the next step applies, by name; the same on all ranks. Waits for them."""
        self._session.follow()
        self._arrive()
        names = optimizer._parameter_names
        return {names[parameter]: gradient.clone() for parameter, gradient in self._late.arrived.items()}

    def take_common_state(self, optimizer: torch.optim.Optimizer, state: State | None) -> None:
        """Goes on with what ``common_state`` has returned; None: the next step has nothing to apply.

        Raises:
            InvalidArgumentError: it has a gradient that fits no parameter.
        """
        parameters = {name: parameter for parameter, name in optimizer._parameter_names.items()}
        arrived = {}
        for name, gradient in (state or {}).items():
            own = tuple(parameters[name].shape) if name in parameters else None
            check_shape("load_state_dict", "parameter", name, tuple(gradient.shape), own)
            parameter = parameters[name]
            arrived[parameter] = gradient.to(parameter.device, parameter.dtype, copy=True)
        self._session.follow()
        with suppress(RingtrainError):
            self._arrive()  # so that no name stays in flight
        self._late.flight, self._late.arrived, self._has_exchanged = None, arrived, False
        self._rounds.forget()
        self._rounds.forget_steps()

    def _feedback(self) -> Feedback | None:
        """What compression has lost of these gradients, those on their way included. None without such a compression."""
        if not self._settings.makes_up_for_losses:
            return None
        self._session.follow()
        self._arrive()
        return self._losses()


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter.detach(), memory_format=torch.contiguous_format)


def _unscale(trained: Sequence[torch.Tensor], scale: float) -> None:
    """By this rank's own scale, before gradients of other ranks, with other scales, are added."""
    with torch.no_grad():
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.div_(scale)


def _refuse_scaled() -> NoReturn:
    raise InvalidArgumentError(
        "synchronize: expected gradients without a scale with mode=OneStepLate(), since each rank has its own, but found a "
        "GradScaler that has not unscaled them. Call unscale_() before synchronize()."
    )


class LateGradient(torch.Tensor):
    """What ``synchronize`` shows of a gradient that the step is going to apply: the same memory, for all but a ``GradScaler``."""

    @staticmethod
    def of(plain: torch.Tensor) -> "LateGradient":
        """The one of a gradient."""
        made: LateGradient = torch.Tensor._make_subclass(LateGradient, plain)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            _refuse_scaled()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
