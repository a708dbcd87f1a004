"""What a state must know of other frameworks' values: how a rank takes them over, and what a new world asks of them.

Each framework's module registers one adapter when it is imported; the layers here import none of them.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ringtrain.errors import InvalidArgumentError, UnsupportedError


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

    def refuse_in_file(self, values: Sequence[Any]) -> None:
        """Raises UnsupportedError for what a file cannot have."""

    def in_file(self, values: Sequence[Any]) -> Any:
        """What a file has of the values, the same on all ranks: numbers, texts, arrays and containers of these."""

    def take_from_file(self, values: Sequence[Any], kept: Any) -> None:
        """Takes that from a file. Raises ValueError if it is of other values."""

    def random_states(self, values: Sequence[Any]) -> Any:
        """What each rank draws random numbers from; a file has it of each."""

    def draw_on(self, values: Sequence[Any], states: Any) -> None:
        """Goes on with random numbers from there."""


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


class Variables:
    """What adapters of variables share: how a file has these."""

    def refuse_in_file(self, values: Sequence[Any]) -> None:
        """Raises UnsupportedError: rows of tables are each rank's own."""
        tables = [getattr(each, "sharded_table", None) for each in variables_of(values)]
        if named := [each.name for each in tables if each is not None]:
            raise UnsupportedError(
                f"save_every: a sharded embedding must be saved by all ranks, with save_table, but the State has '{named[0]}'. Save "
                "its rows in a callback or in the loop, and the model there, too."
            )

    def in_file(self, values: Sequence[Any]) -> list[np.ndarray | None]:
        """Their arrays; None for texts and seeds."""
        return [None if is_seed(each) else _array_of(each) for each in variables_of(values)]

    def take_from_file(self, values: Sequence[Any], kept: Sequence[np.ndarray | None]) -> None:
        """Raises ValueError for another number of variables, or other shapes."""
        variables = variables_of(values)
        own, theirs = [_shape_of(each) for each in variables], [_shape_of(each) for each in kept]
        unequal = [pair for pair in zip(own, theirs, strict=False) if pair[0] != pair[1] and pair[1] is not None]
        if unequal or len(own) != len(theirs):
            has, found = unequal[0] if unequal else (len(own), len(theirs))
            raise ValueError(f"{has} here, {found} there")
        for variable, array in zip(variables, kept, strict=True):
            if array is not None:
                variable.assign(array)

    def random_states(self, values: Sequence[Any]) -> list[np.ndarray]:
        """The seeds of random layers."""
        return [np.array(each.numpy()) for each in variables_of(values) if is_seed(each)]

    def draw_on(self, values: Sequence[Any], states: Sequence[np.ndarray]) -> None:
        """Puts them back."""
        for variable, state in zip(filter(is_seed, variables_of(values)), states, strict=False):
            variable.assign(state)


def _shape_of(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(value.shape)


def _array_of(variable: Any) -> np.ndarray | None:
    array = np.array(variable.numpy())
    return None if array.dtype == object else array


def _own_variables(value: Any) -> Sequence[Any]:
    variables = getattr(value, "variables", None)
    if variables is None:
        return [value]
    return variables() if callable(variables) else variables
