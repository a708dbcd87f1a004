"""A script for PyTorch with the four lines that make it run on many ranks.

    ringtrainrun -np 2 python docs/examples/torch_blobs.py

The data are made: eight clouds of points in a plane, which a small network tells apart.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

import ringtrain.torch as hvd


def main() -> None:
    hvd.init()  # 1  join the world
    training, test = make_blobs(1000, seed=1), make_blobs(200, seed=2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # 2  average gradients
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # 3  start alike
    sampler = hvd.DistributedSampler(training, seed=1)  # 4  read your share
    loader = DataLoader(training, batch_size=25, sampler=sampler)

    for epoch in range(10):
        sampler.set_epoch(epoch)  # another order
        for points, labels in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(points), labels)
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean:.3f}")

    if hvd.rank() == 0:  # all ranks have the same model
        points, labels = test.tensors
        print(f"test accuracy {(model(points).argmax(1) == labels).double().mean():.3f}")
    hvd.shutdown()


def make_blobs(samples: int, seed: int) -> TensorDataset:
    """Points around eight places of a circle, and the number of the place."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % 8
    angles = labels * (2 * torch.pi / 8)
    places = torch.stack([angles.cos(), angles.sin()], dim=1)
    return TensorDataset(places + 0.1 * torch.randn(samples, 2, generator=random), labels)


if __name__ == "__main__":
    main()
