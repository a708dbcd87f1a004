"""A generative adversarial network: two models, two optimizers, on a ring of eight Gaussians.

    ringtrainrun -np 2 python docs/examples/gan.py

Each optimizer reduces its own parameters. While the generator learns, gradients flow through the discriminator, which
is frozen for that time: so nothing is computed or sent for it.
"""

import argparse
import math

import torch
from torch import nn

import ringtrain.torch as hvd

MODES = 8


def main() -> None:
    options = parse_options()
    hvd.init()
    torch.manual_seed(
        options.seed + hvd.rank()
    )  # other samples and noise on each rank; the broadcast aligns the models
    generator = make_network(inputs=4, outputs=2)
    discriminator = make_network(inputs=2, outputs=1)
    optimizers = {}
    for name, network in (("generator", generator), ("discriminator", discriminator)):
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, betas=(0.5, 0.9))
        optimizers[name] = hvd.DistributedOptimizer(optimizer, network.named_parameters(prefix=name))
        hvd.broadcast_parameters(network.state_dict(), root_rank=0)

    for step in range(1, options.steps + 1):
        real, fake = ring(128), generator(torch.randn(128, 4))
        judged = discriminator_loss(discriminator(real), discriminator(fake.detach()))
        update(optimizers["discriminator"], judged)

        discriminator.requires_grad_(False)
        update(optimizers["generator"], nn.functional.softplus(-discriminator(generator(torch.randn(128, 4)))).mean())
        discriminator.requires_grad_(True)

        if step % options.report_every == 0:
            found = modes_found(generator)
            if hvd.rank() == 0:
                print(f"step {step}: discriminator's loss {judged.item():.3f}, {found} of {MODES} modes found")
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a GAN on all ranks.")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--report-every", type=int, default=250, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def make_network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def discriminator_loss(real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    return nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()


def centres() -> torch.Tensor:
    angles = torch.arange(MODES) * (2 * math.pi / MODES)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def ring(count: int) -> torch.Tensor:
    """Samples (count, 2) of the mixture."""
    return centres()[torch.randint(MODES, (count,))] + 0.05 * torch.randn(count, 2)


@torch.no_grad()
def modes_found(generator: nn.Module) -> int:
    """Modes that a fiftieth of the samples of all ranks lies close to."""
    distances = torch.cdist(generator(torch.randn(500, 4)), centres())
    shares = (distances < 0.25).double().mean(dim=0)
    return int((hvd.allreduce(shares, name="modes") > 0.02).sum())


if __name__ == "__main__":
    main()
