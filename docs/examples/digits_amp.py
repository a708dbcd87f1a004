"""Handwritten digits in mixed precision: a gradient scaler, with two backward passes in each step.

    pip install scikit-learn      # the data
    ringtrainrun -np 2 python docs/examples/digits_amp.py

The recipe is torch's own. Gradients are those of all ranks before the scaler looks at them, so an overflow on one rank
skips the step on every rank, and all scales stay equal. They travel in the last pass of a step alone.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringtrain.torch as hvd


def main() -> None:
    options = parse_options()
    hvd.init()
    torch.manual_seed(1)
    training, test = load_data()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=options.passes)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    dtype = getattr(torch, options.dtype)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)  # bfloat16 has float32's range
    sampler = hvd.DistributedSampler(training, seed=1)
    loader = DataLoader(training, batch_size=16, sampler=sampler)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(loader, start=1):
            with torch.autocast("cpu", dtype):
                loss = nn.functional.cross_entropy(model(images), labels)
            scaler.scale(loss / options.passes).backward()
            if number % options.passes == 0 or number == len(loader):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        accuracy = accuracy_on_all_ranks(model, test)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, scale {scaler.get_scale():g}, test accuracy {accuracy:.4f}")
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a digit classifier in mixed precision on all ranks.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--passes", type=int, default=2, help="backward passes in a step (2)")
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images of 8 x 8 pixels, every sixth for the test."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    is_test = torch.arange(len(labels)) % 6 == 0
    return TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(images[is_test], labels[is_test])


@torch.no_grad()
def accuracy_on_all_ranks(model: nn.Module, test: TensorDataset) -> float:
    """Each rank counts on its share, of which no sample is read twice; the counts are added up."""
    images, labels = test[hvd.shard(len(test), "uneven", seed=None)]
    right = (model(images).argmax(1) == labels).sum()
    counts = hvd.allreduce(torch.stack([right, torch.tensor(len(labels))]), name="accuracy", op=hvd.Sum)
    return (counts[0] / counts[1]).item()


if __name__ == "__main__":
    main()
