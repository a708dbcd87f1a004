"""Tables of an elastic job in worlds of threads: what moves when ranks have come or gone. tests/faults has real deaths."""

import numpy as np
import pytest
import torch
from test_torch_embedding import OPTIMIZERS, ROWS, WIDTH

import ringtrain.torch as hvd
from ringtrain._bootstrap import membership
from ringtrain._runtime.context import current
from ringtrain.embedding.kept_rows import Origin, in_one_world, kept_here
from ringtrain.embedding.row_gradients import RowGradients
from ringtrain.errors import InvalidArgumentError, RowsLostError, UnsupportedError
from ringtrain.testing import World

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def elastic(monkeypatch):
    monkeypatch.setattr(membership, "_member", object())


def values_of(ids: np.ndarray, step: int) -> np.ndarray:
    return np.sin(ids[:, None] * 1.3 + np.arange(WIDTH) + step).astype(np.float32)


class Rank:
    """One that goes from world to world."""

    def __init__(self, kind: str = "adagrad", replicas: int = 2, dealing: str = "modulo", **storage: str):
        make, sparse = OPTIMIZERS[kind]
        self.table = hvd.ShardedEmbedding(
            ROWS, WIDTH, seed=4, name="words", sparse=sparse, replicas=replicas, dealing=dealing, **storage
        )
        self.optimizer = make(self.table.parameters())
        self.table.train_by(self.optimizer, RowGradients(self.bring_rows))

    def bring_rows(self) -> None:
        """A backward pass has brought gradients of rows."""

    def come_to(self, world: int) -> None:
        current().world = world
        self.table.take(kept_here(self.table))

    @property
    def ids(self) -> np.ndarray:
        kept = self.table.kept
        return kept.layout.ids(kept.rank, np.arange(kept.layout.count(kept.rank)))

    def learn(self, step: int, steps: bool = True) -> None:
        self.table.weight.grad = None
        self.table.add_gradient(np.arange(len(self.ids)), values_of(self.ids, step), finite=True)
        if steps:
            self.optimizer.step()

    def lines(self) -> dict[str, torch.Tensor]:
        state = self.optimizer.state[self.table.weight]
        by_row = {key: each for key, each in state.items() if isinstance(each, torch.Tensor) and each.dim()}
        return {key: (each.to_dense() if each.is_sparse else each)[:-1] for key, each in by_row.items()} | {
            "weight": self.table.weight.detach()[:-1]
        }


def alone(kind: str, steps: int) -> dict[str, torch.Tensor]:
    """The same by one rank, which keeps all."""

    def on_rank(rank):
        only = Rank(kind)
        only.come_to(1)
        for step in range(steps):
            only.learn(step)
        return only.lines()

    with World(1) as world:
        return world.run(on_rank)[0]


@pytest.mark.parametrize("dealing", ["modulo", "blocks"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rows_and_what_optimizers_keep_move(kind, dealing):
    """Of three ranks two are left, and another one joins; in between they learn. All have the bits of one rank."""

    def at_first(rank):
        made = Rank(kind, dealing=dealing)
        made.come_to(1)
        made.learn(0)
        return made

    with World(3) as world:
        ranks = world.run(at_first)
    ranks.pop(1)

    def go_on(rank, number):
        ranks[rank].come_to(number)
        ranks[rank].learn(number - 1)

    with World(2) as world:
        world.run(go_on, 2)

    def with_another(rank):
        each = ranks[rank] if rank < 2 else Rank(kind, dealing=dealing)
        each.come_to(3)
        each.learn(2)
        return each

    expected = alone(kind, 3)
    with World(3) as world:
        for each in world.run(with_another):
            assert each.lines().keys() == expected.keys() and len(each.ids) > ROWS // 3
            for key, lines in each.lines().items():
                assert torch.equal(lines, expected[key][each.ids]), key


@pytest.mark.parametrize("kind", ["adagrad", "adam"])
def test_a_gradient_that_no_step_has_used_moves(kind):
    def at_first(rank):
        made = Rank(kind)
        made.come_to(1)
        made.learn(0, steps=False)
        return made

    def go_on(rank):
        ranks[rank].come_to(2)
        ranks[rank].optimizer.step()
        return ranks[rank].lines()["weight"], ranks[rank].ids

    with World(3) as world:
        ranks = world.run(at_first)
    del ranks[0]
    expected = alone(kind, 1)["weight"]
    with World(2) as world:
        for weight, ids in world.run(go_on):
            assert torch.equal(weight, expected[ids])


def at_first_of(replicas):
    def at_first(rank):
        made = Rank(replicas=replicas)
        made.come_to(1)
        made.learn(0)
        return made

    return at_first


def test_lost_rows_are_said_and_come_from_elsewhere_if_that_is_wanted():
    with World(3) as world:
        ranks = world.run(at_first_of(1))
    gone = ranks.pop(1).ids.tolist()
    expected = alone("adagrad", 1)

    def go_on(rank):
        with pytest.raises(RowsLostError, match="rows 1 to 22 in steps of 3 .of former rank 1. are lost") as told:
            ranks[rank].come_to(2)
        before = ranks[rank].table.kept
        state = {"sum": lambda ids: np.full((len(ids), WIDTH), 3.0)}
        ranks[rank].table.begin_from(Origin(lambda ids: -values_of(ids, 9), state), lost_only=True)
        ranks[rank].come_to(2)
        assert before is not ranks[rank].table.kept and "replicas=2" in str(told.value)
        for place, row in enumerate(ranks[rank].ids.tolist()):
            here = {key: lines[place] for key, lines in ranks[rank].lines().items()}
            there = {key: lines[row] for key, lines in expected.items()}
            if row in gone:
                there = {
                    "weight": torch.from_numpy(-values_of(np.array([row]), 9)[0]),
                    "sum": torch.full((WIDTH,), 3.0),
                }
            assert all(torch.equal(here[key], there[key]) for key in there), row
        return str(told.value)

    with World(2) as world:
        assert len(set(world.run(go_on))) == 1


def test_rows_in_a_file_that_nobody_has_asked_for_begin_with_their_first_values(tmp_path):
    """At their second keeper above all, where a gradient is the first that comes for them."""

    def on_rank(rank):
        made = Rank("sgd", storage="file", path=str(tmp_path))
        made.come_to(1)
        made.learn(0)
        return made.lines()["weight"], made.ids

    expected = alone("sgd", 1)["weight"]
    with World(2) as world:
        for weight, ids in world.run(on_rank):
            assert torch.equal(weight, expected[ids])


def test_a_function_is_called_in_the_world_in_which_rows_are_dealt():
    with World(3) as world:
        ranks = world.run(at_first_of(2))

    def go_on(rank):
        current().world = 2
        return in_one_world([ranks[rank].table], lambda: (ranks[rank].table.kept.world, ranks[rank].table.rank))

    with World(2) as world:
        assert world.run(go_on) == [(2, 0), (2, 1)]


def test_what_cannot_be_is_refused():
    def on_rank(rank):
        table = hvd.ShardedEmbedding(ROWS, WIDTH, name="words")
        with pytest.raises(UnsupportedError, match="'words': in an elastic job a table must be used in the loop of"):
            table(torch.tensor([1]))
        with pytest.raises(RuntimeError, match="'words': weight must be the whole table in an elastic job"):
            table.load_state_dict(table.state_dict())
        assert len(table.rows()) == 0
        table.take(kept_here(table))
        with pytest.raises(InvalidArgumentError, match="'words': in an elastic job a table must be trained by a"):
            table(torch.tensor([1]))
        with torch.no_grad():
            assert table(torch.arange(ROWS)).shape == (ROWS, WIDTH)
        own = hvd.add_process_set([0])
        with pytest.raises(UnsupportedError, match="must be shared by all ranks, but has a process set"):
            hvd.ShardedEmbedding(ROWS, WIDTH, process_set=own)
        with pytest.raises(InvalidArgumentError, match="replicas must be 1, or 2"):
            hvd.ShardedEmbedding(ROWS, WIDTH, replicas=3)

    with World(1) as world:
        world.run(on_rank)


def test_a_plain_weight_is_what_rows_begin_with():
    plain = torch.nn.Embedding(ROWS, WIDTH)

    def on_rank(rank):
        made = Rank()
        made.table.load_state_dict(plain.state_dict())
        made.come_to(1)
        assert torch.equal(made.lines()["weight"], plain.weight[made.ids])

    with World(2) as world:
        world.run(on_rank)
