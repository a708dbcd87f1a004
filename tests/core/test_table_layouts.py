"""Who keeps which rows of a table, and that rows move to new keepers when ranks have come or gone."""

import itertools

import numpy as np
import pytest

from ringtrain._runtime.context import current
from ringtrain.embedding.dealing import Dealing
from ringtrain.embedding.layout import NOBODY, check_replicas, laid_out, lost, sources, words_for
from ringtrain.embedding.moves import Move, with_copies
from ringtrain.errors import InvalidArgumentError
from ringtrain.testing import World

HOSTS = [[[0]], [[0, 1]], [[0], [1]], [[0, 1, 2]], [[0, 2], [1, 3]], [[0, 1, 2], [3]], [[0, 1], [2, 3], [4]]]


@pytest.mark.parametrize("kind", ["modulo", "blocks"])
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("rows", [3, 17])
def test_each_row_is_kept_twice_and_elsewhere(rows, hosts, kind):
    ranks = sum(map(len, hosts))
    layout = laid_out(Dealing(rows, ranks, kind), hosts, 2)
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    keepers: dict[int, list[int]] = {}
    for rank in range(ranks):
        places = np.arange(layout.count(rank))
        ids = layout.ids(rank, places)
        assert layout.places(rank, ids).tolist() == places.tolist()
        owned = layout.dealing.count(rank)
        assert (layout.dealing.owners(ids[:owned]) == rank).all() and not (
            layout.dealing.owners(ids[owned:]) == rank
        ).any()
        for row in ids.tolist():
            keepers.setdefault(row, []).append(rank)
    assert sorted(keepers) == list(range(rows))
    for row, kept in keepers.items():
        assert len(kept) == min(2, ranks) and layout.dealing.owners(np.array(row)) in kept
        assert len({host_of[rank] for rank in kept}) == min(2, len(hosts)), (row, kept)


def test_equal_hosts_keep_equally_much():
    layout = laid_out(Dealing(24, 6), [[0, 1, 2], [3, 4, 5]], 2)
    assert {layout.count(rank) for rank in range(6)} == {8}


def test_what_is_lost_is_said_by_row():
    former = laid_out(Dealing(10, 4), [[0, 1], [2, 3]], 2)
    assert former.keepers == ((0, 2), (1, 3), (2, 1), (3, 0))
    assert [lost(former, {0, 1, 2, 3} - {gone}) for gone in range(4)] == [[]] * 4
    assert lost(former, {1, 3}) == [0] and lost(former, {2, 1}) == [3]
    assert words_for(former, [3]) == "rows 3 to 7 in steps of 4 (of former rank 3 and 0)"
    blocks = laid_out(Dealing(10, 4, "blocks"), [[0, 1], [2, 3]], 1)
    assert lost(blocks, {0, 2}) == [1, 3]
    assert words_for(blocks, [1, 3]) == "rows 3 to 5 (of former rank 1), rows 9 to 9 (of former rank 3)"
    assert lost(laid_out(Dealing(2, 4), [[0, 1, 2, 3]], 1), {0, 1}) == []  # ranks 2 and 3 had no rows


def test_a_keeper_takes_from_itself_else_from_the_first_who_is_left():
    former = laid_out(Dealing(10, 3), [[0, 1, 2]], 2)
    assert former.keepers == ((0, 1), (1, 2), (2, 0))
    assert sources(former, {1: 0, 2: 1}, 3).tolist() == [[0, 0, 0], [0, 1, 0], [1, 1, 1]]
    assert sources(former, {2: 0}, 1).tolist() == [[NOBODY], [0], [0]]


@pytest.mark.parametrize("replicas", [0, 3, "two"])
def test_other_numbers_of_copies_are_refused(replicas):
    with pytest.raises(InvalidArgumentError, match="replicas must be 1, or 2"):
        check_replicas(replicas)


@pytest.mark.parametrize("kind", ["modulo", "blocks"])
@pytest.mark.parametrize("stays, size", [([0, 2], 2), ([1, 0], 3), ([2], 1), ([0, 1, 2], 5)], ids=str)
def test_rows_move_as_they_are(stays, size, kind, monkeypatch):
    """Ranks of three that stay have other numbers, and others have joined; of lost rows everybody makes the same."""
    monkeypatch.setattr("ringtrain.embedding.moves._AT_ONCE", 7)
    rows, width = 23, 3
    former = laid_out(Dealing(rows, 3, kind), [[0, 1, 2]], 2)
    layout = laid_out(Dealing(rows, size, kind), [list(range(size))], 2)
    now = {was: rank for rank, was in enumerate(stays)}
    table = np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)
    before = [table[former.ids(was, np.arange(former.count(was)))] for was in range(3)]

    def on_rank(rank):
        was = stays[rank] if rank < len(stays) else None
        move = Move(former, layout, sources(former, now, size), was, current().rank)
        kept = np.full((layout.count(rank), width), np.nan, np.float32)
        gather = None if was is None else before[was].__getitem__
        move.carry(
            "rows", width, kept.dtype, gather, kept.__setitem__, lambda ids: np.repeat(-ids[:, None], width, axis=1)
        )
        return kept

    gone = np.isin(former.dealing.owners(np.arange(rows)), lost(former, now))
    expected = np.where(gone[:, None], -np.arange(rows)[:, None], table).astype(np.float32)
    assert gone.any() == (len(stays) == 1)
    with World(size) as world:
        for rank, kept in enumerate(world.run(on_rank)):
            assert np.array_equal(kept, expected[layout.ids(rank, np.arange(layout.count(rank)))])


@pytest.mark.parametrize("hosts", [[[0, 1, 2]], [[0, 1], [2]]], ids=str)
def test_sums_reach_all_keepers_of_a_row(hosts):
    kinds = [("modulo", 11, 2), ("blocks", 17, 3)]
    layouts = [laid_out(Dealing(rows, 3, kind), hosts, 2) for kind, rows, _ in kinds]
    drawn = np.random.default_rng(2)
    touched = [np.sort(drawn.choice(rows, 6, replace=False)) for _, rows, _ in kinds]
    values = [drawn.standard_normal((6, width)) for *_, width in kinds]

    def on_rank(rank):
        sums = []
        for layout, ids, rows in zip(layouts, touched, values, strict=True):
            mine = layout.dealing.owners(ids) == rank
            sums.append((layout.dealing.places(ids[mine]), rows[mine]))
        return with_copies(layouts, rank, sums, "copies")

    with World(3) as world:
        found = world.run(on_rank)
    for rank, table in itertools.product(range(3), range(2)):
        places, sums = found[rank][table]
        ids = layouts[table].ids(rank, places)
        kept = layouts[table].ids(rank, np.arange(layouts[table].count(rank)))
        assert sorted(ids.tolist()) == sorted(set(kept.tolist()) & set(touched[table].tolist()))
        assert places.tolist() == sorted(places.tolist())
        assert np.array_equal(sums, values[table][np.searchsorted(touched[table], ids)])
