"""Tables in ``elastic.run``: all ranks go back to the rows of one commit, wherever in a commit a world was lost."""

import numpy as np
import pytest
import torch
from test_torch_embedding import OPTIMIZERS, ROWS, WIDTH, batch, loss_of

import ringtrain.torch as hvd
from ringtrain._bootstrap import membership
from ringtrain._runtime.context import current
from ringtrain.embedding import committed_rows
from ringtrain.errors import PeerLostError, RowsLostError, UnsupportedError
from ringtrain.testing import World

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def elastic(monkeypatch):
    monkeypatch.setattr(membership, "_member", object())


class Rank:
    """One that goes from world to world, as ``elastic.run`` takes it there."""

    def __init__(self, kind="adagrad", replicas=2, **storage):
        make, sparse = OPTIMIZERS[kind]
        self.table = hvd.ShardedEmbedding(
            ROWS, WIDTH, seed=4, name="words", sparse=sparse, replicas=replicas, **storage
        )
        self.optimizer = make(self.table.parameters())
        self.state = hvd.elastic.TorchState(model=self.table, optimizer=self.optimizer, step=0)

    def come_to(self, world, lost=True):
        """``lost``: after a failure; else ranks have come or left between two steps."""
        if lost:
            self.state.restore()
        current().world = world
        self.state.on_reset()
        self.state.sync()

    def learn(self, steps=1):
        for _ in range(steps):
            self.optimizer.zero_grad()
            ids = torch.cat([batch(rank, self.state.step, 6) for rank in range(hvd.rank(), 6, hvd.size())])
            loss_of(self.table(ids), 12).backward()
            self.optimizer.step()
            self.state.step += 1

    def whole(self):
        with torch.no_grad():
            return self.table(torch.arange(ROWS))

    def lines(self):
        """By row, all that this rank keeps."""
        state = self.optimizer.state[self.table.weight]
        by_row = {key: each for key, each in state.items() if isinstance(each, torch.Tensor) and each.dim()}
        lines = {key: (each.to_dense() if each.is_sparse else each)[:-1] for key, each in by_row.items()}
        lines["weight"] = self.table.weight.detach()[:-1]
        kept = self.table.kept
        ids = kept.layout.ids(kept.rank, np.arange(kept.layout.count(kept.rank)))
        return {
            (key, row): tuple(line)
            for key, each in lines.items()
            for row, line in zip(ids.tolist(), each.tolist(), strict=True)
        }


def begun(rank, kind, steps, **given):
    made = Rank(kind, **given)
    current().world = 1
    made.state.sync()
    made.learn(steps)
    return made


@pytest.mark.parametrize(
    "kind", [each if each == "adagrad" else pytest.param(each, marks=pytest.mark.long) for each in OPTIMIZERS]
)
@pytest.mark.parametrize("storage", ["memory", pytest.param("file", marks=pytest.mark.long)])
def test_what_was_learnt_behind_the_commit_is_forgotten(kind, storage, tmp_path):
    given = {"storage": storage, **({"path": str(tmp_path)} if storage == "file" else {})}

    def at_first(rank):
        made = begun(rank, kind, 2, **given)
        made.state.save()
        expected = made.whole(), made.lines()
        made.learn()
        assert not torch.equal(made.whole(), expected[0])
        return made, *expected

    with World(3) as world:
        told = world.run(at_first)
    lines = {key: line for _, _, own in told for key, line in own.items()}
    ranks, expected = [made for made, _, _ in (told[0], told[2])], told[0][1]

    def go_on(rank):
        ranks[rank].come_to(2)
        assert ranks[rank].state.step == 2 and torch.equal(ranks[rank].whole(), expected)
        own = ranks[rank].lines()
        assert own == {key: lines[key] for key in own} and len(own) > len(lines) / 3
        ranks[rank].learn()
        return ranks[rank].whole(), ranks[rank].lines()

    with World(2) as world:
        one, other = world.run(go_on)
    assert torch.equal(one[0], other[0]) and all(
        one[1][key] == other[1][key] for key in one[1].keys() & other[1].keys()
    )

    def planned(rank):
        """Two ranks that learn the third step from what three have learnt."""
        made = begun(rank, kind, 0)
        made.table.load_state_dict({"weight": expected})
        made.whole()
        state = made.optimizer.state[made.table.weight]
        kept = made.table.kept
        for place, row in enumerate(kept.layout.ids(kept.rank, np.arange(kept.layout.count(kept.rank))).tolist()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    value[place] = torch.tensor(lines[key, row])
        made.state.step = 2
        made.learn()
        return made.whole()

    if kind in ("sgd", "adagrad"):  # others make what they keep in their first step
        with World(2) as world:
            assert torch.equal(world.run(planned)[0], one[0])


@pytest.mark.parametrize("fails, steps", [("first hears", 2), ("others hear", 1)])
def test_a_commit_that_some_have_made_is_that_of_rank_0(fails, steps, monkeypatch):
    """A world is lost within the commit behind the second step; in both cases a rank has another commit last than rank 0."""
    kept = committed_rows.allreduce

    def at_first(rank):
        made = begun(rank, "adagrad", 1)
        made.state.save()
        expected = {1: made.whole()}
        made.learn()
        expected[2] = made.whole()

        def lost(tensor, op, name):
            """Rank 0 has its commit and the others do not yet know that all have copied; or the other way round."""
            if name == committed_rows._COMMITTED:
                raise PeerLostError("planted")
            kept(tensor, op=op, name=name)
            if (current().rank == 0) == (fails == "others hear"):
                raise PeerLostError("planted")

        world_of[rank] = lost
        with pytest.raises(PeerLostError):
            made.state.save()
        world_of[rank] = kept
        return made, expected

    world_of = dict.fromkeys(range(3), kept)
    monkeypatch.setattr(committed_rows, "allreduce", lambda *given, **named: world_of[current().rank](*given, **named))
    with World(3) as world:
        told = world.run(at_first)
    ranks = [told[0][0], told[2][0]]

    def go_on(rank):
        ranks[rank].come_to(2)
        assert ranks[rank].state.step == steps
        return ranks[rank].whole()

    with World(2) as world:
        for found in world.run(go_on):
            assert torch.equal(found, told[0][1][steps])


def test_ranks_that_come_between_two_steps_take_the_rows_as_they_are():
    def at_first(rank):
        made = begun(rank, "adagrad", 1)
        made.state.save()
        made.learn()
        return made, made.whole()

    with World(2) as world:
        told = world.run(at_first)

    def with_another(rank):
        made = told[rank][0] if rank < 2 else Rank()
        if rank == 2:
            current().world = 2
            made.state.sync()
        else:
            made.come_to(2, lost=False)
        assert made.state.step == 2 and torch.equal(made.whole(), told[0][1])
        made.learn()
        return made

    with World(3) as world:
        ranks = world.run(with_another)

    def go_on(rank):
        ranks[rank].come_to(3)
        assert ranks[rank].state.step == 2 and torch.equal(ranks[rank].whole(), told[0][1])

    del ranks[0]
    with World(2) as world:
        world.run(go_on)


def test_a_world_that_is_lost_before_any_commit_or_use_begins_anew():
    def at_first(rank):
        made = begun(rank, "adagrad", 0)
        made.learn(2)
        return made

    with World(2) as world:
        ranks = world.run(at_first)

    def go_on(rank):
        ranks[rank].come_to(2)
        assert ranks[rank].state.step == 0
        return ranks[rank].whole()

    def fresh(rank):
        return begun(rank, "adagrad", 0).whole()

    with World(1) as world:
        found, expected = world.run(go_on)[0], world.run(fresh)[0]
    assert torch.equal(found, expected)


def test_rows_of_one_copy_are_lost_with_their_rank():
    def at_first(rank):
        made = begun(rank, "adagrad", 1, replicas=1)
        made.state.save()
        return made

    with World(3) as world:
        ranks = world.run(at_first)
    del ranks[1]

    def go_on(rank):
        ranks[rank].come_to(2)
        with pytest.raises(RowsLostError, match="rows 1 to 22 in steps of 3 .of former rank 1. are lost") as told:
            ranks[rank].whole()
        return str(told.value)

    with World(2) as world:
        assert len(set(world.run(go_on))) == 1


def test_a_table_outside_of_the_run_is_refused():
    def on_rank(rank):
        made = Rank()
        with pytest.raises(UnsupportedError, match="'words': .* or in elastic.run with a TorchState of its model"):
            made.whole()

    with World(1) as world:
        world.run(on_rank)
