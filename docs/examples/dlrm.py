"""A small DLRM (Naumov et al., arXiv:1906.00091) on made clicks: sharded tables, a dense part, and the area under the curve.

    ringtrainrun -np 2 python docs/examples/dlrm.py

Ids of each column follow Zipf's distribution. Whether a user clicks follows from hidden factors of the rows, so there is
something to learn, and a best possible area, which is shown beside the one that is reached.
"""

import argparse

import numpy as np
import torch
from torch import nn

import ringtrain.torch as hvd

COLUMNS = {"user": 2000, "item": 1000, "context": 50}  # rows of the tables
NUMBERS = 4  # dense features
HIDDEN = 4


class Clicks:
    """Endless made clicks, the same law on all ranks."""

    def __init__(self, seed: int):
        law = np.random.default_rng(0)
        self._factors = {name: law.normal(size=(rows, HIDDEN)) for name, rows in COLUMNS.items()}
        self._slope = law.normal(size=NUMBERS)
        self._drawn = np.random.default_rng(seed)

    def batch(self, size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids by column, dense features, clicks, and the probability of each."""
        ids = {name: (self._drawn.zipf(1.2, size) - 1) % rows for name, rows in COLUMNS.items()}
        numbers = self._drawn.normal(size=(size, NUMBERS))
        user, item, context = (self._factors[name][ids[name]] for name in COLUMNS)
        score = (user * item).sum(1) + (item * context).sum(1) + numbers @ self._slope
        chance = 1 / (1 + np.exp(-score))
        clicks = self._drawn.random(size) < chance
        tensors = {name: torch.from_numpy(each) for name, each in ids.items()}
        as_float = [torch.from_numpy(each.astype(np.float32)) for each in (numbers, clicks, chance)]
        return tensors, as_float[0], as_float[1], as_float[2]


class Dlrm(nn.Module):
    """Rows of all columns and the dense features meet in pairs; a small network judges the products."""

    def __init__(self, width: int):
        super().__init__()
        self.tables = hvd.ShardedEmbeddingCollection(
            {
                name: hvd.ShardedEmbedding(rows, width, seed=seed, scale=0.3)
                for seed, (name, rows) in enumerate(COLUMNS.items())
            }
        )
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 32), nn.ReLU(), nn.Linear(32, width))
        pairs = (len(COLUMNS) + 1) * len(COLUMNS) // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("pairs", torch.triu_indices(len(COLUMNS) + 1, len(COLUMNS) + 1, offset=1))

    def forward(self, ids: dict[str, torch.Tensor], numbers: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *self.tables(ids).values()], dim=1)
        products = (vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([products, dense], dim=1)).squeeze(1)


def area_under_curve(scores: torch.Tensor, clicks: torch.Tensor) -> float:
    """The chance that a click has a higher score than what was not clicked (Mann and Whitney)."""
    ranks = scores.argsort().argsort().double() + 1
    positive, negative = clicks.sum().item(), (1 - clicks).sum().item()
    return (ranks[clicks > 0].sum().item() - positive * (positive + 1) / 2) / (positive * negative)


def main() -> None:
    options = parse_options()
    hvd.init()
    torch.manual_seed(options.seed)
    model = Dlrm(options.width)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    clicks = Clicks(seed=1000 * options.seed + hvd.rank() + 1)
    for step in range(1, options.steps + 1):
        ids, numbers, clicked, _ = clicks.batch(options.batch // hvd.size())
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids, numbers), clicked)
        loss.backward()
        hvd.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if step % 100 == 0 or step == options.steps:
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"step {step}: loss {mean:.4f}", flush=True)
    with torch.no_grad():  # all ranks judge the same clicks, which none has seen
        ids, numbers, clicked, chance = Clicks(seed=999).batch(8192)
        reached, best = area_under_curve(model(ids, numbers), clicked), area_under_curve(chance, clicked)
    if hvd.rank() == 0:
        print(f"area under the curve {reached:.3f}, best possible {best:.3f}")
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=1024, help="of all ranks together (1024)")
    parser.add_argument("--width", type=int, default=8, help="of the rows (8)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
