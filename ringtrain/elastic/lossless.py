"""What the states that lose no step share: operations that survive, who is told of another size, and no commits.

What a step is, and how its results survive, differs: NumPy, TensorFlow and Keras have ``ringtrain.elastic.transparent``,
PyTorch has ``ringtrain.torch.elastic.transparent``.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from ringtrain._bootstrap import membership
from ringtrain._runtime.arguments import whole
from ringtrain._runtime.context import current
from ringtrain._runtime.pending import Operation
from ringtrain._runtime.process_sets import ProcessSet
from ringtrain._training.step_guard import Part, under_way
from ringtrain.elastic.sets import Rule, Sets
from ringtrain.elastic.standing import Training
from ringtrain.elastic.state import State, check_free_names
from ringtrain.elastic.transaction import Transaction
from ringtrain.errors import InvalidArgumentError, UnsupportedError

Result = TypeVar("Result")


class LosslessState(State):
    """The base of both.

    Args:
        objects: what becomes attributes.
        rule: of the process sets that a world has.

    Attributes:
        process_sets: those of the rule, by their places in it: the same objects in each world. They can be used from the
            loop on.

    Raises:
        InvalidArgumentError: a name that is taken, or no rule.
    """

    process_sets: list[ProcessSet]
    step: int  # of the derived class, as are those that follow

    _training: Training  # that goes on
    _transaction: Transaction | None  # None in a job that is not elastic
    _SURVIVED = Part.NOTHING  # what the results of ``survive`` are of a window
    _NOTHING_TO_COMMIT: str  # and what to do instead

    def __init__(self, objects: dict[str, Any], rule: Rule | None):
        super().__init__()
        check_free_names("elastic.State", type(self), objects)
        self._sets = Sets(rule)
        self.process_sets = self._sets.of_rule
        self._listeners: list[Callable[[int, int], object]] = []
        self._size: int | None = None  # that was told last; a rank that joins takes it over
        self._has_looped = False  # or does
        self._has_entered = False  # the loop has taken the state of rank 0
        self._window = threading.Lock()  # of TensorFlow's threads one is in a window at a time
        self._survives_in = 0  # the thread that is in `survive`

    def on_change(self, function: Callable[[int, int], object]) -> None:
        """Has a function called between two steps when the number of ranks has changed, with the old and the new one.

        Learning rates do not follow that number by themselves. Ranks that join have the values from before the change, and
        call the function too, before their first step. So it may change values, and use operations in ``survive``.
        """
        self._listeners.append(function)

    def survive(self, function: Callable[[], Result]) -> Result:
        """Calls a function that uses operations between ranks; again, in another world, if not all come to its end.

        Example:
            >>> for epoch in state.epochs(90):
            ...     for x, y in loader:
            ...         train_on(x, y)
            ...     accuracy = state.survive(lambda: hvd.allreduce(right / seen, name="accuracy"))

        All ranks do so in one order, one at a time. What it returns is used by all of them, or by none. A rank that joins
        begins with the inner loop, so what is done once an epoch, such as the average of a metric, stands behind that.

        Args:
            function: must have no effect but what it returns, and use the world as it finds it.

        Raises:
            InvalidArgumentError: in an elastic job, before the loop has begun.
            ProcessSetLostError: the function has used a process set that has lost a member.
            RingtrainError: what another world would meet again.
        """
        if self._transaction is None:
            return function()
        if not self._has_entered:
            raise InvalidArgumentError(
                "elastic.State: its operations must stand in the loop over epochs() or steps(), but one stands before it, "
                "where ranks that join would not meet it. Move it into the loop."
            )
        if self._survives_in == threading.get_ident():  # part of the one around it
            return function()
        with self._window:
            self._survives_in = threading.get_ident()
            try:
                return self._transaction.survive(function, self._SURVIVED)
            finally:
                self._survives_in = 0

    def use_within(self, function: Callable[[], Result]) -> Result:
        """``survive`` for what is used before the open window ends, such as rows of a table; not for scripts.

        Outside of the loop it calls the function alone.
        """
        transaction = self._transaction
        if transaction is None or under_way() is not transaction:
            return function()

        def attempts() -> Generator[Operation, None, Result]:
            yield from ()
            return function()

        if self._survives_in == threading.get_ident():  # which refuses it
            return transaction.use_within(attempts)
        with self._window:
            return transaction.use_within(attempts)

    def _begin_loop(self) -> None:
        self._refuse_second_loop()
        self._has_looped = True

    def _refuse_second_loop(self) -> None:
        """A rank that joins begins with the first loop of the script, in which the others may be no longer."""
        if self._has_looped:
            raise InvalidArgumentError(
                "elastic.State: expected one loop over all epochs, or one fit, but found another one, in which ranks that join "
                "would not be. Count all epochs in one, or make another State for each run of the script."
            )

    def _enter(self, transaction: Transaction) -> None:
        """Enters the job, and says so on a rank that joins others."""
        joins = current().takes_over
        transaction.enter()
        if joins:
            say_joined(self.step)

    def _tell_change(self) -> None:
        """Calls the listeners if the number of ranks is not the one that was told last, which goes with the state."""
        size = current().size
        former, self._size = self._size, size
        if former is None or former == size:
            return
        for listener in self._listeners:
            listener(former, size)
        if self._transaction is not None:
            self._transaction.close()  # where they have used operations: ranks that join begin with the window behind

    # ---- Horovod's, of which there is no need ----

    def commit(self) -> None:
        """Raises UnsupportedError: there is nothing to go back to."""
        raise UnsupportedError(self._NOTHING_TO_COMMIT)

    def save(self) -> None:
        """Raises UnsupportedError, as ``commit`` does."""
        self.commit()

    def restore(self) -> None:
        """Raises UnsupportedError, as ``commit`` does."""
        self.commit()

    def check_host_updates(self) -> None:
        """Raises UnsupportedError: ranks that wait to join do so between two steps, without being asked for."""
        self.commit()

    def sync(self) -> None:
        """Gives all ranks the values of rank 0; the loops do it."""
        self._training.take_state()


def require_one_sampler(kind: str, count: int) -> None:
    """Raises InvalidArgumentError unless a state has one that deals the samples of each step, or none where it need not."""
    planned = membership.planned()
    if count > 1 or (planned and not count):
        flag = "--batch constant: " if planned else ""
        raise InvalidArgumentError(
            f"{flag}elastic.State must have one {kind}, which deals the samples of each step, but has {count}. Pass sampler=, and "
            "leave those out that read other data."
        )


def require_averages(owner: str, averages: bool) -> None:
    """Raises UnsupportedError in a job with ``--batch constant`` unless gradients are averaged."""
    if membership.planned() and not averages:
        raise UnsupportedError(
            f"{owner}: with --batch constant gradients must be averaged, weighed by samples, but op is another one, whose result "
            "depends on the number of ranks. Use op=Average."
        )


def say_joined(step: int) -> None:
    """Says on a rank that it has joined others."""
    print(
        f"ringtrain: rank {current().rank} has joined after step {step}, {seconds_of_process():.1f} s after the start of its "
        "process.",
        file=sys.stderr,
        flush=True,
    )


def seconds_of_process() -> float:
    """Since this process was started."""
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def checked_progress(given: dict[str, Any]) -> dict[str, int]:
    """Numbers of epochs and steps that a state was given, by their names. Raises TypeError, or InvalidArgumentError below 0."""
    numbers = {name: whole(f"elastic.State: {name}", value) for name, value in given.items()}
    for name, number in numbers.items():
        if number < 0:
            raise InvalidArgumentError(
                f"elastic.State: {name} must be 0 at least, but is {number}. Give the number of what is done already."
            )
    return numbers
