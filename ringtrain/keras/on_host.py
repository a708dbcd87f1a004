"""What an optimizer has beyond others whose gradients are reduced on the host: one class of methods for Keras 3 and tf_keras."""

from collections.abc import Mapping, Sequence

import keras
import numpy as np

from ringtrain._training.on_host import HostReducer
from ringtrain.keras.reduction import KerasReducer
from ringtrain.keras.types import Tensor, Variable


class HostMethods:
    """Methods of a distributed optimizer that have something to say with ``OneStepLate`` and PowerSGD; without they do nothing."""

    _gradient_reduction: KerasReducer | None

    def flush(self) -> None:
        """With ``OneStepLate``: applies the last gradients; the next update applies nothing, as the first one. On all ranks.

        To be called before the model is evaluated, and at the end, outside of a ``tf.function``. In ``fit``
        BroadcastGlobalVariablesCallback does so at the end.
        """
        host = self._host
        if host is None or not (arrived := host.take()):
            return
        variables = {name: variable for name, variable in self._named().items() if name in arrived}
        gradients = [keras.ops.convert_to_tensor(arrived[name]) for name in variables]
        self._apply_own(gradients, list(variables.values()))

    def finalize_variable_values(self, var_list: Sequence[Variable]) -> None:
        """Keras' own at the end of a ``fit``, which puts moving averages into the model: they are of the last gradients, too."""
        inner = getattr(self, "inner_optimizer", self)
        if getattr(inner, "use_ema", False):
            self.flush()
        super().finalize_variable_values(var_list)  # type: ignore[misc]

    def delayed_state(self) -> dict[str, np.ndarray]:
        """With ``OneStepLate``: the gradients that the next update applies, by name, the same on all ranks; Keras' files lack them."""
        return {} if self._host is None else self._host.delayed_state()

    def load_delayed_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Goes on with what ``delayed_state`` has returned, on all ranks, when the variables are loaded.

        Raises:
            InvalidArgumentError: it has a gradient that fits no variable.
        """
        if self._host is not None:
            self._host.load_delayed_state(state, self._shapes())

    def compression_state(self) -> dict[str, dict[str, np.ndarray]]:
        """What ``Compression.powersgd``, ``int8`` and ``int4`` have lost and make up for in the next update; Keras' files lack it.

        On all ranks together, between two updates; a world of any size goes on with it.
        """
        return {} if self._gradient_reduction is None else self._gradient_reduction.compression_state()

    def load_compression_state(self, state: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Goes on with what ``compression_state`` has returned, on all ranks.

        Raises:
            InvalidArgumentError: it is something else, or of a model with other variables, or of another PowerSGD.
        """
        if self._gradient_reduction is not None:
            self._gradient_reduction.load_compression_state(state, self._shapes())

    @property
    def _host(self) -> HostReducer | None:
        return None if self._gradient_reduction is None else self._gradient_reduction.host

    def _named(self) -> dict[str, Variable]:
        return {} if self._gradient_reduction is None else self._gradient_reduction.names.named(self._trained())

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(variable.shape) for name, variable in self._named().items()}

    def _trained(self) -> Sequence[Variable]:
        """The variables that the optimizer updates, in an order that all ranks share."""
        raise NotImplementedError

    def _apply_own(self, gradients: list[Tensor], variables: list[Variable]) -> None:
        """The user's update, with gradients of all ranks."""
        raise NotImplementedError
