"""What is kept from step to step for the gradients of some variables: a tape lives for one step, and a graph knows nothing."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from ringtrain._runtime.context import Context, current
from ringtrain._runtime.process_sets import ProcessSet, id_of
from ringtrain._training.adapter.numbering import next_number
from ringtrain.tensorflow import names as naming
from ringtrain.tensorflow.library import current_slot
from ringtrain.tensorflow.types import Source

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """One thing for each rank, process set, name and list of variables; it ends with the variables."""

    def __init__(self) -> None:
        self._entries: dict[tuple, list[tuple[list[weakref.ref], Value]]] = {}  # by slot, process set and name

    def find(
        self, name: str, variables: Sequence[Source], process_set: ProcessSet, make: Callable[[], Value],
        suits: Callable[[Value], bool] = lambda _: True,
    ) -> Value:  # fmt: skip
        """What was kept of the step before; a new one for other variables, or where that does not suit any more."""
        key = current_slot(), process_set.process_set_id, name
        entries = [entry for entry in self._entries.get(key, []) if all(each() is not None for each in entry[0])]
        self._entries[key] = entries
        for references, value in entries:
            alike = len(references) == len(variables) and suits(value)
            if alike and all(known() is each for known, each in zip(references, variables, strict=True)):
                return value
        value = make()
        if all(naming.is_variable(each) for each in variables):
            entries.append(([weakref.ref(each) for each in variables], value))
        return value

    def of_this_rank(self) -> Iterator[tuple[list[Source], Value]]:
        """All that is kept, with the variables, in one order on all ranks."""
        slot = current_slot()
        for key in sorted((key for key in self._entries if key[0] == slot), key=str):
            for references, value in self._entries[key]:
                yield [reference() for reference in references], value


class _Numbered(NamedTuple):
    context: "weakref.ref[Context]"
    number: int


_numbers: Kept[_Numbered] = Kept()


def number_of(name: str, variables: Sequence[Source], process_set: ProcessSet) -> int:
    """Numbers the lists of variables whose gradients have one name, from 0 in each world, in the order of their first steps."""
    context = current()

    def make() -> _Numbered:
        return _Numbered(weakref.ref(context), next_number(context, id_of(process_set), f"gradients {name}"))

    return _numbers.find(name, variables, process_set, make, lambda found: found.context() is context).number
