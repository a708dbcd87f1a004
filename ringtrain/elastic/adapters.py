"""What a state must know of other frameworks' values: how a rank takes them over, and what a new world asks of them.

Each framework's module registers one adapter when it is imported; the layers here import none of them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from ringtrain.errors import InvalidArgumentError


class Adapter(Protocol):
    """For the values of one framework."""

    def fits(self, value: Any) -> bool:
        """Whether it is such a value: one that keeps its identity when it takes a state over."""

    def outline(self, values: Sequence[Any]) -> dict[str, str]:
        """What the values must be on each rank that takes them over, by the names of their parts; local to this rank."""

    def take_over(self, values: Sequence[Any]) -> None:
        """Gives values the state that rank 0's have. All ranks call it, with the same values in one order."""

    def enter_world(self, values: Sequence[Any]) -> None:
        """The default context is another one; local to this rank."""


_adapters: list[Adapter] = []


def register(adapter: Adapter) -> None:
    """Has states use an adapter; those that come later are asked first."""
    _adapters.insert(0, adapter)


def adapter_of(value: Any) -> Adapter | None:
    """The adapter that a value fits; None for plain objects."""
    return next((adapter for adapter in _adapters if adapter.fits(value)), None)


def enter_world(values: Sequence[Any]) -> None:
    """Tells all adapters of the present world, with those of the values that are theirs."""
    for adapter in _adapters:
        adapter.enter_world([value for value in values if adapter_of(value) is adapter])


def variables_of(values: Sequence[Any]) -> list[Any]:
    """The variables of models, optimizers and the like, each once, in an order that ranks share.

    An optimizer that is not built yet is, for the one model beside it: the ranks must have the same variables.

    Raises:
        InvalidArgumentError: it is not known for which one; or a model has no variables yet.
    """
    models = [
        value for value in values if hasattr(value, "trainable_variables") and not hasattr(value, "apply_gradients")
    ]
    for value in values:
        if getattr(value, "built", True):
            continue
        if value in models or len(models) != 1:
            raise InvalidArgumentError(
                f"elastic.State: a {type(value).__name__} must be built before, but is not, and ranks that join would have "
                "other variables. Call its build() first."
            )
        value.build(models[0].trainable_variables)
    listed = [value if isinstance(value, (list, tuple)) else _own_variables(value) for value in values]
    return list({id(variable): variable for variables in listed for variable in variables}.values())


def is_seed(variable: Any) -> bool:
    """Whether it is the state of a ``keras.random.SeedGenerator``, a seed and a counter, as dropout has one: a rank's own."""
    return bool(variable.name.rpartition("/")[2].startswith("seed_generator_state"))


def outline_of(variables: Sequence[Any]) -> dict[str, str]:
    """Their shapes and dtypes, by place: names that frameworks give differ from process to process."""
    return {
        f"variable {place}": f"{each.dtype if isinstance(each.dtype, str) else each.dtype.name} of {tuple(each.shape)}"
        for place, each in enumerate(variables)
    }


def _own_variables(value: Any) -> Sequence[Any]:
    variables = getattr(value, "variables", None)
    if variables is None:
        return [value]
    return variables() if callable(variables) else variables
