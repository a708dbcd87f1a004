"""What becomes of process sets from world to world; jobs whose ranks die are in tests/faults/test_elastic_sets.py.

Ranks are threads here, and a world follows another without a launcher: each rank keeps its ``Sets`` and its objects.
"""

import numpy as np
import pytest

import ringtrain as rt
import ringtrain.elastic
from ringtrain._bootstrap import membership
from ringtrain._runtime.context import Peer, current
from ringtrain.elastic.sets import KnownSets, SetRecord, Sets, loss, ranks_left, shared
from ringtrain.elastic.transaction import Part, Transaction
from ringtrain.elastic.worlds import can_go_on
from ringtrain.errors import InvalidArgumentError, ProcessSetLostError, WorldChangedError
from ringtrain.testing import World

A, B, C, D = (Peer(name * 32, "here", slot) for slot, name in enumerate("abcd"))
PAIR, OTHERS = SetRecord((1, 1), (A, B)), SetRecord((1, 2), (B, C))


def halves(size):
    return [range(0, size, 2), range(1, size, 2)]


class Rank:
    """One of a job, through its worlds."""

    def __init__(self, peer, rule=None):
        self.peer, self.sets, self.made, self.has_begun = peer, Sets(rule), {}, False

    def enter(self, number, peers, takes_over):
        context = current()
        context.world, context.peers, context.takes_over = number, tuple(peers), takes_over

    def add(self, name, ranks):
        self.made[name] = rt.add_process_set(ranks)

    def go_on(self):
        if not self.has_begun:
            self.sets.begin()
        self.has_begun = True
        if rt.allreduce(np.array([self.sets.are_known()]), op=rt.Max)[0]:
            self.sets.renew()
        current().takes_over = False


def in_world(number, ranks, function, joins=()):
    """Calls a function with each of these ranks, in a world of theirs."""

    def run(place):
        rank = ranks[place]
        rank.enter(number, [each.peer for each in ranks], rank.peer in joins)
        return function(rank)

    with World(len(ranks)) as world:
        return world.run(run)


def total(process_set):
    """The sum of 2 ** slot over the members; None on other ranks."""
    if not process_set.included():
        return None
    bit = np.array([1 << current().peers[rt.rank()].slot])
    return int(rt.allreduce(bit, op=rt.Sum, name="total", process_set=process_set)[0])


def found(name):
    """What is asked of a set on each rank."""

    def ask(rank):
        rank.go_on()
        each = rank.made[name]
        return each.process_set_id, each.ranks, total(each)

    return ask


def begin(ranks, sets, number=1):
    """The first world, in which the script has added sets before the loop."""

    def first(rank):
        for name, members in sets.items():
            rank.add(name, members)
        rank.go_on()

    in_world(number, ranks, first)


def test_what_all_have_alike_goes_on():
    """What one has added more than another is no set of all; where a script's beginning has added it, it is torn."""
    one = KnownSets(True, (PAIR, None), (OTHERS,), ((1, 3), (2, 4)))
    other = KnownSets(True, (PAIR, OTHERS), (), ((1, 3),))
    nobody = KnownSets(False, (None, None), (PAIR,), ())
    assert shared([one, other, nobody]) == KnownSets(True, (PAIR, SetRecord((0, 0), (B, C))), (), ((1, 3),))
    assert shared([nobody, one, one]) == one


def test_a_loss_names_the_set_and_who_is_gone():
    assert loss(SetRecord((1, 2), (A, C)), [C, A, D]) == ""
    assert ranks_left([A, C], [C, A, D]) == [0, 1]
    assert loss(SetRecord((1, 2), (A, B, C)), [C]) == (
        "process set 2: all of its members must live, but the one in slot 0 of host 'here' and the one in slot 1 of host "
        "'here' are gone. Add it again on all ranks, for those that are left; or have State(process_sets=...) make sets for "
        "each world."
    )


def test_a_set_goes_on_under_its_id_with_the_new_ranks_of_its_members():
    """Its rank 2 is rank 1 when rank 0 is gone; the set of the lost one keeps its id for nobody."""
    ranks = [Rank(peer) for peer in (A, B, C)]
    begin(ranks, {"lost": [0, 1], "lives": [1, 2]})
    for number in (2, 3):
        assert in_world(number, ranks[1:], found("lives")) == [(2, [0, 1], 6)] * 2

    def ask(rank):
        rank.go_on()
        with pytest.raises(WorldChangedError, match=r"^process set 1: .* slot 0 of host 'here' is gone") as caught:
            total(rank.made["lost"])
        with pytest.raises(WorldChangedError) as again:
            rt.allreduce(np.ones(1), process_set=rank.made["lost"])
        assert rt.allreduce(np.ones(1), op=rt.Sum).tolist() == [2.0]  # unnamed, and the world goes on
        return str(caught.value), str(again.value)

    words = in_world(4, ranks[1:], ask)
    assert len({*words[0], *words[1]}) == 1


def test_a_lost_set_is_added_again_for_those_that_are_left():
    ranks = [Rank(peer) for peer in (A, B, C)]
    begin(ranks, {"three": [0, 1, 2], "pair": [1, 2]})

    def again(rank):
        rank.go_on()
        three = rank.made["three"]
        assert three.lost and three.ranks == [0, 1]
        rt.add_process_set(three)
        return three.lost, three.process_set_id, total(three)

    assert in_world(2, ranks[1:], again) == [("", 3, 6)] * 2
    with pytest.raises(
        ProcessSetLostError, match="all of its members must live, but the one in slot 1 of host 'here' is"
    ):
        in_world(3, ranks[2:], found("three"))


def test_a_rank_that_joins_takes_the_sets_of_the_others_by_place():
    """It adds them without a word to the others, whatever their ranks; what was added in the loop it helps to register."""
    ranks = [Rank(peer, halves) for peer in (A, B, C)]
    begin(ranks, {"removed": [0, 1], "pair": [0, 2], "lost": [0, 1]})

    def change(rank):
        rank.go_on()
        rt.remove_process_set(rank.made["removed"])
        rank.add("later", [0, 2])

    in_world(2, ranks, lambda rank: rank.go_on())
    in_world(3, ranks, change)
    joining = Rank(D, halves)

    def ask(rank):
        if rank is joining:
            for name in ("removed", "pair", "lost"):
                rank.add(name, [0, 1, 2])
                assert rank.made[name].process_set_id is None
        rank.go_on()
        assert rank.made["removed"].process_set_id is None
        assert rank.made["lost"].lost == loss(SetRecord((1, 3), (A, B)), [A, C, D])
        later = total(rank.made["later"]) if "later" in rank.made else "not made here"
        ids = [each.process_set_id for each in rank.sets.of_rule]
        return rank.made["pair"].process_set_id, total(rank.made["pair"]), later, ids, [*map(total, rank.sets.of_rule)]

    told = in_world(4, [ranks[0], ranks[2], joining], ask, joins=(D,))
    assert told[0] == (2, 5, 5, told[0][3], [9, None])
    assert told[1] == (2, 5, 5, told[0][3], [None, 4])
    assert told[2] == (2, None, "not made here", told[0][3], [9, None])


def test_sets_of_a_rule_are_made_for_each_size_and_keep_their_ids():
    ranks = [Rank(peer, halves) for peer in (A, B, C)]
    begin(ranks, {"pair": [0, 1]})

    def ask(rank):
        rank.go_on()
        return [(each.process_set_id, each.ranks, total(each)) for each in rank.sets.of_rule]

    assert in_world(2, ranks, ask) == [[(2, [0, 2], 5), (3, [1], None)], [(2, [0, 2], None), (3, [1], 2)]] + [
        [(2, [0, 2], 5), (3, [1], None)]
    ]
    assert in_world(3, ranks[2:], ask) == [[(2, [0], 4), (None, [], None)]]
    assert in_world(4, ranks[1:], ask)[0] == [(2, [0], 2), (3, [1], None)]


def test_a_set_that_not_all_have_added_is_lost():
    """The world ended while it was added. Later ones have its id, on all ranks."""
    ranks = [Rank(peer) for peer in (A, B)]
    begin(ranks, {"pair": [0, 1]})

    def torn(rank):
        rank.go_on()
        rank.add("torn", [0, 1])
        if rank.peer == B:  # as if it had not heard of it
            current().sets.remove(rank.made.pop("torn"))

    in_world(2, ranks, torn)

    def ask(rank):
        rank.go_on()
        rank.add("new", [0, 1])
        if rank.peer == A:
            with pytest.raises(ProcessSetLostError, match="process set: all ranks must have added it"):
                total(rank.made["torn"])
        return total(rank.made["pair"]), rank.made["new"].process_set_id, total(rank.made["new"])

    assert in_world(3, ranks, ask) == [(3, 2, 3)] * 2


@pytest.mark.parametrize("rule", [[[0, 1]], lambda size: size, lambda size: [[0], 1]])
def test_what_is_no_rule_is_refused(rule):
    def make(rank):
        with pytest.raises(InvalidArgumentError, match="elastic.State: process_sets must .* example lambda size"):
            Sets(rule)

    with World(1) as world:
        world.run(make)


def test_sets_of_a_rule_are_there_in_a_job_of_a_fixed_size():
    def train(rank):
        state = rt.elastic.State(weights=np.ones(2), process_sets=halves)
        even, odd = state.process_sets
        return [int(state.survive(lambda: rt.allreduce(np.array([1 << rank]), op=rt.Sum, process_set=mine))[0])
                for _ in state.steps(1) for mine in (even if even.included() else odd,)]  # fmt: skip

    with World(3) as world:
        assert world.run(train) == [[5], [2], [5]]


def test_a_lost_set_is_what_survive_comes_to_on_all_ranks():
    """It is raised when all have come so far, also by those that have not asked for the set; the next window is in step."""

    class Member:
        wants_pause = balances = False
        begin_step = staticmethod(lambda: True)
        got_state = staticmethod(lambda: None)

    class Training:
        windows = 0
        enter_world = take_state = staticmethod(lambda: None)
        outline = staticmethod(dict)
        deal = staticmethod(lambda size, place: None)
        drawn = staticmethod(str)

        def finish_window(self, contributors):
            self.windows += 1

    def train(rank):
        training = Training()
        transaction = Transaction(Member(), training)
        transaction.enter()
        lost = rt.add_process_set([0])
        lost.process_set_id, lost.lost = None, "it is gone"
        if rank == 0:
            with pytest.raises(ProcessSetLostError, match="it is gone"):
                transaction.survive(lambda: rt.allreduce(np.ones(1), process_set=lost), Part.LAST)
        else:
            transaction.survive(lambda: 1, Part.LAST)
        total = transaction.survive(lambda: rt.allreduce(np.ones(1), op=rt.Sum, name="x").tolist(), Part.LAST)
        transaction.finish()
        return total, training.windows

    with World(2) as world:
        assert world.run(train) == [([2.0], 3)] * 2


def test_a_set_that_not_all_have_added_again_is_torn_for_whoever_joins_too():
    """So that all come to add it once more, where one asks whether it is lost."""
    ranks = [Rank(peer) for peer in (A, B, C)]
    begin(ranks, {"three": [0, 1, 2]})

    def torn(rank):
        rank.go_on()
        three = rank.made["three"]
        before = vars(three).copy()
        rt.add_process_set(three)
        if rank.peer == C:  # as if it had not heard of it
            current().sets.remove(three)
            vars(three).update(before)

    in_world(2, ranks[1:], torn)
    joining = Rank(D)

    def again(rank):
        if rank is joining:
            rank.add("three", [0])
        rank.go_on()
        three = rank.made["three"]
        with pytest.raises(ProcessSetLostError, match="process set: all ranks must have added it"):
            total(three)
        rt.add_process_set(three)
        return total(three)

    assert in_world(3, [*ranks[1:], joining], again, joins=(D,)) == [6, 6, None]


def test_another_state_goes_on_with_the_sets_of_the_one_before():
    """As where one run of the training follows another."""
    ranks = [Rank(peer) for peer in (A, B, C)]
    begin(ranks, {"pair": [1, 2]})

    def begin_again(rank):
        rank.go_on()
        rank.sets = Sets()
        rank.sets.begin()
        rank.go_on()

    in_world(2, ranks, begin_again)
    assert in_world(3, ranks[1:], found("pair")) == [(1, [0, 1], 6)] * 2


def test_a_lost_set_is_no_reason_for_another_world(monkeypatch):
    """There it would be as lost, and ``elastic.run`` would begin again for ever."""
    monkeypatch.setattr(membership, "current", object)
    assert can_go_on(WorldChangedError("a rank is gone")) and not can_go_on(ProcessSetLostError("a member is gone"))
