"""Tables that change themselves, in worlds of threads of an elastic job: what moves when ranks have come or gone.

tests/faults/test_elastic_keras_tables.py has real deaths, with Keras; tests/with_torch/test_torch_elastic_tables.py has torch's.
"""

import numpy as np
import pytest

from ringtrain._bootstrap import membership
from ringtrain._runtime.context import current
from ringtrain._runtime.operations import Average, Sum
from ringtrain._runtime.process_sets import add_process_set
from ringtrain.elastic import TransparentState
from ringtrain.embedding import row_rules
from ringtrain.embedding.kept_rows import copied, in_one_world, kept_here
from ringtrain.embedding.table import SelfUpdatingTable, norms, with_rows
from ringtrain.errors import InvalidArgumentError, RowsLostError, UnsupportedError
from ringtrain.testing import World

ROWS, WIDTH = 23, 4
RULES = {
    "sgd": lambda: row_rules.SGD(lr=0.5),
    "momentum": lambda: row_rules.SGD(lr=0.1, momentum=0.5),
    "adagrad": lambda: row_rules.Adagrad(lr=0.1, initial_accumulator_value=0.1),
    "rowwise": lambda: row_rules.RowWiseAdagrad(lr=0.1),
    "adam": lambda: row_rules.SparseAdam(lr=0.05),
}


@pytest.fixture(autouse=True)
def elastic(monkeypatch):
    monkeypatch.setattr(membership, "_member", object())


def values_of(ids, step):
    return np.sin(ids[:, None] * 1.3 + np.arange(WIDTH) + step).astype(np.float32)


class Rank:
    """One that goes from world to world."""

    def __init__(self, kind="adagrad", replicas=2, dealing="modulo", **storage):
        self.table = SelfUpdatingTable(
            "words", ROWS, WIDTH, RULES[kind](), 4, replicas=replicas, dealing=dealing, **storage
        )

    def come_to(self, world):
        current().world = world
        self.table.take(kept_here(self.table))

    @property
    def ids(self):
        kept = self.table.kept
        return kept.layout.ids(kept.rank, np.arange(kept.layout.count(kept.rank)))

    def bring(self, step, finite=True):
        """All rows but each third one get a gradient."""
        places = np.flatnonzero(self.ids % 3 > 0)
        self.table.add_gradient(places, values_of(self.ids[places], step), finite)

    def learn(self, step):
        self.bring(step)
        self.table.accept()
        self.table.change()

    def lines(self):
        return {
            key: each.gather(np.arange(len(self.ids)))
            for key, each in {"weight": self.table._rows, **self.table._state}.items()
        }


def alone(kind, steps):
    """The same by one rank, which keeps all."""

    def on_rank(rank):
        only = Rank(kind)
        only.come_to(1)
        for step in range(steps):
            only.learn(step)
        return only.lines()

    with World(1) as world:
        return world.run(on_rank)[0]


def three(kind="adagrad", learns=True, **how):
    def on_rank(rank):
        made = Rank(kind, **how)
        made.come_to(1)
        if learns:
            made.learn(0)
        return made

    with World(3) as world:
        return world.run(on_rank)


def assert_same(rank, expected):
    assert rank.lines().keys() == expected.keys()
    for key, lines in rank.lines().items():
        np.testing.assert_array_equal(lines, expected[key][rank.ids], err_msg=key)


@pytest.mark.parametrize("storage", ["memory", "file"])
@pytest.mark.parametrize("dealing", ["modulo", "blocks"])
@pytest.mark.parametrize("kind", RULES)
def test_rows_and_what_a_rule_keeps_move(kind, dealing, storage, tmp_path):
    """Of three ranks two are left, and another one joins; in between they learn. All have the bits of one rank."""
    how = {"dealing": dealing, "storage": storage, "path": tmp_path}
    ranks = three(kind, **how)
    ranks.pop(1)

    def go_on(rank):
        ranks[rank].come_to(2)
        ranks[rank].learn(1)

    with World(2) as world:
        world.run(go_on)

    def with_another(rank):
        each = ranks[rank] if rank < 2 else Rank(kind, **how)
        each.come_to(3)
        each.learn(2)
        return each

    expected = alone(kind, 3)
    with World(3) as world:
        for each in world.run(with_another):
            assert len(each.ids) > ROWS // 3 and each.table.step == 3
            assert_same(each, expected)


@pytest.mark.parametrize("accepted", [False, True])
def test_gradients_that_no_update_has_used_move(accepted):
    """Also to a rank that joins; and whether they are finite."""
    ranks = three(learns=False)
    for each in ranks:
        each.bring(0)
        if accepted:
            each.table.accept()
    del ranks[0]
    expected = alone("adagrad", 1)

    def go_on(rank):
        each = ranks[rank] if rank < 2 else Rank()
        each.come_to(2)
        found = norms([each.table])[0]
        if not accepted:
            each.table.accept()
        each.table.change()
        assert_same(each, expected)
        each.bring(1, finite=False)
        return each, found

    with World(3) as world:
        ended = world.run(go_on)
    every = np.flatnonzero(np.arange(ROWS) % 3 > 0)
    whole = np.sqrt(np.square(values_of(every, 0), dtype=np.float64).sum())
    np.testing.assert_allclose([found for _, found in ended], whole if accepted else 0.0, rtol=1e-6)
    ranks[:] = [each for each, _ in ended[1:]]

    def skip(rank):
        ranks[rank].come_to(3)
        ranks[rank].table.accept()
        ranks[rank].table.change()
        assert_same(ranks[rank], expected)

    with World(2) as world:
        world.run(skip)


def test_lost_rows_are_said_and_come_from_a_folder_that_was_named(tmp_path, caplog):
    """One of the two that are left knows it not, as one that has joined."""
    ranks = three(replicas=1)
    expected = alone("adagrad", 1)

    def save(rank):
        current().world = 1
        ranks[rank].table.save(tmp_path)
        ranks[rank].learn(1)

    with World(3) as world:
        world.run(save)
    gone = set(ranks.pop(1).ids.tolist())

    def go_on(rank):
        with pytest.raises(RowsLostError, match="rows 1 to 22 in steps of 3 .of former rank 1. are lost") as told:
            ranks[rank].come_to(2)
        assert "load_table with lost_only=True; replicas=2" in str(told.value)
        if rank == 1:
            ranks[rank].table.load(tmp_path, lost_only=True)
        ranks[rank].come_to(2)
        return str(told.value)

    later = alone("adagrad", 2)
    with World(2) as world:
        assert len(set(world.run(go_on))) == 1
    for each in ranks:
        for place, row in enumerate(each.ids.tolist()):
            for key, lines in each.lines().items():
                np.testing.assert_array_equal(lines[place], (expected if row in gone else later)[key][row])
    assert caplog.text.count("begin again with what was saved in") == 1 and "rows 1 to 22" in caplog.text


def test_a_folder_that_is_gone_is_said_on_all_ranks(tmp_path):
    ranks = three(replicas=1)

    def save(rank):
        current().world = 1
        ranks[rank].table.save(tmp_path)
        ranks[rank].table.load(tmp_path, lost_only=True)

    with World(3) as world:
        world.run(save)
    ranks.pop(1)
    for each in tmp_path.iterdir():
        each.unlink()

    def go_on(rank):
        with pytest.raises(InvalidArgumentError, match="^rank 0: embedding 'words'"):
            ranks[rank].come_to(2)

    with World(2) as world:
        world.run(go_on)


def test_all_rows_begin_with_what_was_saved(tmp_path):
    """By three ranks; one that joins takes what the others have learnt since."""
    ranks = three(dealing="blocks")

    def save(rank):
        current().world = 1
        ranks[rank].table.save(tmp_path)

    with World(3) as world:
        world.run(save)

    def begin(rank):
        each = Rank()
        each.table.load(tmp_path)
        each.come_to(1)
        assert each.table.step == 1
        each.learn(1)
        return each

    with World(2) as world:
        begun = world.run(begin)

    def go_on(rank):
        each = begun[rank] if rank < 2 else Rank()
        if rank == 2:
            each.table.load(tmp_path)
        each.come_to(2)
        assert_same(each, expected)

    expected = alone("adagrad", 2)
    with World(3) as world:
        world.run(go_on)


def test_what_was_copied_is_gone_back_to_however_often():
    ranks = three()
    expected = alone("adagrad", 1)

    def on_rank(rank):
        current().world = 1
        go_back = copied(ranks[rank].table)
        for step in (1, 2):
            ranks[rank].learn(step)
            ranks[rank].bring(3)
            go_back()
            assert_same(ranks[rank], expected)
            assert ranks[rank].table._came.passes == 0 and ranks[rank].table.step == 1

    with World(3) as world:
        world.run(on_rank)


@pytest.mark.parametrize("op", [Average, Sum])
def test_gradients_travel_with_those_of_the_rest(op, monkeypatch):
    """To both keepers; with the bits that a job has which is not elastic. Until then no update uses any."""
    ids = [np.array([1, 5, 5, 12]), np.array([5, 0]), np.zeros(0, np.int64)]

    def on_rank(rank):
        table = SelfUpdatingTable("words", ROWS, WIDTH, RULES["adagrad"](), 4, op=op, replicas=2)
        if table.is_elastic:
            current().world = 1
            table.take(kept_here(table))
        rows, _, trip = table.look_up(ids[rank])
        own = values_of(np.arange(len(rows)), rank)
        assert table.bring(trip, own) == 0
        if table.is_elastic:
            with pytest.raises(UnsupportedError, match="gradients of rows must travel with those of the rest"):
                table.accept()
            variable = type("Anchor", (), {"sharded_table": table})
            state = TransparentState.__new__(TransparentState)
            monkeypatch.setattr(TransparentState, "survive", lambda self, function: function())
            monkeypatch.setattr(TransparentState, "share", lambda self, op: None)
            assert with_rows(state, [object(), variable], op, lambda: "the rest") == "the rest"
        table.accept()
        table.change()
        places = np.arange(table.owned if table.kept is None else table.kept.layout.count(rank))
        numbers = (table.dealing if table.kept is None else table.kept.layout).ids(rank, places)
        return dict(zip(numbers.tolist(), table._rows.gather(places), strict=True))

    with World(3) as world:
        found = world.run(on_rank)
    monkeypatch.setattr(membership, "_member", None)
    with World(3) as world:
        expected = {row: line for each in world.run(on_rank) for row, line in each.items()}
    assert sum(map(len, found)) == 2 * ROWS
    for each in found:
        for row, line in each.items():
            np.testing.assert_array_equal(line, expected[row], err_msg=str(row))


def test_gradients_that_are_not_finite_change_no_row_anywhere(monkeypatch):
    def on_rank(rank):
        each = Rank()
        each.come_to(1)
        _, _, trip = each.table.look_up(np.array([rank]))
        told = each.table.bring(trip, np.full((1, WIDTH), np.nan if rank == 1 else 1.0))
        each.table.gradients.reduce("round", None, gives_up=False)
        each.table.gradients.release()
        before = each.lines()
        each.table.accept()
        each.table.change()
        for key, lines in each.lines().items():
            np.testing.assert_array_equal(lines, before[key])
        return float(told)

    with World(2) as world:
        assert world.run(on_rank) == [0.0, np.inf]


def test_what_cannot_be_is_refused(tmp_path):
    def on_rank(rank):
        table = SelfUpdatingTable("words", ROWS, WIDTH, "sgd")
        for use in (lambda: table.look_up(np.array([1])), lambda: table.save(tmp_path)):
            with pytest.raises(UnsupportedError, match="'words': in an elastic job a table must be used in fit with"):
                use()
        assert len(table.rows()) == 0
        with pytest.raises(InvalidArgumentError, match="must hold the table, but nothing"):
            table.load(tmp_path, lost_only=True)
        with pytest.raises(UnsupportedError, match="must be shared by all ranks, but has a process set"):
            SelfUpdatingTable("other", ROWS, WIDTH, "sgd", process_set=add_process_set([0]))
        with pytest.raises(InvalidArgumentError, match="replicas must be 1, or 2"):
            SelfUpdatingTable("other", ROWS, WIDTH, "sgd", replicas=3)

    with World(1) as world:
        world.run(on_rank)


def test_a_function_is_called_in_the_world_in_which_rows_are_dealt():
    ranks = three()

    def go_on(rank):
        current().world = 2
        return in_one_world([ranks[rank].table], lambda: (ranks[rank].table.kept.world, ranks[rank].table.rank))

    with World(2) as world:
        assert world.run(go_on) == [(2, 0), (2, 1)]
