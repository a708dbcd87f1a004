"""What an optimizer of local steps has beyond others: one class of methods for Keras 3 and tf_keras."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ringtrain._training.needs import check_needs
from ringtrain.errors import InvalidArgumentError
from ringtrain.keras.reduction import KerasReducer
from ringtrain.keras.types import Tensor, Variable

if TYPE_CHECKING:  # loaded by those who average
    from ringtrain.keras.local_steps import AveragedVariables


class AveragingMethods:
    """Methods of a distributed optimizer that have something to say with ``LocalSteps``; without it they do nothing."""

    _gradient_reduction: KerasReducer | None

    def join(self) -> None:
        """With ``LocalSteps``: says that this rank has no more data, and averages with the others until all ranks have said so.

        Outside of a ``tf.function``. In another mode it does nothing; ``ringtrain.keras.join`` is for that.
        """
        local = self._local_steps
        if local is not None:
            self._know_all(local)
            local.join()

    def count_samples(self, samples: Tensor | int) -> None:
        """With ``LocalSteps``: says what the next update weighs, such as the number of its samples; on all ranks, or on none.

        Raises:
            UnsupportedError: in another mode, or with ``warmup`` or ``within``, where gradients are averaged and count alike.
        """
        reduction = self._gradient_reduction
        if reduction is None or reduction.settings.alone:
            return
        local = reduction.local_steps
        exact = local is None or bool(local.mode.warmup) or local.mode.within is not None
        check_needs(["count_samples"], {"exact steps of Keras": exact}, "count_samples")
        if local is not None:
            local.count_samples(samples)

    def average_also(self, variables: Iterable[Variable]) -> None:
        """With ``LocalSteps``: averages further variables with the trained ones, such as ``model.non_trainable_variables``.

        Floating-point ones become the average, others the maximum; random seeds are left alone. In ``fit``
        BroadcastGlobalVariablesCallback does this for the model.
        """
        if self._local_steps is not None:
            self._know_all(self._local_steps)
            self._local_steps.know(variables, False)

    def local_steps_state(self) -> dict[str, object]:
        """With ``LocalSteps``: what the next synchronisation needs beside the variables, as NumPy arrays; Keras' files lack it."""
        return {} if self._local_steps is None else self._local_steps.state()

    def load_local_steps_state(self, state: dict[str, object]) -> None:
        """Goes on with what ``local_steps_state`` has returned, on all ranks, when the variables are loaded."""
        if self._local_steps is not None and state:
            self._local_steps.load(state)

    @property
    def _local_steps(self) -> "AveragedVariables | None":
        return None if self._gradient_reduction is None else self._gradient_reduction.local_steps

    def _averages_variables(self, gradients: object) -> bool:
        """``synchronize`` of an optimizer of local steps; False: it is none, and synchronizes gradients."""
        reduction = self._gradient_reduction
        if reduction is None or reduction.settings.local is None:
            return False
        require_none("synchronize", gradients)
        if reduction.local_steps is not None:
            self._know_all(reduction.local_steps)
            reduction.local_steps.synchronize()
        return True

    def _know_all(self, local: "AveragedVariables") -> None:
        assert self._gradient_reduction is not None
        local.know(self._gradient_reduction.kinds.not_local(self._trained()), True)

    def _trained(self) -> Sequence[Variable]:
        """The variables that the optimizer updates, in an order that all ranks share."""
        raise NotImplementedError


def require_none(method: str, gradients: object) -> None:
    """Raises InvalidArgumentError where a script synchronizes gradients of an optimizer of local steps."""
    if gradients is not None:
        raise InvalidArgumentError(
            f"{method}: mode must not be LocalSteps where a script synchronizes gradients, but is: synchronize() averages the "
            "variables. Clip gradients before apply(), and call that alone."
        )
