"""Trains a small convolutional network on handwritten digits, on as many ranks as the launcher starts.

    pip install scikit-learn      # the data
    ringtrainrun -np 2 python examples/quickstart.py

The four lines that make a script for one process a script for many are marked. At the end rank 0 says what N ranks have
in common with one process: it has trained a second network alone, on the same global batches and without ringtrain.
"""

import argparse
import hashlib
import os
import time
from collections.abc import Callable, Iterator

import torch
from sklearn.datasets import load_digits
from torch import nn
from tqdm import tqdm

import ringtrain
import ringtrain.torch as hvd

Batch = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    options = parse_options()
    hvd.init()  # 1  join the world
    torch.set_num_threads(1)  # the network is too small for more, and 1 rank and N ranks then compare fairly
    training, test = load_data(options.seed)
    batch_size = max(options.batch_size // hvd.size(), 1) * hvd.size()  # the same number of samples on every rank

    with ringtrain.long_phase(3600):  # on a busy machine, too, nobody is warned of the rank that the others wait for
        alone, seconds_alone = train_alone(options, training, batch_size) if hvd.rank() == 0 else (None, 0.0)
    hvd.barrier()  # so that the ranks share the processor with nobody

    model = make_model(options.seed + hvd.rank())  # different on purpose: the broadcast makes them equal
    optimizer = make_optimizer(model)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # 2  average gradients over the ranks
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # 3  start alike
    batches = global_batches(training, batch_size, options)
    share = slice(hvd.rank(), None, hvd.size())  # 4  read your share
    seconds = train(
        model, optimizer, lambda: ((x[share], y[share]) for x, y in batches()), options.epochs, hvd.rank() == 0
    )

    equal = len(set(hvd.allgather_object(digest(model)))) == 1
    if hvd.rank() == 0:
        samples = options.epochs * (len(training[0]) // batch_size) * batch_size
        report(model, alone, test, equal, samples / seconds_alone, samples / seconds)
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a digit classifier on all ranks.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of one step on all ranks together")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def load_data(seed: int) -> tuple[Batch, Batch]:
    """1,797 images of 8 x 8 pixels, every sixth for the test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], labels[order]
    is_test = torch.arange(len(labels)) % 6 == 0
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


def make_model(seed: int) -> nn.Module:
    """Smooth throughout: kinks as in ReLU and max pooling would turn differences of rounding into other branches."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GELU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GELU(),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.GELU(), nn.Linear(128, 10),
    )  # fmt: skip


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def global_batches(data: Batch, batch_size: int, options: argparse.Namespace) -> Callable[[], Iterator[Batch]]:
    """One call for each epoch: its batches in an order that depends on the seed and the epoch alone."""
    generator = torch.Generator().manual_seed(options.seed)

    def epoch() -> Iterator[Batch]:
        order = torch.randperm(len(data[0]), generator=generator)
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            yield data[0][chosen], data[1][chosen]

    return epoch


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Callable[[], Iterator[Batch]], epochs: int, show: bool
) -> float:
    """Trains and returns the seconds it took. It knows nothing about ranks."""
    start = time.perf_counter()
    progress = tqdm(range(epochs), unit="epoch", disable=not show)
    for _ in progress:
        for x, y in batches():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        progress.set_postfix(loss=f"{loss.item():.4f}")
    return time.perf_counter() - start


def train_alone(options: argparse.Namespace, training: Batch, batch_size: int) -> tuple[nn.Module, float]:
    """What one process makes of the same global batches, without ringtrain."""
    model = make_model(options.seed)
    return model, train(
        model, make_optimizer(model), global_batches(training, batch_size, options), options.epochs, False
    )


def digest(model: nn.Module) -> str:
    """Equal for two models whose parameters are equal bit for bit."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def why_not_faster(samples_alone: float, samples: float, ranks: int, cores: int) -> str:
    """A line that explains the figures if N ranks train no faster than one; else nothing."""
    if ranks == 1 or samples > samples_alone:
        return ""
    shared = f"{ranks} ranks share {cores} cores" if cores < ranks else f"other programs may use the {cores} cores too"
    return f"  (not faster: {shared}, and a step of this small network takes only milliseconds)\n"


@torch.no_grad()
def report(model: nn.Module, alone: nn.Module, test: Batch, equal: bool, samples_alone: float, samples: float) -> None:
    ranks = f"{hvd.size()} ranks" if hvd.size() > 1 else "1 rank"
    accuracy = (model(test[0]).argmax(1) == test[1]).double().mean().item()
    ours, reference = (torch.cat([p.double().ravel() for p in m.parameters()]) for m in (model, alone))
    difference = (ours - reference).abs().max().item()
    relative = ((ours - reference).norm() / reference.norm()).item()
    print(f"test accuracy: {accuracy:.4f}")
    print(f"samples/s: {samples_alone:.0f} on 1 rank, {samples:.0f} on {ranks}")
    print(why_not_faster(samples_alone, samples, hvd.size(), len(os.sched_getaffinity(0))), end="")
    print(f"parameters of {ranks}: {'equal bit for bit' if equal else 'NOT EQUAL'}")
    print(f"parameters of {ranks} against one process on the same global batches: "
          f"max abs difference {difference:.2e}, relative difference {relative:.2e}")  # fmt: skip


if __name__ == "__main__":
    main()
