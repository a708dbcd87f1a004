"""What becomes of the gradients of a variable: averaged, left to its rank, or the largest of all ranks."""

from collections.abc import Sequence

from ringtrain.keras.types import Layer, Variable


class VariableKinds:
    """Which variables' gradients stay on their rank.

    layers: whose variables are such. More variables may be named later.
    """

    def __init__(self, layers: Sequence[Layer]):
        self._layers = layers
        self._local: list[Variable] = []

    def keep_local(self, variable: Variable) -> None:
        """Leaves the gradient of a variable to each rank."""
        self._local.append(variable)

    @property
    def some_are_local(self) -> bool:
        """Whether gradients of some variables stay on their rank."""
        return bool(self._local_variables())

    def of(self, variables: Sequence[Variable]) -> list[str]:
        """What becomes of each variable's gradient: "averaged", "local" or "overwriting"."""
        local = {id(variable) for variable in self._local_variables()}
        return [_kind_of(variable, local) for variable in variables]

    def averaged(self, variables: Sequence[Variable]) -> list[Variable]:
        """Those whose gradients are averaged."""
        return [variable for variable, kind in zip(variables, self.of(variables), strict=True) if kind == "averaged"]

    def not_local(self, variables: Sequence[Variable]) -> list[Variable]:
        """Those that workers average after local steps: not those that each rank keeps to itself."""
        local = {id(variable) for variable in self._local_variables()}
        return [variable for variable in variables if id(variable) not in local]

    def _local_variables(self) -> list[Variable]:
        of_layers = [variable for layer in self._layers for variable in layer.trainable_variables]
        return of_layers + self._local


def is_overwritten(variable: Variable) -> bool:
    """Whether Keras stores the gradient in the variable: float8 scales by such maxima, which one does not average."""
    return getattr(variable, "overwrite_with_gradient", False)


def _kind_of(variable: Variable, local: set[int]) -> str:
    if id(variable) in local:
        return "local"
    return "overwriting" if is_overwritten(variable) else "averaged"
