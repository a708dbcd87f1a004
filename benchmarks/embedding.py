"""``python -m benchmarks embedding``: training steps of an embedding table, sharded and replicated, on the same ids.

Both are trained by SGD on sparse gradients, the replicated one under ``DistributedOptimizer``; ``--peers torchrec`` puts
TorchRec's beside them. The least that could be sent is, for each rank, what it needs of others: each row once there, and
its gradient once back.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

import ringtrain as rt
import ringtrain.torch as hvd
from benchmarks.torchrec_table import TorchRecTable
from ringtrain.bench import ranks, report
from ringtrain.bench.turns import time_in_turn, time_of

_DRAWN = 4  # batches that are used in turn
_RATE = 0.1


def run(
    rows: int, width: int, batch: int, columns: int, zipf: float, folder: str | None, peers: list[str],
    repetitions: int | None, json: str | None,
) -> bool:  # fmt: skip
    """Runs the benchmark on this rank; returns whether all tables came to the same rows."""
    hvd.init()
    torch.set_num_threads(1)
    batches = [_ids(number, rows, batch // hvd.size(), columns, zipf) for number in range(_DRAWN)]
    sharded = _Sharded(rows, width, folder)
    systems: dict[str, Any] = {"sharded": sharded}
    if folder is None:
        systems["replicated"] = _Replicated(rows, width, sharded)
    if "torchrec" in peers:
        systems["torchrec"] = _like(TorchRecTable(rows, width, _RATE), sharded)
    steps = {name: partial(_timed, system, batches) for name, system in systems.items()}
    seconds = time_in_turn(steps, repetitions or 10)
    agree = [_agree(sharded, system, batches[0]) for system in systems.values()]  # each asks other ranks
    verified = ranks.all_true(all(agree))
    least = _least_bytes(sharded, batches)
    results = [
        report.result(
            name, "embedding", seconds[name], verified,
            rows=rows, width=width, least_bytes=least, sent_bytes=_sent_by_rank(system),
        )
        for name, system in systems.items()
    ]  # fmt: skip
    report.say(f"{rows} rows x {width}, {batch} x {columns} ids a step, {hvd.size()} ranks; bytes of a rank and step")
    cells = [
        [
            each["system"], report.seconds_text(each["seconds_median"]), _megabytes(each["sent_bytes"]),
            f"{least / 1e6:.2f} MB", report.verdict(each),
        ]
        for each in results
    ]  # fmt: skip
    report.print_table(["table", "step", "sent", "the least", "result"], cells)
    report.write_json(json, results)
    if "torchrec" in systems:
        systems["torchrec"].close()
    hvd.shutdown()
    return verified


class _Sharded:
    """A table whose rows are dealt over the ranks."""

    within = 1e-5  # how far off its rows may be

    def __init__(self, rows: int, width: int, folder: str | None):
        storage: dict[str, Any] = {} if folder is None else {"storage": "file", "path": folder}
        self.table: Any = hvd.ShardedEmbedding(rows, width, **storage)
        self.optimizer: Any = torch.optim.SGD(self.table.parameters(), lr=_RATE)
        self.sent, self.steps = 0, 0

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of these ids; all ranks call it together."""
        return self.table(ids)

    def step(self, ids: torch.Tensor) -> None:
        before = rt.counters()
        self.optimizer.zero_grad()
        (self.table(ids).square().sum() / len(ids)).backward()  # a frequent row moves far in a step
        self.optimizer.step()
        after = rt.counters()
        self.sent += self.sent_of({name: after[name] - before[name] for name in before})
        self.steps += 1

    def sent_of(self, counted: dict[str, int]) -> int:
        """Bytes that this rank has sent to others, on its host and beyond."""
        return counted["wire_bytes_sent"] + counted["shared_bytes"]


class _Replicated(_Sharded):
    """The whole table on each rank, beginning as the sharded one does."""

    def __init__(self, rows: int, width: int, like: _Sharded):
        self.table = torch.nn.Embedding(rows, width, sparse=True)
        with torch.no_grad():
            for start, some in _in_pieces(like):
                self.table.weight[start : start + len(some)] = some
        optimizer = torch.optim.SGD(self.table.parameters(), lr=_RATE)
        self.optimizer = hvd.DistributedOptimizer(optimizer, self.table.named_parameters())
        self.sent, self.steps = 0, 0

    def sent_of(self, counted: dict[str, int]) -> int:
        """Within a host an allgather's bytes are copied from where they lie, and counted as input alone."""
        return counted["wire_bytes_sent"] or counted["bytes"] * (hvd.size() - 1)


def _timed(system: _Sharded, batches: list[torch.Tensor]) -> list[float]:
    return [time_of(lambda: system.step(batches[system.steps % len(batches)]))]


def _ids(number: int, rows: int, samples: int, columns: int, exponent: float) -> torch.Tensor:
    """Ids of this rank; frequent rows lie all over the table."""
    drawn = np.random.default_rng([number, hvd.rank()]).zipf(exponent, (samples, columns))
    return torch.from_numpy((drawn * 2_654_435_761 % rows).astype(np.int64))


def _least_bytes(system: _Sharded, batches: list[torch.Tensor]) -> float:
    table = system.table
    foreign = [np.count_nonzero(table.dealing.owners(np.unique(ids.numpy())) != hvd.rank()) for ids in batches]
    row_bytes = table.embedding_dim * table.weight.element_size()
    return float(np.mean(ranks.gathered(2 * np.mean(foreign) * row_bytes)))


def _in_pieces(system: _Sharded) -> Iterator[tuple[int, torch.Tensor]]:
    """All rows of a table, and where each piece begins; all ranks take them together."""
    rows = system.table.num_embeddings
    for start in range(0, rows, 1 << 16):
        yield start, system.table(torch.arange(start, min(start + (1 << 16), rows)))


def _like(peer: TorchRecTable, sharded: _Sharded) -> TorchRecTable:
    with torch.no_grad():
        for start, some in _in_pieces(sharded):
            peer.take_rows(start, some)
    return peer


def _sent_by_rank(system: Any) -> list[float] | None:
    return None if system.sent is None else ranks.gathered(system.sent / system.steps)


def _megabytes(sent_bytes: list[float] | None) -> str:
    return "not counted" if sent_bytes is None else f"{np.mean(sent_bytes) / 1e6:.2f} MB"


def _agree(sharded: _Sharded, other: Any, ids: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.allclose(sharded.rows_of(ids), other.rows_of(ids), rtol=1e-4, atol=other.within)
