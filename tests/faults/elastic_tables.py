"""A rank of an elastic job of test_elastic_tables.py, which learns rows of a table: KIND says by what, FAULTS who dies where.

The planned run learns the same in threads of the test, by ``Learner`` too.
"""

import hashlib
import os
from functools import partial

import numpy as np
import torch

import ringtrain as rt
import ringtrain.torch as hvd

ROWS, WIDTH, BATCH, SAMPLES, EPOCHS = 23, 4, 4, 60, 2
COMMITS = 9  # steps under elastic.run, each committed
REPLICAS = int(os.environ.get("REPLICAS", "2"))


class Data(torch.utils.data.Dataset):
    """Samples with six ids each, also the same twice."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        return index, torch.randint(ROWS, (6,), generator=drawn), torch.randn(1, generator=drawn)


class _Sum(torch.nn.Module):
    """Of the rows of a sample. A bag's gradient is added in an order that depends on where rows lie, and so on the world."""

    def forward(self, rows):
        return rows.sum(1)


class Learner:
    """A model with a table, and what trains it.

    Args:
        kind: "adagrad", "momentum", "adam" (dense gradients), "two" (an optimizer for the rows alone), "clipped".
    """

    def __init__(self, kind: str, dealing: str = "modulo", storage: dict | None = None):
        self.table = hvd.ShardedEmbedding(
            ROWS, WIDTH, seed=3, replicas=REPLICAS, dealing=dealing, sparse=kind != "adam", name="words",
            **(storage or {}),
        )  # fmt: skip
        self.dense = torch.nn.Linear(WIDTH, 1)
        for number, parameter in enumerate(self.dense.parameters()):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
        self.model = torch.nn.Sequential(self.table, _Sum(), self.dense)
        make = {
            "adagrad": lambda given: torch.optim.Adagrad(given, lr=0.1),
            "adam": lambda given: torch.optim.Adam(given, lr=0.05),
        }.get(kind, lambda given: torch.optim.SGD(given, lr=0.001, momentum=0.5))
        self.rows = None
        if kind == "two":
            self.rows = hvd.DistributedOptimizer(torch.optim.SparseAdam(self.table.parameters(), lr=0.05))
        given = self.dense.named_parameters() if kind == "two" else self.model.named_parameters()
        named = list(given)
        self.optimizer = hvd.DistributedOptimizer(make([each for _, each in named]), named)
        self.optimizers = [self.optimizer] if self.rows is None else [self.optimizer, self.rows]
        self.clips = kind == "clipped"

    def train_on(self, ids, y, strike=lambda place: None, tell=lambda: None):
        for each in self.optimizers:
            each.zero_grad()
        strike("forward")
        out = self.model(ids)
        strike("fetched")
        (out - y).square().mean().backward()
        tell()
        strike("released")
        if self.clips:
            hvd.clip_grad_norm_(self.model.parameters(), 0.3)
        for each in self.optimizers:
            each.step()

    def end(self) -> dict[str, torch.Tensor]:
        """All there is, by row; fails if two ranks keep one row with other bits. Collective."""
        table, by_row = self.table, {}
        with torch.no_grad():
            whole = table(torch.arange(ROWS))
        for told in hvd.allgather_object(self._kept(), "end"):
            for row, lines in told:
                assert by_row.setdefault(row, lines) == lines, row
        assert sorted(by_row) == list(range(ROWS))
        for row, lines in by_row.items():
            assert lines["weight"] == whole[row].tolist()
        state = {
            key: torch.tensor([by_row[row][key] for row in range(ROWS)], dtype=torch.float64)
            for key in sorted(by_row[0])
        }
        return {**state, **{f"dense.{name}": value.detach().clone() for name, value in self.dense.named_parameters()}}

    def _kept(self) -> list[tuple[int, dict[str, list[float]]]]:
        table = self.table
        layout, rank = (table.kept.layout, table.kept.rank) if table.kept is not None else (None, table.rank)
        count = table.dealing.count(rank) if layout is None else layout.count(rank)
        places = np.arange(count)
        table._rows.prepare(places)
        ids = table.dealing.ids(rank, places) if layout is None else layout.ids(rank, places)
        state = next((each.state[table.weight] for each in self.optimizers if table.weight in each.state), {})
        lines = {"weight": table.weight.detach()}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                lines[key] = (value.to_dense() if value.is_sparse else value).detach()
        assert all(len(each) == count + 1 for each in lines.values()), {key: len(each) for key, each in lines.items()}
        return [(int(row), {key: each[place].tolist() for key, each in lines.items()}) for place, row in enumerate(ids)]


def digest(values: dict[str, torch.Tensor]) -> str:
    """Of the bits of all values."""
    bits = b"".join(name.encode() + value.double().numpy().tobytes() for name, value in sorted(values.items()))
    return hashlib.sha256(bits).hexdigest()


def samples_of(step: int, size: int, rank: int) -> list[int]:
    """Under ``elastic.run``, which leaves to the script what a rank learns in a step."""
    return [((step * size + rank) * BATCH + place) % SAMPLES for place in range(BATCH)]


def run_to_commits(learner: Learner) -> None:
    """Learns under ``elastic.run``: a step whose world is lost is done again, from the commit before it."""
    import elastic_faults

    from ringtrain.embedding import committed_rows

    exec(os.environ.get("PLANTED_IN_TABLES", ""), {"committed_rows": committed_rows})
    others = {} if learner.rows is None else {"rows": learner.rows}
    state = hvd.elastic.TorchState(model=learner.model, optimizer=learner.optimizer, step=0, **others)
    exchange = committed_rows.allreduce

    def strike_within(*given, name, **named):
        result = exchange(*given, name=name, **named)
        elastic_faults.strike(state.step, name.split(".")[-1])
        return result

    committed_rows.allreduce = strike_within
    struck: list[partial] = [partial(elastic_faults.strike, 0)]
    learner.dense.weight.register_hook(lambda gradient: struck[0]("backward"))

    @hvd.elastic.run
    def train(state):
        while state.step < COMMITS:
            elastic_faults.await_joiners(state.step)
            step, size = state.step, hvd.size()
            struck[0] = partial(elastic_faults.strike, step)
            _, ids, y = torch.utils.data.default_collate([Data()[each] for each in samples_of(step, size, hvd.rank())])
            print("attempt", step, size, flush=True)
            learner.train_on(ids, y, struck[0])
            struck[0]("stepped")
            state.step += 1
            state.commit()

    train(state)
    finish(learner, state.step)


def finish(learner: Learner, steps: int) -> None:
    """Says what has been learnt, and leaves it for the test."""
    from elastic_faults import folder

    values = learner.end()
    if hvd.rank() == 0:
        torch.save(values, folder / "end.pt")
    print("end", steps, digest(values), flush=True)


def main() -> None:
    import elastic_faults
    from elastic_faults import folder, slot

    from ringtrain.embedding import kept_rows, row_gradients
    from ringtrain.torch import embedding, table_checkpoints

    if os.environ.get("COMMITS"):
        hvd.init()
        run_to_commits(Learner(os.environ["KIND"]))
        return
    exec(
        os.environ.get("PLANTED_IN_TABLES", ""),
        {"embedding": embedding, "kept_rows": kept_rows, "row_gradients": row_gradients},
    )
    row_gradients_of = row_gradients.RowGradients
    hvd.init()
    storage = {"storage": "file", "path": str(folder)} if os.environ.get("STORAGE") == "file" else {}
    learner = Learner(os.environ["KIND"], os.environ.get("DEALING", "modulo"), storage)
    sampler = hvd.elastic.ElasticSampler(Data())
    loader = torch.utils.data.DataLoader(Data(), BATCH, sampler=sampler)
    others = {} if learner.rows is None else {"rows": learner.rows}
    state = hvd.elastic.State(model=learner.model, optimizer=learner.optimizer, sampler=sampler, **others)
    if folder_of_rows := os.environ.get("ROWS_FROM"):
        hvd.load_tables(folder_of_rows, learner.model, learner.optimizer)

    if saves := os.environ.get("SAVES"):
        state.resume(saves)
        state.save_every(saves, steps=3, keep=2)

    def strike(place):
        elastic_faults.strike(state.step, place)

    def saving(*given, save=table_checkpoints._save):
        strike("saving")
        save(*given)

    table_checkpoints._save = saving

    def holding(self, *given, reduce=row_gradients_of.reduce, **named):
        reduce(self, *given, **named)
        if "SIGKILL" in elastic_faults.statement(state.step, "holding"):
            print("perhaps", *drawn, flush=True)  # its share counts if all others hold the results, too
        strike("holding")

    row_gradients_of.reduce = holding
    drawn: list[int] = []
    learner.dense.weight.register_hook(lambda gradient: strike("backward"))
    for _ in state.epochs(EPOCHS):
        for indices, ids, y in loader:
            elastic_faults.await_joiners(state.step)
            rank, step = hvd.rank(), state.step
            drawn[:] = step, rank, *indices.tolist()

            def tell(rank=rank, step=step, indices=indices):
                print("applied", step, rank, *indices.tolist(), flush=True)

            try:
                learner.train_on(ids, y, strike, tell)
            except rt.RingtrainError as problem:
                print("raised", slot, step, type(problem).__name__, problem, flush=True)
                if not os.environ.get("LOST_FROM"):
                    raise
                hvd.load_tables(os.environ["LOST_FROM"], learner.model, learner.optimizer, lost_only=True)
                learner.train_on(ids, y, tell=tell)
            if state.step == int(os.environ.get("SAVED_AT", "-1")):
                hvd.save_tables(os.environ["SAVED_IN"], learner.model, learner.optimizer)
    finish(learner, state.step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
