"""The common copy X and the outer momentum m: what all workers have in common of each tensor, as flat arrays in host memory."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ringtrain._training.adapter.checks import hashed
from ringtrain._training.averaging.fragments import Fragments
from ringtrain._training.averaging.outer import Outer
from ringtrain._training.averaging.shared import Copy, Role, Shared
from ringtrain.errors import InvalidArgumentError


class CommonCopy:
    """X and m by tensor; equal on all ranks, as each computes them from equal numbers.

    Args:
        outer: the outer optimizer; None for plain averaging.
        fragments: which parts there are.

    Attributes:
        copies: by the names of the tensors.
    """

    def __init__(self, outer: Outer | None, fragments: Fragments):
        self.copies: dict[str, Copy] = {}
        self._outer, self._fragments = outer, fragments
        self._loaded: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}  # of a checkpoint, until its tensor comes
        self._loaded_parts: dict[str, int] = {}

    def adopt(self, tensors: Iterable[Shared]) -> None:
        """Takes the values of tensors into the common copy, where that has not got them yet."""
        for tensor in tensors:
            if tensor.name not in self.copies:
                self.copies[tensor.name] = self._copy_of(tensor)

    def keep(self, is_wanted: Callable[[Shared], bool]) -> None:
        """Lets go of the copies of all other tensors."""
        self.copies = {name: copy for name, copy in self.copies.items() if is_wanted(copy.shared)}

    def of_part(self, part: int) -> Iterable[tuple[str, Copy]]:
        """The tensors of a fragment."""
        return [(name, copy) for name, copy in self.copies.items() if copy.part == part]

    def write(self) -> None:
        """Puts all values into the tensors."""
        for copy in self.copies.values():
            copy.shared.write(copy.common)

    def write_parameters(self) -> None:
        """Puts the parameters' values into the tensors."""
        for copy in self.copies.values():
            if copy.shared.role is Role.PARAMETER:
                copy.shared.write(copy.common)

    def terms(self) -> dict[str, object]:
        """What ranks must have alike of it: dtype, size and fragment of each tensor."""

        def where(copy: Copy) -> str:
            return f" in fragment {copy.part}" if self._fragments.count > 1 else ""

        return {
            f"tensor '{name}'": f"{copy.common.dtype} of {copy.common.size}{where(copy)}"
            for name, copy in self.copies.items()
        }

    def digest(self) -> int:
        """A digest of the parameters' X and m."""
        compared = [copy for _, copy in sorted(self.copies.items()) if copy.shared.role is Role.PARAMETER]
        arrays = [array for copy in compared for array in (copy.common, copy.velocity) if array is not None]
        return hashed(*(array.view(np.uint8).data for array in arrays))

    # ---- checkpoints ----

    def state(self) -> dict[str, dict[str, np.ndarray]]:
        """X and m by tensor, those of a checkpoint too whose tensors have not come yet."""
        copies = {name: (copy.common.copy(), None if copy.velocity is None else copy.velocity.copy())
                  for name, copy in self.copies.items()}  # fmt: skip
        copies = {**self._loaded, **copies}
        return {
            "common": {name: common for name, (common, _) in copies.items()},
            "momentum": {name: velocity for name, (_, velocity) in copies.items() if velocity is not None},
        }

    def parts(self) -> dict[str, int]:
        """The fragment of each tensor."""
        return self._loaded_parts | {name: copy.part for name, copy in self.copies.items()}

    def load(self, state: Mapping[str, Any] | None, parts: Mapping[str, int]) -> None:
        """Begins anew with what ``state`` and ``parts`` have returned; None: with the values that the tensors have then."""
        self.copies = {}
        self._loaded_parts = {name: int(part) for name, part in parts.items()}
        momentum = {} if state is None else state["momentum"]
        common = {} if state is None else state["common"]
        self._loaded = {name: (each, momentum.get(name)) for name, each in common.items()}

    def _copy_of(self, tensor: Shared) -> Copy:
        values = tensor.read()
        common, velocity = self._loaded.pop(tensor.name, (values, None))
        if tensor.role is not Role.PARAMETER or self._outer is None or not self._outer.momentum:
            velocity = None
        elif velocity is None:
            velocity = np.zeros_like(values)
        for saved in (common, velocity):
            if saved is not None and saved.size != values.size:
                raise InvalidArgumentError(
                    f"load_state_dict: the common copy of '{tensor.name}' must have {values.size} elements, but has "
                    f"{saved.size}. Load the state of this model."
                )
        velocity = None if velocity is None else owned(velocity, values.dtype)
        return Copy(tensor, owned(common, values.dtype), velocity, self._part_of(tensor, values.size))

    def _part_of(self, tensor: Shared, size: int) -> int:
        """Its fragment: the one of the checkpoint, or that which is the smallest when the tensor comes."""
        if tensor.role is not Role.PARAMETER:
            return self._fragments.of_buffers
        loads = [0] * self._fragments.count
        for copy in self.copies.values():
            if copy.shared.role is Role.PARAMETER:
                loads[copy.part] += copy.common.size
        part = self._loaded_parts.pop(tensor.name, None)
        return self._fragments.least_loaded(loads) if part is None or part >= len(loads) else part


def owned(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A flat copy."""
    return np.array(values, dtype).reshape(-1)


def check_state(state: Any) -> None:
    """Raises InvalidArgumentError for what no worker's ``state`` has returned; None is a new beginning."""
    if state is None:
        return
    lacking = [
        name for name in ("counters", "common", "momentum") if not isinstance(state, Mapping) or name not in state
    ]
    if lacking:
        raise InvalidArgumentError(
            f"local steps: a state must be what was saved of them, but is a {type(state).__name__} without {lacking[0]!r}. Load the one "
            "that local_steps_state(), or the optimizer's state_dict(), has returned."
        )
