"""Small PyTorch networks for the training benchmarks, each with a batch: what they cost differs in kind.

The convnet computes much for each parameter, the MLP has 25 M parameters and little to compute, the transformer has
many small tensors, "wide" has 100 MB of gradients and next to nothing to compute, "tables" as many and a forward pass that
reads a few rows of its parameters alone, VGG-16 has 553 MB.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Classifier:
    """A classifier, and what it is trained on.

    Attributes:
        make: a fresh network, the same for the same torch seed.
        batch: inputs and labels of a number of samples, from a generator.
        samples: of one rank in one step.
        steps_in_a_turn: that are timed as one.
        momentum: of its optimizer; 0 where the optimizer is to take as little time as it can.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    samples: int
    steps_in_a_turn: int = 5
    momentum: float = 0.9

    def batches(self, rank: int, samples: int | None = None) -> Batch:
        """A rank's batch, always the same one."""
        return self.batch(samples or self.samples, torch.Generator().manual_seed(rank))


def loss_of(network: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean loss of a batch."""
    x, y = batch
    return nn.functional.cross_entropy(network(x), y)


def _convnet() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128), (128, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GELU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 2 * 2, 10))


def _vgg16() -> nn.Module:
    """VGG-16 for 1,000 classes, 138,357,544 parameters; its pictures are 64 x 64 here, and pooled to 7 x 7 as any are."""
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 1000))


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, 3072), nn.GELU(), nn.Linear(3072, 3072), nn.GELU(), nn.Linear(3072, 3072), nn.GELU(),
        nn.Linear(3072, 1000),
    )  # fmt: skip


class _Wide(nn.Module):
    """24 matrices of 4 MB side by side: a sample passes each once, and each gradient is a product of two vectors."""

    COUNT, WIDTH = 24, 1024

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(
            torch.randn(self.WIDTH, self.WIDTH) / math.sqrt(self.COUNT * self.WIDTH) for _ in range(self.COUNT)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores (batch, width) of vectors (batch, count, width)."""
        return torch.stack([part @ matrix for part, matrix in zip(x.unbind(1), self.matrices, strict=True)]).sum(0)


class _Tables(nn.Module):
    """24 embeddings of 4 MB with dense gradients: a sample reads a row of each, and its gradient is zero but for that row."""

    COUNT, ROWS, WIDTH = 24, 1024, 1024

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(self.ROWS, self.WIDTH) for _ in range(self.COUNT))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Class scores (batch, width) of ids (batch, count)."""
        return torch.stack([table(each) for each, table in zip(ids.unbind(1), self.tables, strict=True)]).mean(0)


class _Transformer(nn.Module):
    """Four encoder layers over 64 tokens, and a class for each token."""

    def __init__(self, tokens: int = 256, width: int = 128, length: int = 64):
        super().__init__()
        self.token = nn.Embedding(tokens, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Class scores (batch, tokens, length) of tokens (batch, length)."""
        return self.head(self.layers(self.token(tokens) + self.place)).transpose(1, 2)


def _images(samples: int, generator: torch.Generator) -> Batch:
    return torch.randn(samples, 3, 32, 32, generator=generator), torch.randint(10, (samples,), generator=generator)


def _pictures(samples: int, generator: torch.Generator) -> Batch:
    return torch.randn(samples, 3, 64, 64, generator=generator), torch.randint(1000, (samples,), generator=generator)


def _vectors(samples: int, generator: torch.Generator) -> Batch:
    return torch.randn(samples, 1024, generator=generator), torch.randint(1000, (samples,), generator=generator)


def _rows_of_vectors(samples: int, generator: torch.Generator) -> Batch:
    x = torch.randn(samples, _Wide.COUNT, _Wide.WIDTH, generator=generator)
    return x, torch.randint(_Wide.WIDTH, (samples,), generator=generator)


def _ids(samples: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(_Tables.ROWS, (samples, _Tables.COUNT), generator=generator)
    return ids, torch.randint(_Tables.WIDTH, (samples,), generator=generator)


def _texts(samples: int, generator: torch.Generator) -> Batch:
    text = torch.randint(256, (samples, 65), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


NETWORKS = {
    "convnet": Classifier(_convnet, _images, samples=32),
    "mlp": Classifier(_mlp, _vectors, samples=32),
    "transformer": Classifier(_Transformer, _texts, samples=8),
    "wide": Classifier(_Wide, _rows_of_vectors, samples=1, momentum=0.0),
    "tables": Classifier(_Tables, _ids, samples=1, momentum=0.0),
    "vgg16": Classifier(_vgg16, _pictures, samples=8, steps_in_a_turn=1),
}
