"""Local steps of a torch optimizer: which tensors its worker averages, and what reduces gradients meanwhile.

``optimizer.DistributedOptimizer(every=...)`` makes one ``Periodic``; ``ringtrain.averaging`` decides and averages. Exact
steps, at the beginning or within a host, are those of a ``Reducer``, as without ``every``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ringtrain.averaging.fragments import Streaming
from ringtrain.averaging.outer import Outer
from ringtrain.averaging.period import Period
from ringtrain.averaging.shared import Role
from ringtrain.averaging.worker import Worker, require_local
from ringtrain.errors import InvalidArgumentError
from ringtrain.operations import Average
from ringtrain.process_sets import ProcessSet, global_process_set
from ringtrain.torch.compilation import eager
from ringtrain.torch.reducer import Reducer
from ringtrain.torch.scaling import HeededScaler

_HALVES = (torch.float16, torch.bfloat16)


class SharedTensor:
    """A parameter, or a buffer of the model, as ``ringtrain.averaging`` takes it."""

    def __init__(self, name: str, tensor: torch.Tensor, is_parameter: bool):
        self.name = name
        self.tensor = tensor
        self.role = (
            Role.PARAMETER if is_parameter else Role.STATISTIC if tensor.is_floating_point() else Role.COUNTER
        )  # fmt: skip

    def read(self) -> np.ndarray:
        """The values, flat, in host memory; 16 bits as float32."""
        values = self.tensor.detach()
        values = values.float() if values.dtype in _HALVES else values
        return values.cpu().contiguous().reshape(-1).numpy()

    def held(self, values: np.ndarray) -> np.ndarray:
        """What the tensor holds after ``write(values)``."""
        if self.tensor.dtype not in _HALVES:
            return values
        return torch.from_numpy(values).to(self.tensor.dtype).float().numpy()

    def write(self, values: np.ndarray) -> None:
        """Puts values into the tensor."""
        self.tensor.detach().copy_(torch.from_numpy(values).reshape(self.tensor.shape))


class Periodic:
    """The local steps of one optimizer.

    Args:
        optimizer: whose steps count.
        worker: averages.
        named_buffers: of the model, which are averaged with the parameters.
        make_reducer: makes what reduces gradients: of exact steps at the beginning if its argument is True, else of those
            within a host; or returns None.
    """

    def __init__(
        self,
        optimizer: Any,
        worker: Worker,
        named_buffers: Iterable[tuple[str, torch.Tensor]],
        make_reducer: Callable[[bool], Reducer | None],
    ):
        self._worker = worker
        self._make_reducer = make_reducer
        self._buffers = [SharedTensor(f"buffer.{name}", buffer, False) for name, buffer in named_buffers]
        self._parameters: dict[torch.Tensor, SharedTensor] = {}
        self._scaler = HeededScaler()
        self._used = True
        self._warms_up = worker.period.warms_up
        optimizer._reducer = make_reducer(self._warms_up)
        before = optimizer.register_step_pre_hook(_before_step)
        after = optimizer.register_step_post_hook(_after_step)
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # the user's hooks see the average
        self._handles = before, after

    def __reduce__(self) -> tuple:
        """Copies and pickles of an optimizer are plain optimizers: hooks and a world do not travel."""
        return type(None), ()

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    # ---- steps ----

    def before_step(self, optimizer: Any) -> None:
        """Before the user's step: the common copy has what that is going to change."""
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._used = self._scaler.before_step(
            optimizer, trained, vars(optimizer).get("_step_supports_amp_scaling", False)
        )
        if not self._warms_up:
            self._worker.before_step(self._shared(optimizer))

    def after_step(self, optimizer: Any) -> None:
        """After it: counts it, and averages where a period ends."""
        self._scaler.after_step()
        if self._worker.after_step(self._used):
            self._release()
        self._enter_phase(optimizer)

    def count_samples(self, samples: int) -> None:
        """What the next step counts."""
        self._worker.period.count_samples(samples)

    def synchronize(self, optimizer: Any) -> None:
        """Averages now; in exact steps all ranks are equal anyway."""
        if not self._warms_up:
            self._worker.before_step(self._shared(optimizer))
            self._worker.synchronize()
            self._release()

    def join(self, optimizer: Any) -> None:
        """Averages with the others until all ranks have called this."""
        require_local(self._worker)
        self._worker.before_step(self._shared(optimizer))
        self._worker.join()
        self._release()

    def _shared(self, optimizer: Any) -> Iterator[SharedTensor]:
        """What training changes: parameters that are not frozen, whether or not they have a gradient, and buffers."""
        names = optimizer._parameter_names
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    if parameter not in self._parameters:
                        self._parameters[parameter] = SharedTensor(names[parameter], parameter, True)
                    yield self._parameters[parameter]
        yield from self._buffers

    def _release(self) -> None:
        """A parameter that was frozen since has been averaged for the last time."""
        self._worker.release(lambda shared: shared.role is not Role.PARAMETER or shared.tensor.requires_grad)

    def _enter_phase(self, optimizer: Any) -> None:
        """After the last exact step of the beginning, and after a checkpoint from the other side of it: changes the reducer."""
        warms_up = self._worker.period.warms_up
        if warms_up != self._warms_up:
            self._warms_up = warms_up
            if optimizer._reducer is not None:
                optimizer._reducer.close()
            optimizer._reducer = self._make_reducer(warms_up)

    # ---- checkpoints ----

    def state(self) -> dict[str, Any]:
        """What goes into the optimizer's state."""
        state: dict[str, Any] = _converted(self._worker.state(), np.ndarray, torch.from_numpy)
        return state

    def load(self, optimizer: Any, state: Mapping[str, Any] | None) -> None:
        """Goes on with it; None if the state is of an optimizer without local steps."""
        self._worker.load(_converted(state, torch.Tensor, lambda values: values.cpu().numpy()))
        self._enter_phase(optimizer)

    def compression_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What compression has lost of the changes, the same on all ranks; collective."""
        state = self._worker.compression_state()
        return {name: {part: torch.from_numpy(kept[part]) for part in kept} for name, kept in state.items()}

    def load_compression_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Goes on with it."""
        self._worker.load_compression_state(
            {name: {part: parts[part].cpu().numpy() for part in parts} for name, parts in state.items()}
        )


@eager
def _before_step(optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    periodic = getattr(optimizer, "_periodic", None)
    if periodic is not None:
        periodic.before_step(optimizer)


@eager
def _after_step(optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    periodic = getattr(optimizer, "_periodic", None)
    if periodic is not None:
        periodic.after_step(optimizer)


def _converted(state: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """A state with its arrays, however deep they lie, in another form."""
    if isinstance(state, Mapping):
        return {name: _converted(value, kind, convert) for name, value in state.items()}
    if isinstance(state, list):
        return [_converted(value, kind, convert) for value in state]
    return convert(state) if isinstance(state, kind) else state


# ---- arguments ----


def checked_period(
    optimizer: Any,
    every: int | None,
    outer: Outer | None,
    within_host: Any,
    warmup: int,
    named_buffers: Sequence[tuple[str, torch.Tensor]],
    streaming: Streaming,
) -> Period | None:
    """The period of local steps, None without ``every``; raises InvalidArgumentError for arguments that cannot be."""
    if every is None:
        given = {"outer": outer, "within_host": within_host, "warmup": warmup, "named_buffers": named_buffers}
        given |= streaming.given()
        for name, value in given.items():
            if value:
                raise InvalidArgumentError(
                    f"DistributedOptimizer: {name} needs every, the number of local steps, but that is None."
                )
        return None
    if within_host not in (None, "exact"):
        raise InvalidArgumentError(
            f"DistributedOptimizer: within_host must be None or 'exact', but is {within_host!r}."
        )
    if hasattr(optimizer, "_amp_stash"):
        raise InvalidArgumentError(
            "DistributedOptimizer: every needs an optimizer that holds the model's own parameters, but NVIDIA Apex has put "
            "copies into this one. Use torch.amp."
        )
    return Period(every, warmup, *streaming)


def check_settings(
    op: int, process_set: ProcessSet, within_host: str | None, compression_by_core: str | None, averages_passes: bool
) -> None:
    """Raises InvalidArgumentError for settings that local steps cannot have."""
    if op != Average or averages_passes:
        raise InvalidArgumentError(
            "DistributedOptimizer: with every, op must be Average and average_aggregated_gradients False, but one is not. "
            "Divide the loss instead."
        )
    if compression_by_core is None:
        raise InvalidArgumentError(
            "DistributedOptimizer: every needs compression none, fp16, bf16, int8 or int4, but it is a class of your own."
        )
    if within_host is not None and process_set is not global_process_set:
        raise InvalidArgumentError(
            f"DistributedOptimizer: within_host needs all ranks of the world, but process_set is {process_set}."
        )
