"""What is decided about gradients for all frameworks alike: groups, codes, rounds. No framework here, nor a world but for
the agreement itself."""

import pytest

import ringtrain as rt
from ringtrain._runtime.context import current
from ringtrain._training import differences, grouping, optimizer_arguments, residuals, rounds
from ringtrain._training.agreement import Agreement
from ringtrain._training.bucket_plan import STEADY_STEPS, SteadySteps, assigned
from ringtrain._training.presence import (
    DENSE,
    FROZEN,
    MISSING,
    SETTLED,
    SPARSE_32,
    SPARSE_64,
    after_round,
    is_there,
    nobodys,
    parted,
    zeros_needed,
)
from ringtrain._training.rounds import Rounds, Said, Stage
from ringtrain._training.session import NewWorld, Session
from ringtrain.errors import InvalidArgumentError, MismatchError, TimeoutError
from ringtrain.testing import World


@pytest.fixture
def two():
    with World(2, stall_abort_seconds=20) as opened:
        yield opened


# ---- groups ----


@pytest.mark.parametrize("groups, expected", [
    (None, [[0], [1], [2], [3]]),
    (1, [[0, 1, 2, 3]]),
    (3, [[0], [1], [2, 3]]),
    (9, [[0], [1], [2], [3]]),
    ("ca", [[0, 2], [1], [3]]),
    ("ca d", [[0, 2], [3], [1]]),
    ("cx x", [[2], [0], [1], [3]]),
])  # fmt: skip
def test_what_travels_together(groups, expected):
    members = {name: [name] for name in "abcdx"}  # lists have no hash, as Keras' variables have none
    if isinstance(groups, str):
        groups = [[members[name] for name in group] for group in groups.split()]
    assert grouping.grouped([members[name] for name in "abcd"], groups) == expected


@pytest.mark.parametrize("groups", [None, 2, [[1]]])
def test_groups_of_nothing(groups):
    assert grouping.grouped([], groups) == []


def test_the_older_name_of_groups():
    with pytest.warns(DeprecationWarning, match="num_groups has become groups") as warned:
        assert optimizer_arguments.given_groups("x", 2, None, "variable", stacklevel=1) == 2
        assert optimizer_arguments.given_groups("x", 2, [["a"], []], "variable", stacklevel=1) == [["a"]]
    assert {each.filename for each in warned} == {__file__}


@pytest.mark.parametrize("groups, text", [
    (0, "at least 1, but is 0"),
    (True, "an int or lists of variables, but is True"),
    (["ab"], "an int or lists of variables"),
    ([["a"], [], ["b", "a"]], "hold each variable once, but group 2 holds one twice"),
])  # fmt: skip
def test_groups_that_cannot_be(groups, text):
    with pytest.raises(InvalidArgumentError, match=f"^Owner: groups must {text}|^Owner: groups must be {text}"):
        optimizer_arguments.given_groups("Owner", 0, groups, "variable", stacklevel=1)


# ---- what there is ----


def test_the_rule_for_missing_gradients():
    """Zeros where another rank has one, None where nobody has, nothing for what is reduced already."""
    own = [MISSING, MISSING, MISSING, DENSE, SPARSE_32, SETTLED]
    agreed = [DENSE, MISSING, SPARSE_64, DENSE, DENSE, SETTLED]
    assert zeros_needed(own, agreed) == [0, 2] and nobodys(agreed) == [1, 5]
    assert [is_there(code) for code in (SETTLED, MISSING, SPARSE_32, SPARSE_64, DENSE)] == [0, 0, 1, 1, 1]
    assert list(after_round(own, agreed, is_last=False)) == [SETTLED, MISSING, SETTLED, SETTLED, SETTLED, SETTLED]
    assert list(after_round(own, agreed, is_last=True)) == [SETTLED] * 6


def test_what_is_frozen_is_told_in_the_first_round_of_a_step():
    """Beside whatever lies in its gradient, as zeros of a step before may."""
    assert parted(bytes([DENSE, MISSING])) == (bytes([DENSE, MISSING]), b"")
    own = bytes([DENSE, FROZEN | MISSING, FROZEN | DENSE])
    assert parted(own) == (bytes([DENSE, MISSING, DENSE]), bytes([0, 1, 1]))
    assert parted(bytes([DENSE, FROZEN, SETTLED])) == (bytes([DENSE, SETTLED, SETTLED]), None)


def test_an_agreement_fills_what_others_have(two):
    def body(rank):
        own = bytes([DENSE, MISSING, MISSING] if rank == 0 else [DENSE, SPARSE_64, MISSING])
        agreement = Agreement(current(), 0, "used", own, "Do more.")
        return agreement.complete(["a", None if rank == 0 else "b", None], own, lambda place, code: (place, code))

    assert two.run(body) == [["a", (1, SPARSE_64), None], ["a", "b", None]]


def test_ranks_with_different_numbers_of_gradients(two):
    def body(rank):
        agreement = Agreement(current(), 0, "used", bytes(2 + rank), "Do more.")
        with pytest.raises(MismatchError, match="allreduce 'used': shape must be the same on all ranks"):
            agreement.agreed()

    two.run(body)


def test_who_is_given_up_is_told_with_advice():
    def body(rank):
        if rank == 0:
            with pytest.raises(TimeoutError, match=r"given up after .* Do more\.$"):
                Agreement(current(), 0, "used", b"1", "Do more.").agreed()

    with World(2, stall_warning_seconds=0.5, stall_abort_seconds=1) as world:
        world.run(body)


# ---- rounds ----


def maximum(*contents):
    return bytes(map(max, zip(*contents, strict=True)))


@pytest.mark.parametrize("steps, equal", [
    ((0, 0), True), ((7, 7), True), ((None, 3), True), ((None, None), True), ((255, 255), True),
    ((0, 1), False), ((1, 0), False), ((254, 255), False), ((3, None, 4), False),
])  # fmt: skip
def test_steps_are_compared_by_maxima(steps, equal):
    said = Said(bytes([DENSE, MISSING]), False)
    assert rounds.are_equal("steps", maximum(*(rounds.encoded(said, each) for each in steps))) is equal


def test_what_is_said_is_what_any_rank_says():
    agreed = maximum(
        rounds.encoded(Said(bytes([DENSE, MISSING]), False), 1),
        rounds.encoded(Said(bytes([MISSING, SPARSE_64]), True, True), 1),
    )
    said = rounds.decoded(agreed)
    assert said == Said(bytes([DENSE, SPARSE_64]), True, True)
    assert not said.is_last(Stage.CLOSING) and Said(b"", False).is_last(Stage.DISCARDING)
    assert not Said(b"", False).is_last(Stage.PASS_ENDED)


def test_the_error_names_counts_and_ranks():
    text = differences.unequal_steps("optimizer.0", [(2, 1), (0, 1), (1, 0), (3, -1)])
    assert "but is 1 on ranks 0, 2 and 0 on rank 1. " in text and text.startswith("step 'optimizer.0': ")


@pytest.mark.parametrize("other, equal", [(b'{"delay": 0}', True), (b'{"delay": 1}', False), (b"{}", False)])
def test_other_terms_show_in_the_maximum(other, equal):
    own = [rounds.encoded(Said(b"", False), 0, terms) for terms in (b'{"delay": 0}', other)]
    assert rounds.are_equal("terms", maximum(*own)) is equal


def test_the_error_of_terms_names_the_first_that_differs():
    theirs = [{"a": 1, "delay": delay} for delay in (0, 1, 0)]
    text = differences.unequal_terms("optimizer.0", list(enumerate(theirs)))
    assert text.startswith(
        "step 'optimizer.0': delay must be the same on all ranks, but is 0 on ranks 0, 2 and 1 on rank 1."
    )


def test_a_round_that_finds_unequal_steps(two):
    def body(rank):
        own = Rounds(Session(rt.global_process_set), "optimizer.0.used")

        def hold(stage):
            own.announce(bytes([MISSING]), stage)
            for generator in (own.answer(), own.require_equal()):
                for operation in generator:
                    operation.wait()
            own.succeed()

        hold(Stage.CLOSING)
        own.note_step()
        if rank == 1:
            own.note_step()
        with pytest.raises(MismatchError, match=r"but is 1 on rank 0 and 2 on rank 1\."):
            hold(Stage.CLOSING)

    two.run(body)


# ---- steps that are alike ----


def kinds_of(steps):
    """At which steps kinds became new, and which, when each step of ``steps`` is one round."""
    steady, found = SteadySteps(), []
    steady.begin(2)
    for number, agreed in enumerate(steps):
        steady.note(bytes(agreed), closes=True)
        if steady.have_new_kinds():
            found.append((number, list(steady.kinds)))
    return found


def test_three_steps_alike_make_a_plan():
    both, one = [DENSE, DENSE], [DENSE, MISSING]
    assert kinds_of([both] * 6) == [(2, both)]
    assert kinds_of([both, one] * 4) == []
    assert kinds_of([both] * 3 + [one] * 4) == [(2, both), (5, [DENSE, 0])]


def test_rounds_of_one_step_are_noted_together():
    steady = SteadySteps()
    steady.begin(2)
    for _ in range(STEADY_STEPS):
        steady.note(bytes([DENSE, MISSING]), closes=False)
        steady.note(bytes([SETTLED, DENSE]), closes=True)
    assert steady.have_new_kinds() and list(steady.kinds) == [DENSE, DENSE] and not steady.have_new_kinds()


def test_buckets_are_assigned_by_kind_and_size():
    sizes, kinds = [4, 4, 9, 4, 4, 4, 1, 1], "aaaabb" + "ac"
    groups = [[0], [1], [2], [3], [4], [5], [6, 7]]
    assert assigned(groups, kinds.__getitem__, sizes.__getitem__, 8) == [
        ([6, 7], 6, False), ([5, 4], None, True), ([2], 2, False), ([3, 1], None, True), ([0], 0, False),
    ]  # fmt: skip


# ---- another world ----


def test_a_session_asks_for_the_world_of_the_moment():
    with World(1) as first:
        session = first.run(lambda rank: Session(rt.global_process_set))[0]
        assert session.context is first.contexts[0] and not session.follow()
    assert not session.follow() and not session.context.usable  # there is none
    with World(1) as second:
        assert second.run(lambda rank: (session.follow(), session.follow())) == [(True, False)]
        assert session.context is second.contexts[0]


class Told:
    def __init__(self, session, name, heard):
        self.name, self.heard = name, heard
        session.on_new_world(self.hear)

    def hear(self, change):
        self.heard.append((self.name, change))


def test_all_who_have_registered_hear_of_a_world_in_their_order_whoever_has_asked():
    with World(1) as first:
        session = first.run(lambda rank: Session(rt.global_process_set))[0]
    heard = []
    kept = [Told(session, name, heard) for name in "abc"]
    del kept[1]  # it is not kept alive
    with World(1) as second:
        second.run(lambda rank: residuals.settle(session, "optimizer.0.", used=True))  # it notices, and nobody else
        assert heard == [("a", NewWorld.ANEW), ("c", NewWorld.ANEW)]
        second.run(lambda rank: session.follow())
        second.run(lambda rank: session.follow(NewWorld.GOES_ON))
        assert len(heard) == 2
        second.run(lambda rank: session.follow(NewWorld.NUMBERED))  # in the same world
        assert heard[2:] == [("a", NewWorld.NUMBERED), ("c", NewWorld.NUMBERED)]
