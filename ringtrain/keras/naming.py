"""Names of one Keras optimizer's gradients, the same on all ranks."""

import functools
from collections.abc import Callable, Sequence

from ringtrain._runtime.context import current
from ringtrain._training.adapter.numbering import keep_number, next_number
from ringtrain._training.session import NewWorld
from ringtrain.keras.types import Variable
from ringtrain.keras.variables import own_name

_KIND = "optimizer"  # of objects that are numbered


class GradientNames:
    """Names that an optimizer submits: its own, its number, and a number for each variable.

    process_set: tells the id of that of the ranks that train together. name: the user's word for the optimizer.

    Attributes:
        variables: those that have a name, in an order that all ranks share; kept alive, and so their ids.
    """

    def __init__(self, process_set: Callable[[], int], name: str | None):
        self.variables: list[Variable] = []
        self._process_set = process_set
        self._name = name
        self._names: dict[int, str] = {}

    @functools.cached_property
    def prefix(self) -> str:
        """Of all names that this optimizer submits: the user's word for it, and its number; asking for it is its first use.

        Optimizers are numbered in that order, so a rank may make further ones, as rank 0 does that loads a file; and the
        names of two never meet, whatever their models are called.
        """
        return f"{self._name or 'optimizer'}.{self._number}"

    @functools.cached_property
    def _number(self) -> int:
        self._context = current()
        return next_number(self._context, self._process_set(), _KIND)

    def enter_world(self, change: NewWorld) -> None:
        """Goes on in this world with the number, which graphs have.

        One that was not used yet gets a number where steps begin anew, as all ranks call it in one order.
        """
        if change is not NewWorld.ANEW and "_number" not in self.__dict__:
            return
        number = self._number
        if self._context is not current():
            self._context = current()
            keep_number(self._context, self._process_set(), _KIND, number)

    def of(self, variable: Variable) -> str:
        """A name that is the same on all ranks: they see the variables in one order."""
        name = self._names.get(id(variable))
        if name is None:
            name = f"{self.prefix}.{len(self._names)}.{own_name(variable)}"
            self._names[id(variable)] = name
            self.variables.append(variable)
        return name

    def named(self, variables: Sequence[Variable]) -> dict[str, Variable]:
        """Variables by the names of their gradients, without the prefix; in an order that all ranks share."""
        return {self.of(variable).removeprefix(f"{self.prefix}."): variable for variable in variables}
