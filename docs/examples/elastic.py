"""A job in PyTorch that goes on when ranks die, and admits others while it runs.

    ringtrainrun --elastic -np 1:2 python docs/examples/elastic.py --folder checkpoints
    ringtrainrun -np 2 python docs/examples/elastic.py                # the same script as an ordinary job

To see it go on, kill one of its ranks: each line has the number of ranks. A job that is started again continues from
the newest file in the folder.
"""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

import ringtrain.torch as hvd


def main() -> None:
    options = parse_options()
    x = torch.randn(1600, 16, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x[:, :4].sum(1, keepdim=True).sin())
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

    hvd.init()  # others wait for a joining rank from here on, so the model is made before
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)

    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler, schedule=schedule)
    state.on_change(lambda old, new: print(f"rank {hvd.rank()}: {new} ranks go on, where {old} were"))
    if options.folder:
        state.resume(options.folder)
        state.save_every(options.folder, epochs=1)
    for epoch in state.epochs(options.epochs):
        for points, heights in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(points), heights)
            loss.backward()
            optimizer.step()
        schedule.step()
        mean = state.survive(lambda loss=loss: hvd.allreduce(loss.detach(), name="loss").item())
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean:.4f} on {hvd.size()} ranks", flush=True)
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains while ranks come and go.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", help="of checkpoints, which all hosts have")
    return parser.parse_args()


if __name__ == "__main__":
    main()
