"""Local steps of a torch optimizer: which tensors its worker averages, and what reduces gradients meanwhile.

``optimizer`` makes one ``LocalStepsMode`` for ``mode=LocalSteps(...)``; ``ringtrain._training.averaging`` decides and averages. Exact
steps, at the beginning or within a host, are those of a ``SynchronousMode``.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

from ringtrain._training.averaging.neighbours import set_of_this
from ringtrain._training.averaging.outer import AveragingPlan
from ringtrain._training.averaging.shared import Role, Shared
from ringtrain._training.averaging.worker import ComparedSettings, Worker, require_local
from ringtrain._training.mode import LocalSteps
from ringtrain._training.session import NewWorld, Session
from ringtrain.torch.arrays import TORCH
from ringtrain.torch.drift import CALLED, settings_of
from ringtrain.torch.eager import eager
from ringtrain.torch.modes.base import Arguments, AroundSteps, OptimizerMode, State
from ringtrain.torch.modes.synchronous import SynchronousMode
from ringtrain.torch.modes.wrapping import Wrapping
from ringtrain.torch.scaling import HeededScaler

_Array = TypeVar("_Array")


def _shared(name: str, tensor: torch.Tensor, is_parameter: bool) -> Shared:
    return Shared(TORCH, name, Role.of(is_parameter, tensor.is_floating_point()), tensor.detach)


class LocalStepsMode(AroundSteps):
    """The local steps of one optimizer.

    Args:
        described: what the user asked for.
        worker: averages.
        make_exact: makes what reduces gradients: of exact steps at the beginning if its argument is True, else of those
            within a host; or returns None.
    """

    refuses_join = ""
    refuses_skip = (
        "mode must not be LocalSteps where a script synchronizes gradients, but is: synchronize() averages the parameters. "
        "Clip and unscale right after backward(), and call step() alone."
    )

    def __init__(self, described: LocalSteps, worker: Worker, make_exact: Callable[[bool], SynchronousMode | None]):
        self._worker = worker
        self._make_exact = make_exact
        self._buffers = [_shared(f"buffer.{name}", buffer, False) for name, buffer in described.named_buffers]
        self._parameters: dict[torch.Tensor, Shared] = {}
        self._scaler = HeededScaler()
        self._used = True
        self._warms_up = worker.period.warms_up
        self._exact: SynchronousMode | None = None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, wrapping: Wrapping) -> "LocalStepsMode":
        """Ranks hear here whether they have described it alike."""
        mode: LocalSteps = wrapping.mode
        process_set = wrapping.process_set
        compared = ComparedSettings(settings_of(optimizer), CALLED) if mode.compares else None
        plan = AveragingPlan(mode.outer, wrapping.by_core or "none", mode.within)
        worker = Worker(Session(process_set), mode.period(), plan, "optimizer", compared)
        worker.compare_terms()  # before a rank waits for what others of other terms never do
        neighbours = set_of_this(mode.within) if mode.within is not None else None

        def make_exact(warms_up: bool) -> SynchronousMode | None:
            members = process_set if warms_up else neighbours
            if members is None or members.size() == 1:
                return None
            return SynchronousMode.over(optimizer, wrapping, wrapping.settings(optimizer, members, is_plain=True))

        return cls(mode, worker, make_exact)

    @staticmethod
    def works_alone(described: LocalSteps) -> bool:
        """The outer optimizer changes a worker's steps."""
        return described.outer is not None

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Around the steps of the exact mode, which has no hooks of its own."""
        self._exact = self._make_exact(self._warms_up)
        super().attach(optimizer)

    def close(self) -> None:
        """Removes the hooks."""
        if self._exact is not None:
            self._exact.close()
        super().close()

    # ---- of the exact steps ----

    def add(self, names: Mapping[torch.Tensor, str]) -> None:
        """Exact steps reduce added parameters, too; the worker finds them in the optimizer."""
        if self._exact is not None:
            self._exact.add(names)

    def order(self) -> int:
        """That of the worker, which is made first."""
        return self._worker.number

    def parts(self) -> tuple[OptimizerMode, ...]:
        """The exact mode."""
        return () if self._exact is None else (self._exact,)

    def enter_world(self, change: NewWorld) -> None:
        """The worker and the exact mode, in the order in which they were made."""
        self._worker.enter_world(change)
        if self._exact is not None:
            self._exact.enter_world(change)

    def set_passes_per_step(self, passes: int) -> None:
        """Of exact steps."""
        if self._exact is not None:
            self._exact.set_passes_per_step(passes)

    def silence(self) -> AbstractContextManager[None]:
        """Of exact steps."""
        return nullcontext() if self._exact is None else self._exact.silence()

    def discard(self, zeros: bool) -> None:
        """Of an exact step."""
        if self._exact is not None:
            self._exact.discard(zeros)

    def scales(self, by_itself: bool) -> bool:
        """True has ``GradScaler`` call ``step()`` where it found an infinity, too: all ranks count the same steps."""
        if self._exact is not None:
            self._exact.scales(by_itself)
        return True

    # ---- steps ----

    @eager
    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, object]) -> Arguments | None:
        """Before the user's step: the common copy has what that is going to change."""
        changed = None if self._exact is None else self._exact.before_step(optimizer, args, kwargs)
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._used = self._scaler.before_step(
            optimizer, trained, vars(optimizer).get("_step_supports_amp_scaling", False)
        )
        if not self._warms_up:
            self._release()
            self._worker.before_step(self._shared(optimizer))
        return changed

    @eager
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After it: counts it, and averages where a period ends."""
        self._scaler.after_step()
        if self._exact is not None:
            self._exact.after_step(optimizer)
        if self._worker.after_step(self._used):
            self._release()
        self._enter_phase(optimizer)

    def count(self, items: int, of_sums: bool) -> None:
        """What the next step weighs."""
        if of_sums:
            super().count(items, of_sums)
        if self._exact is not None:
            self._exact.count(items, of_sums)
        self._worker.period.count_samples(items)

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """Averages now; in exact steps all ranks are equal anyway."""
        if not self._warms_up:
            self._release()
            self._worker.before_step(self._shared(optimizer))
            self._worker.synchronize()
            self._release()

    def join(self, optimizer: torch.optim.Optimizer) -> None:
        """Averages with the others until all ranks have called this."""
        require_local(self._worker)
        self._release()
        self._worker.before_step(self._shared(optimizer))
        self._worker.join()
        self._release()

    def _shared(self, optimizer: torch.optim.Optimizer) -> Iterator[Shared]:
        """What training changes: parameters that are not frozen, whether or not they have a gradient, and buffers."""
        names = optimizer._parameter_names
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    if parameter not in self._parameters:
                        self._parameters[parameter] = _shared(names[parameter], parameter, True)
                    yield self._parameters[parameter]
        yield from self._buffers

    def _release(self) -> None:
        """A parameter that was frozen is averaged for the last time with what it had changed; the outer optimizer leaves it."""
        self._worker.release(
            lambda: {shared for parameter, shared in self._parameters.items() if not parameter.requires_grad}
        )

    def _enter_phase(self, optimizer: torch.optim.Optimizer) -> None:
        """After the last exact step of the beginning, and after a checkpoint from the other side of it: changes the exact mode."""
        warms_up = self._worker.period.warms_up
        if warms_up != self._warms_up:
            self._warms_up = warms_up
            if self._exact is not None:
                self._exact.close()
            self._exact = self._make_exact(warms_up)

    # ---- checkpoints ----

    def state_dict(self, optimizer: torch.optim.Optimizer, of_user: Callable[[], State]) -> State:
        """The user's, and under ``local_steps`` what the next synchronisation needs.

        To be saved by each rank, or by one after ``synchronize()``. An optimizer without local steps loads it too.
        """
        own = of_user() if self._exact is None else self._exact.state_dict(optimizer, of_user)
        return {**own, "local_steps": self._state()}

    def load_state_dict(self, optimizer: torch.optim.Optimizer, of_user: Callable[[State], None], state: State) -> None:
        """The user's; all ranks call it. Without ``local_steps`` in it a period begins."""
        if self._exact is None:
            of_user(state)
        else:
            self._exact.load_state_dict(optimizer, of_user, state)
        self.take_common_state(optimizer, state.get("local_steps"))

    def common_state(self, optimizer: torch.optim.Optimizer) -> State | None:
        """What the next synchronisation needs."""
        return self._state()

    def take_common_state(self, optimizer: torch.optim.Optimizer, state: State | None) -> None:
        """Goes on with it; None if the state is of an optimizer without local steps."""
        self._worker.load(_converted(state, torch.Tensor, lambda values: values.cpu().numpy()))
        self._enter_phase(optimizer)

    def _state(self) -> State:
        state: State = _converted(self._worker.state(), np.ndarray, torch.from_numpy)
        return state

    def compression_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What compression has lost of the changes, the same on all ranks; collective."""
        state = self._worker.compression_state()
        return {name: {part: torch.from_numpy(kept[part]) for part in kept} for name, kept in state.items()}

    def load_compression_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Goes on with it."""
        self._worker.load_compression_state(
            {name: {part: parts[part].cpu().numpy() for part in parts} for name, parts in state.items()}
        )


def _converted(state: object, kind: type[_Array], convert: Callable[[_Array], object]) -> Any:
    """A state with its arrays, however deep they lie, in another form."""
    if isinstance(state, Mapping):
        return {name: _converted(value, kind, convert) for name, value in state.items()}
    if isinstance(state, list):
        return [_converted(value, kind, convert) for value in state]
    return convert(state) if isinstance(state, kind) else state
