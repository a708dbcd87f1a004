"""Drift in steps that have no rounds, as those of graphs: a row of bytes in each step, and now and then a look at the parameters.

In each step the ranks take the maximum of their rows, beside the gradients. It tells whether any rank steps with other
settings, and whether any asks for a look. Then all take the maximum of the digests of their parameters. Both are operations
of the framework, which wait for no other rank on the host: only where ranks differ does a call of the host, which tells
the others what this rank has, and raises. A row follows from the settings, and from the schedule of the looks: a graph of
TensorFlow makes it by itself. A program of JAX makes those that ask for nothing, and calls the host seldom (``rest``).
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from ringtrain._runtime import exits
from ringtrain._training import drift
from ringtrain._training.adapter import checks
from ringtrain._training.agreement import Agreement
from ringtrain._training.differences import Differences, waited
from ringtrain._training.drift import ComparedReplica, Forms, Named, Settings, Words
from ringtrain._training.look_schedule import LookSchedule
from ringtrain._training.session import NewWorld, Session
from ringtrain._training.trained import Parameter
from ringtrain.errors import MismatchError

Result = TypeVar("Result")
SAID = 16  # bytes: a digest of the settings, and the learning rate as float64
ROW = 2 * SAID + 1  # bytes: what is said, its complement, and whether a look is asked for (1), or a rank stops (2)
_STOPS = 2  # so that ranks that step look, in which they hear of it
_REST = 0.25  # seconds, about, after which a program calls the host again
_LOOK = 5e-3  # seconds of a look beside the reading: a call of the host, and an operation more
_COPIED = 4e9  # bytes a second, into the memory that the host gets
_OTHER_GRADIENTS = ": number of tensors "  # what the core says of them

_WHO_IS_MISSING = (
    "With it the ranks agree that they step alike: the missing ones have not come to this step. "
    "Take the same steps on every rank."
)


def _widened(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "c":  # by its parts, which differ singly
        array = np.ascontiguousarray(array).reshape(-1).view(array.real.dtype)
    return np.array(array, np.float64 if array.dtype == np.float64 else np.float32, order="C")


def _digest_of_array(array: np.ndarray) -> int:
    return checks.digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


ARRAYS = Forms(_digest_of_array, _widened)


class Watch:
    """What one rank's steps compare with those of the others, in one world after another.

    The parameters are those of before the update, as the one before has left them.

    Args:
        session: the rank that it acts for.
        name: of its operations, without their last part; unique among those of the process set.
        called: what things are called in the framework.
        forms: how its parameters are read.
        first_look: the number of the step of a world that asks for the first look, counted from 0: behind what a script
            broadcasts after its first step, of several updates perhaps. When ranks were made alike it is the second one.
        clock: in seconds.

    Attributes:
        name: of its operations.
        schedule: in which steps of this world a look is asked for.
        stops: some rank has told that it stops, and all have heard of it.
    """

    def __init__(
        self, session: Session, name: str, called: Words, forms: Forms = ARRAYS, first_look: int = 10,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self.name = f"{name}.replica"
        self._session, self._called, self._forms, self._clock = session, called, forms, clock
        self._differences = Differences(session, self.name, name)
        self.schedule = LookSchedule(first_look=first_look)
        self.stops = False
        self._settings: Settings = {}
        self._rate: Any = None
        self._wake: Callable[[], None] = lambda: None
        self._parameters: Named = ()
        self._replica: ComparedReplica
        self._has_entered = False  # the world, before its first row was asked for here
        self._rests = 0
        self._rested_at: float | None = None
        session.on_new_world(self._meet_world)
        self._begin()

    def mute(self, muted: bool) -> None:
        """Compares nothing while ranks may have another model; once they have the same one, from the next step on."""
        self.schedule.muted = muted
        self.schedule.first_look = self.schedule.first_look if muted else 1
        self._begin()
        self._wake()

    def ask(self, always: bool) -> None:
        """Has the next step look at the parameters; if not ``always``, only where that takes little of the time."""
        self.schedule.asked = always or self._replica.costs_little

    def enter_world(self) -> None:
        """A world has begun for graphs, which make their rows by themselves and ask nobody for the world."""
        self._begin()
        self._has_entered = True

    def stop(self) -> bool:
        """Tells the others, between two steps, that this rank is to stop. Ranks that stop too say so likewise, others in their next row.

        Returns:
            whether no rank takes another step. If one does, this rank must take that one, too; behind it all know (``stops``).
        """
        schedule = self.schedule
        if (
            schedule.muted or schedule.steps == 0
        ):  # in the next step no row counts, so that nobody could be told from who stops
            return True
        row = np.frombuffer(self._maximum("settings", _only(_STOPS)).agreed(), np.uint8)
        if not row[:-1].any():
            return True
        self.schedule.asked = self.stops = True
        self._wake()
        return False

    # ---- in each step ----

    def row(self, settings: Settings, rate: Any = None) -> np.ndarray:
        """What this rank says in a step, as ``ROW`` bytes; ranks take the maximum.

        Args:
            settings: what it steps with; the same objects where nothing has changed are told sooner.
            rate: the learning rate, if it is not among them: a number, or an array of one.
        """
        self._session.follow()
        self._settings, self._rate, self._parameters = settings, rate, ()  # which may be a copy of the whole model
        told = self._replica.tell(comes_alike=True)
        counts, asks = self.schedule.take(self._clock())
        own = _with_complement(np.array([told.settings, _bits(rate)], np.uint64))
        return np.concatenate([own if counts else np.zeros_like(own), np.array([asks], np.uint8)])

    def rest(self) -> int:
        """For a program, behind ``row``: in how many of the next steps it need not ask for one, as it would ask for no look.

        So many that about a quarter of a second passes; none while ranks are made alike, and where a look is due.
        """
        now, before = self._clock(), self._rested_at
        steps, self._rested_at = self._rests + 1, now
        seconds = min(_REST, self._replica.seconds_left)
        schedule = self.schedule
        if schedule.muted or schedule.steps <= schedule.first_look or before is None or seconds <= 0:
            self._rests = 0
        else:
            self._rests = int(min(steps * seconds / max(now - before, 1e-9), 2 * steps))
        return self._rests

    def wakes(self, wake: Callable[[], None]) -> None:
        """Has a function called that ends the rest of a program."""
        self._wake = wake

    def is_quiet(self, most: np.ndarray) -> bool:
        """Whether a step's maximum says that all is well, and nobody asks for a look."""
        return not most[-1] and are_equal(most[:-1])

    def digests(
        self, most: np.ndarray, parameters: Named, settings: Settings | None = None, rate: Any = None
    ) -> np.ndarray:
        """What this rank says where a step is not quiet, as bytes of which ranks take the maximum: for each parameter a digest
        and its complement.

        Args:
            most: the maximum of the rows.
            parameters: with their names.
            settings: as for ``row``, where the step has not asked for one.
            rate: likewise.

        Raises:
            MismatchError: ranks have other settings; the same on all of them.
        """
        if settings is not None:
            self._session.follow()
            self._settings, self._rate = settings, rate
        if most[-1] == _STOPS:
            most = self._hear_of_stop()
        if not are_equal(most[:-1]):
            own = with_rate(self._settings, self._rate)
            with _noted():
                waited(self._differences.refuse_settings(own, "is", self._called))
        self._parameters = parameters
        self._replica.hear(any_asks=True)
        self._replica.note_step()
        self._replica.tell(comes_alike=False)  # it is to be shown where ranks differ
        self._plan_look()
        digests = self._replica.shown.digests
        found = np.zeros(len(parameters), np.int64) if digests is None else digests
        return _with_complement(found.view(np.uint64))

    def judge(self, found: np.ndarray) -> None:
        """Ends a look.

        Args:
            found: the maximum of the digests, as bytes.

        Raises:
            MismatchError: parameters differ by more than the rounding of processors; the same on all ranks.
        """
        if are_equal(found):
            return
        with _noted():
            self._replica.compares = waited(self._differences.judge_parameters(self._replica))
        self._parameters = ()
        self._plan_look()

    def _hear_of_stop(self) -> np.ndarray:
        """The rows of those that have said, in the place of a row, that they stop, and now take this step with the others."""
        self.stops = True
        return np.frombuffer(self._maximum("settings", _only(1)).agreed(), np.uint8)

    # ---- for steps that run on the host ----

    def meet(self, trained: Named) -> None:
        """Once in a world: compares what ranks train, where a step has no agreement on its gradients, and before these are sent.

        Raises:
            MismatchError: ranks train other parameters; the same on all of them.
        """
        self._session.follow()
        context, key = self._session.context, (self._session.process_set_id, self.name)
        if key not in context.met:
            context.met.add(key)
            if context.explain is None:  # in an elastic job ranks come to a world's first step at other times
                waited(self._differences.require_trained(_listed(trained)))

    def begin(self, settings: Settings, rate: Any = None) -> Agreement:
        """Begins a step: sends the row."""
        return self._maximum("settings", self.row(settings, rate))

    def reduced(self, reduce: Callable[[], Result], trained: Callable[[], Named]) -> Result:
        """What ``reduce`` returns, between ``begin`` and ``end``.

        Raises:
            MismatchError: ranks train other parameters; else they are told of numbers of gradients alone.
        """
        try:
            return reduce()
        except Exception as problem:  # of whatever framework; each rank has the same
            if _OTHER_GRADIENTS in str(problem):
                waited(self._differences.require_trained(_listed(trained())))
            raise

    def end(self, row: Agreement, parameters: Callable[[], Named]) -> None:
        """Ends what ``begin`` has begun, before the update.

        Raises:
            MismatchError: ranks have other settings, or other parameters.
        """
        most = np.frombuffer(row.agreed(), np.uint8)
        if self.is_quiet(most):
            return
        found = self._maximum("parameters", self.digests(most, parameters())).agreed()
        self.judge(np.frombuffer(found, np.uint8))

    def _maximum(self, what: str, own: np.ndarray) -> Agreement:
        session = self._session
        name = f"{self.name}.{what}"
        return Agreement(session.context, session.process_set_id, name, own.tobytes(), _WHO_IS_MISSING)

    def _meet_world(self, _: NewWorld) -> None:
        if not self._has_entered:
            self._begin()
        self._has_entered = False

    def _begin(self) -> None:
        """In a world, or when ranks have been made alike: the first look comes again."""
        self._rests, self._rested_at = 0, None
        self._replica = ComparedReplica(
            lambda: self._settings, lambda: self._parameters, self._forms, self._called, self._clock, _beside
        )
        self.schedule.steps = 0
        self._plan_look()

    def _plan_look(self) -> None:
        self.schedule.plan(self._clock() + self._replica.seconds_left, in_each_step=not drift.PERIOD)


class Comparison:
    """What one step compares, for steps that run on the host, or reduce there.

    Args:
        watch: of the optimizer, or whatever else steps.
        settings: what it steps with.
        rate: the learning rate of this step, as the framework has it; None without one.
        parameters: with their names, as the framework has them.
        read: makes of such a parameter what the watch's forms take.

    Attributes:
        watch, settings, rate, parameters: as given.
    """

    def __init__(self, watch: Watch, settings: Settings, rate: Any, parameters: Named, read: Callable[[Any], Any]):
        self.watch, self.settings, self.rate, self.parameters, self._read = watch, settings, rate, parameters, read

    def around(self, reduce: Callable[[], Result], rate: Any) -> Result:
        """What ``reduce`` returns, once ranks have found that they step alike.

        Args:
            reduce: what travels meanwhile.
            rate: as a number, or an array of one.

        Raises:
            MismatchError: ranks have other settings, or other parameters; before the update.
        """
        row = self.watch.begin(self.settings, rate)
        result = self.watch.reduced(reduce, lambda: self.parameters)
        self.watch.end(row, lambda: [(name, self._read(each)) for name, each in self.parameters])
        return result


@contextlib.contextmanager
def _noted() -> Iterator[None]:
    """A graph or a program may have called: its framework says what is raised within a text of its own."""
    try:
        yield
    except MismatchError as problem:
        exits.note_on_host(problem)
        raise


def _only(last: int) -> np.ndarray:
    """A row that says nothing of settings."""
    return np.array([*bytes(ROW - 1), last], np.uint8)


def _listed(parameters: Named) -> list[Parameter]:
    return [Parameter(name, str(list(each.shape))) for name, each in parameters]


def _beside(parameters: Named) -> float:
    return _LOOK + sum(getattr(each, "nbytes", 0) for _, each in parameters) / _COPIED


def are_equal(most: np.ndarray) -> bool:
    """Whether all ranks have the same digests, from the maximum of what ``_with_complement`` returns; 0 counts nothing."""
    highest, lowest = most[: most.size // 2], ~most[most.size // 2 :]
    return bool((highest == lowest).all()) or not most.any()


def _with_complement(digests: np.ndarray) -> np.ndarray:
    """uint8: the bytes of digests, and then their complements. Zeros, as of a rank that has joined, are no maximum."""
    own = digests.view(np.uint8)
    return np.concatenate([own, ~own])


def _bits(rate: Any) -> int:
    """Those of a learning rate, which frameworks keep with 32 bits where it is a bare number; 0 without one."""
    if rate is None:
        return 0
    number = np.float32(rate) if type(rate) in (int, float) else np.asarray(rate).real.reshape(())
    return int(np.asarray(number, np.float64).view(np.uint64))


def with_rate(settings: Settings, rate: Any = None) -> Settings:
    """Settings with the learning rate of this step."""
    return settings if rate is None else {**settings, "learning_rate": shortest(rate)}


def shortest(number: Any) -> float:
    """A number, or an array of one, with the digits that its precision has: 0.1 of a float32."""
    return float(str(np.asarray(number).real.reshape(())[()]))  # optax makes it complex for parameters that are
