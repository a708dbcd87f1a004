"""Which results a transaction counts as one window, by their parts; jobs that lose ranks meanwhile are in tests/faults."""

import numpy as np
import pytest

import ringtrain as rt
from ringtrain.elastic.transaction import Part, Transaction, awaited
from ringtrain.testing import World


class Member:
    """Of a job in which nobody comes or goes."""

    wants_pause = False

    def begin_step(self):
        return True

    def got_state(self):
        """Nothing follows."""


class Training:
    """Counts windows."""

    def __init__(self):
        self.finished = 0

    def enter_world(self):
        """Nothing follows."""

    take_state = enter_world

    def deal(self, size, place):
        """There are no samples."""

    def finish_window(self, contributors):
        assert contributors is None
        self.finished += 1


@pytest.mark.parametrize(
    "several, parts, windows",
    [
        (False, [Part.STEP, Part.STEP], [1, 2]),
        (False, [Part.SOME, Part.STEP, Part.NOTHING], [0, 1, 1]),
        (False, [Part.LAST], [1]),
        (True, [Part.STEP, Part.STEP], [0, 0]),
        (True, [Part.SOME, Part.NOTHING], [0, 0]),
        (True, [Part.LAST], [1]),
    ],
)
def test_a_window_ends_with_the_step_of_one_optimizer_or_is_closed(several, parts, windows):
    def train(rank):
        training, seen = Training(), []
        transaction = Transaction(Member(), training, several)
        transaction.enter()

        def attempt():
            yield from ()
            return rt.allreduce(np.ones(1), op=rt.Sum, name="gradient").tolist()

        for part in parts:
            assert awaited(transaction.run(attempt, lambda _, part=part: part, lambda: None)) == [2.0]
            seen.append(training.finished)
        closes = several and Part.STEP in parts
        assert [transaction.close(), transaction.close()] == [closes, False]
        assert training.finished == seen[-1] + closes
        transaction.finish()
        return seen

    with World(2) as world:
        assert world.run(train) == [windows] * 2
