"""Contrastive losses, as the manual has them, on all ranks and in one process."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_docs import blocks

import ringtrain.torch as hvd

pytestmark = pytest.mark.least_ranks(2)
SAMPLES = 3  # of each rank


def losses():
    """The functions of the manual."""
    (block,) = [block for block in blocks("losses-over-all-ranks.md", "python") if "def clip_loss" in block]
    names = {"hvd": hvd, "torch": torch, "F": F}
    exec(block, names)
    return {name: names[name] for name in ("clip_loss", "local_clip_loss")}


class Towers(torch.nn.Module):
    """Two layers, whose rows have length 1."""

    def __init__(self):
        super().__init__()
        self.images, self.texts = torch.nn.Linear(5, 4).double(), torch.nn.Linear(6, 4).double()

    def forward(self, images, texts):
        return F.normalize(self.images(images)), F.normalize(self.texts(texts))


def gradients_of_one_process(start, images, texts):
    model = copy.deepcopy(start)
    one, other = model(images, texts)
    scores, right = 10.0 * one @ other.T, torch.arange(len(images))
    ((F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2).backward()
    return [parameter.grad.numpy() for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["clip_loss", "local_clip_loss"])
def test_a_contrastive_loss_has_the_gradients_of_one_process(world, name):
    with torch.random.fork_rng():
        torch.manual_seed(5)  # ranks that are processes draw alike
        start = Towers()
        images = torch.randn(SAMPLES * world.size, 5, dtype=torch.float64)
        texts = torch.randn(SAMPLES * world.size, 6, dtype=torch.float64)
    expected = gradients_of_one_process(start, images, texts)
    loss_of = losses()[name]

    def body(rank):
        model = copy.deepcopy(start)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
        own = slice(SAMPLES * rank, SAMPLES * (rank + 1))
        loss_of(*model(images[own], texts[own])).backward()
        optimizer.synchronize()
        return [parameter.grad.numpy() for parameter in model.parameters()]

    for found in world.run(body):
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-15)


def test_rows_may_be_of_any_number(world):
    def body(rank):
        rows = torch.full((rank, 2), float(rank), requires_grad=True)
        gathered = hvd.gather_with_gradient(rows)
        (gathered * (rank + 1.0)).sum().backward()
        assert (gathered.shape[0], rows.grad.tolist()) == (size * (size - 1) // 2, [[total] * 2] * rank)

    size = world.size
    total = size * (size + 1) / 2
    world.run(body)
