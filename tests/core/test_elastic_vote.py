"""Nine bytes of each rank, of which all get the maximum: what they wish for, and whether all have drawn the same."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ringtrain.elastic.vote import Wish, outcome, row

DRAWN = st.sampled_from(["nothing", "16 of 64", "8 of 64", "16 of 32"])


def heard(votes):
    """What an allreduce gives all ranks."""
    return np.max([np.frombuffer(row(*each), np.uint8) for each in votes], axis=0).tobytes()


@given(st.lists(st.tuples(st.sampled_from(Wish), DRAWN), min_size=1, max_size=5))
@example([(Wish.PAUSE, "nothing"), (Wish.STOP, "nothing")])
@example([(Wish.NOTHING, "16 of 64"), (Wish.NOTHING, "8 of 64")])
def test_all_hear_the_greatest_wish_and_whether_they_have_drawn_alike(votes):
    wishes, drawn = zip(*votes, strict=True)
    assert outcome(heard(votes)) == (max(wishes), len(set(drawn)) == 1)


def test_a_vote_has_nine_bytes():
    assert {len(row(wish, "")) for wish in Wish} == {9}
