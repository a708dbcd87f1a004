"""Which results a transaction counts as one window, by their parts; jobs that lose ranks meanwhile are in tests/faults."""

import numpy as np
import pytest

import ringtrain as rt
from ringtrain.elastic.transaction import Part, Transaction
from ringtrain.errors import InvalidArgumentError
from ringtrain.testing import World


class Member:
    """Of a job in which nobody comes or goes."""

    wants_pause = balances = False

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

    def outline(self):
        return {}

    def deal(self, size, place):
        """There are no samples."""

    def drawn(self):
        return ""

    def finish_window(self, contributors):
        assert contributors is None
        self.finished += 1


@pytest.mark.parametrize(
    "several, parts, windows, closes",
    [
        (False, [Part.STEP, Part.STEP], [1, 2], False),
        (False, [Part.SOME, Part.STEP], [0, 1], False),
        (False, [Part.STEP, Part.NOTHING], [1, 1], True),  # as a metric behind the last step of an epoch
        (False, [Part.NOTHING, Part.STEP], [0, 1], False),
        (False, [Part.NOTHING, Part.SOME], [0, 0], False),
        (False, [Part.LAST], [1], False),
        (True, [Part.STEP, Part.STEP], [0, 0], True),
        (True, [Part.SOME, Part.NOTHING], [0, 0], False),
        (True, [Part.LAST], [1], False),
    ],
)
def test_a_window_ends_with_the_step_of_one_optimizer_or_is_closed(several, parts, windows, closes):
    def train(rank):
        training, seen = Training(), []
        transaction = Transaction(Member(), training, several)
        transaction.enter()

        for part in parts:
            assert transaction.survive(lambda: rt.allreduce(np.ones(1), op=rt.Sum, name="x").tolist(), part) == [2.0]
            seen.append(training.finished)
        assert [transaction.close(), transaction.close()] == [closes, False]
        assert training.finished == seen[-1] + closes
        transaction.finish()
        return seen

    with World(2) as world:
        assert world.run(train) == [windows] * 2


def test_a_step_before_the_loop_is_refused():
    """It is in no world yet, which the core has as lacking memory."""

    def train(rank):
        transaction = Transaction(Member(), Training())
        for part in (Part.STEP, Part.SOME, Part.LAST):
            with pytest.raises(InvalidArgumentError, match="a step belongs within its loop.*was made before"):
                transaction.survive(lambda: 1, part)
        assert transaction.survive(lambda: 1, Part.NOTHING) == 1
        transaction.enter()
        assert transaction.survive(lambda: 1, Part.STEP) == 1
        transaction.finish()

    with World(2) as world:
        world.run(train)


def test_a_window_within_what_survives_is_refused():
    def train(rank):
        transaction = Transaction(Member(), Training())
        transaction.enter()

        def within():  # as a backward pass would
            return transaction.survive(lambda: 1, Part.NOTHING)

        with pytest.raises(InvalidArgumentError, match=r"what survive\(\) calls must use operations alone"):
            transaction.survive(within, Part.NOTHING)
        found = transaction.survive(lambda: rt.allreduce(np.ones(1), op=rt.Sum, name="x").tolist(), Part.LAST)
        transaction.finish()
        return found

    with World(2) as world:
        assert world.run(train) == [[2.0]] * 2
