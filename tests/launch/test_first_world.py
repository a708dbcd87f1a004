"""For whom the first world of an elastic job waits is said once, when it has taken long."""

import pytest

from ringtrain.launch.first_world import SECONDS_IN_SILENCE, FirstWorld

TEXT = (
    "not in init() yet: rank 1 of 3. The others wait for that, 280 s at most (half of --elastic-timeout). Then the job begins "
    "without, if 2 or more are left."
)


def test_it_is_said_once_who_has_not_come():
    said = []
    first = FirstWorld(minimum=2, wait=600.0, began=100.0)
    assert first.look_at == 100.0 + SECONDS_IN_SILENCE
    first.look(first.look_at - 1, [0, 1, 2], [1], said.append)
    assert not said
    for _ in range(2):
        first.look(120.0, [0, 1, 2], [1], said.append)
    assert said == [TEXT] and first.look_at == float("inf")


@pytest.mark.parametrize("starting", [[], [0, 1, 2]], ids=["nobody", "all"])
def test_of_one_moment_for_all_nothing_is_said_yet(starting):
    said = []
    first = FirstWorld(minimum=2, wait=600.0, began=0.0)
    first.look(25.0, [0, 1, 2], starting, said.append)
    assert not said and first.look_at == 25.0 + SECONDS_IN_SILENCE


def test_of_a_short_timeout_a_part_is_left():
    assert FirstWorld(minimum=1, wait=8.0, began=0.0).look_at == 2.0
