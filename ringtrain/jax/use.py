"""Who uses a transformation, in which world: two that are called alike keep apart what compression has lost, and one that nobody
updates is told when its world ends.
"""

import weakref

from ringtrain._binding import tables
from ringtrain._binding.log import logger
from ringtrain._runtime.context import Context, current, is_initialized
from ringtrain._runtime.process_sets import ProcessSet, id_of, is_alone
from ringtrain._training.adapter.numbering import keep_number, next_number


class Use:
    """The uses of one transformation, by each rank that has it in this process.

    Args:
        name: of the gradients, as the user gave it.
        process_set: the ranks that take part.
        compression: how they travel.
    """

    def __init__(self, name: str, process_set: ProcessSet, compression: str):
        self._name, self._process_set = name, process_set
        self._keeps_residuals = compression in tables.WITHOUT_FEEDBACK
        self._numbers: weakref.WeakKeyDictionary[Context, int] = weakref.WeakKeyDictionary()
        self._updated = False  # in any world: programs of an earlier one are not traced again
        self.expect()

    def expect(self) -> None:
        """It was made, or has given a state: somebody means to train with it."""
        process_set = self._process_set
        if not self._updated and is_initialized() and process_set.included() and not is_alone(process_set):
            current().closing[self] = None

    def note_update(self) -> str:
        """An update is made, or traced; returns what the names of its gradients begin with."""
        context = current()
        self._updated = True
        context.closing.pop(self, None)
        if not self._keeps_residuals:
            return self._name
        if context not in self._numbers:
            self._numbers[context] = self._number_in(context)
        number = self._numbers[context]
        return f"{self._name}[{number}]" if number else self._name

    def close(self, context: Context) -> None:
        """The world ends in which nobody has updated, and not because this rank or another one has failed before."""
        if not (self._updated or context.has_failed or context.aborted):
            logger.warning(
                f"DistributedGradientTransformation '{self._name}': its update was never called, so it has reduced no gradients, and "
                "what was trained differs between ranks. Call update() of what DistributedGradientTransformation returns, not that of "
                "the optimizer within it"
            )

    def _number_in(self, context: Context) -> int:
        process_set, kind = id_of(self._process_set), f"gradients {self._name}"
        former = [number for known, number in self._numbers.items() if not known.usable]
        if not former:
            return next_number(context, process_set, kind)
        keep_number(context, process_set, kind, former[0])  # programs that are compiled have it
        return former[0]
