"""What test_elastic_programs.py trains: ways from batches to an update, and a learner that goes one of them.

The ranks of an elastic job use it (elastic_torch.py), and threads that do the same windows again, as planned. A window is
what lies between two updates; one that was skipped counts, too.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable

import torch

import ringtrain.torch as hvd
from ringtrain._runtime import context as contexts
from ringtrain._runtime import error_feedback

BATCH, EPOCHS = 4, 2


class Data(torch.utils.data.Dataset):
    """Samples that follow from their numbers."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        return index, torch.randn(3, generator=drawn), torch.randn(1, generator=drawn)


class Plain:
    """One pass and one update. The other kinds say what they do otherwise.

    Attributes:
        passes: of a window.
        sends_in_step: whether ranks meet in the optimizer's step, and not in backward passes.
        further: values that the state has beside.
    """

    passes = 1
    sends_in_step = False
    momentum = 0.5
    rate = 0.1

    def __init__(self):
        self.poisoned: set[int] = set()  # samples whose gradients are infinite
        self.skipped = 0  # updates
        self.further = {}
        self.model = self.make_model()
        self.plain = torch.optim.SGD(self.model.parameters(), lr=self.rate, momentum=self.momentum)

    def make_model(self):
        return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))

    def settings(self):
        """Of the distributed optimizer."""
        return {}

    @property
    def last_to_come(self):
        """A parameter whose gradient is computed when others have left."""
        return self.model[0].weight

    def distribute(self):
        self.optimizer = hvd.DistributedOptimizer(self.plain, self.model.named_parameters(), **self.settings())

    def loss(self, indices, x, y):
        return (self.model(x) - y).square().mean()

    def one_pass(self, loss, is_last):
        loss.backward()

    def between(self):
        """Is called between two backward passes of a step."""

    def update(self):
        self.optimizer.step()

    def local(self):
        """What is this rank's own, and outlives a world."""
        return None

    def load_local(self, kept):
        pass


class Scaled(Plain):
    """Overflows are found, and skipped, by a GradScaler whose scale goes up and down; gradients are clipped."""

    def __init__(self):
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.further = {"scaler": self.scaler}

    def loss(self, indices, x, y):
        return super().loss(indices, x, y) * (float("inf") if self.poisoned & set(indices.tolist()) else 1.0)

    def one_pass(self, loss, is_last):
        self.scaler.scale(loss).backward()

    def update(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < scale


class Clipped(Plain):
    """Gradients are changed between synchronize() and the step."""

    def update(self):
        self.optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


class Summed(Plain):
    """Two passes are summed before they travel."""

    passes = 2

    def settings(self):
        return {"backward_passes_per_step": 2, "average_aggregated_gradients": True}


class Silent(Plain):
    """Two passes, of which the first says nothing to the others."""

    passes = 2

    def one_pass(self, loss, is_last):
        with contextlib.nullcontext() if is_last else self.optimizer.no_sync():
            loss.backward()


class Grouped(Plain):
    """Parameters travel in two groups."""

    def settings(self):
        return {"num_groups": 2}


class Buckets(Plain):
    """Gradients would be views of buckets, in a job that is not elastic."""

    def settings(self):
        return {"mode": hvd.Synchronous(gradient_as_bucket_view=True)}


class Half(hvd.Compression.none):
    """A compressor of the user's own, whose copies travel."""

    @staticmethod
    def compress(tensor):
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor, dtype):
        return tensor.to(dtype)


class Cast(Plain):
    """Copies of the gradients travel."""

    def settings(self):
        return {"compression": Half}


class Combined(Plain):
    """Adasum of what the ranks' own steps have changed; their momentum would be their own, too."""

    momentum = 0.0
    sends_in_step = True

    def settings(self):
        return {"op": hvd.Adasum}


class Words(torch.nn.Module):
    """Two tables, of which the second one is used by some batches alone."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Embedding(16, 3, sparse=True)
        self.second = torch.nn.Embedding(16, 3, sparse=True)
        self.out = torch.nn.Linear(3, 1)

    def forward(self, indices):
        hidden = self.first(indices % 16)
        return self.out(hidden + self.second(indices * 7 % 16) if indices[0] % 2 else hidden)


class Sparse(Plain):
    """Rows of gradients that differ by rank; a rank has none of a table that others use."""

    momentum = 0.0

    def make_model(self):
        return Words()

    @property
    def last_to_come(self):
        return self.model.first.weight

    def loss(self, indices, x, y):
        return (self.model(indices) - y).square().mean()


class SparseAsDense(Sparse):
    """They travel as dense ones."""

    def settings(self):
        return {"sparse_as_dense": True}


class Factors(Plain):
    """PowerSGD: what a gradient has lost is this rank's own."""

    rate = 0.002

    def settings(self):
        return {"compression": hvd.Compression.powersgd(rank=1, start_after=2)}

    def make_model(self):
        return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))

    def local(self):
        exchange = self.optimizer._mode._exchange
        kept = [(memory.residual, memory.factor) for memory in exchange.members.memories()]
        return kept, exchange._beginning.steps

    def load_local(self, kept):
        memories, steps = kept
        exchange = self.optimizer._mode._exchange
        exchange._beginning.steps = steps
        for memory, parts in zip(exchange.members.memories(), memories, strict=True):
            memory.keep(*parts)
            memory.settle(used=True)


class Rounded(Plain):
    """8 bits between hosts; what rounding loses is made up for in the next step."""

    rate = 0.0001

    def settings(self):
        return {"compression": hvd.Compression.int8}

    def make_model(self):
        return torch.nn.Sequential(
            torch.nn.Linear(3, 64), torch.nn.Tanh(), torch.nn.Linear(64, 128), torch.nn.Linear(128, 1)
        )

    def local(self):
        return contexts.current()

    def load_local(self, kept):
        error_feedback.inherit(contexts.current(), kept)


class Halves(Plain):
    """Two backward passes in a step, over two halves of the model; each half is reduced by itself."""

    def make_model(self):
        return torch.nn.ModuleList([super(Halves, self).make_model() for _ in range(2)])

    @property
    def last_to_come(self):
        return self.model[0][0].weight

    def loss(self, indices, x, y):
        return [(half(x) - y).square().mean() for half in self.model]

    def one_pass(self, loss, is_last):
        loss[0].backward()
        self.between()
        loss[1].backward()


KINDS = {kind.__name__.lower(): kind for kind in [Plain, *Plain.__subclasses__(), *Sparse.__subclasses__()]}


class Learner:
    """One rank's training, window by window.

    Args:
        name: of the kind.
        strike: is called with the places where a rank may die: "begun" (before the last pass of a window), "backward"
            (within it), "between" (two backward passes of a step) and "released".
        poisoned: samples whose gradients are infinite.

    Attributes:
        window: the number of the open one.
        gathered: the samples of its passes so far.
        has_begun: whether its last pass has.
    """

    def __init__(self, name: str, strike: Callable[[str], None], poisoned: set[int]):
        self.kind = KINDS[name]()
        self.kind.poisoned = poisoned
        self.kind.between = lambda: strike("between")
        self.window, self.gathered, self.has_begun = 0, [], False
        self._strike = strike
        self.kind.last_to_come.register_hook(self._on_gradient)

    def distribute(self):
        """In a world."""
        self.kind.distribute()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.kind.plain, 5, 0.9)

    @property
    def values(self):
        """What a rank that joins takes over."""
        return {
            "model": self.kind.model,
            "optimizer": self.kind.optimizer,
            "schedule": self.schedule,
            **self.kind.further,
        }

    def train_on(self, indices, x, y):
        """One pass, and the update if it is the last one; returns whether it was."""
        if not self.gathered:
            self.kind.optimizer.zero_grad()
        self.has_begun = len(self.gathered) == self.kind.passes - 1
        if self.has_begun:
            self._strike("begun")
        self.kind.one_pass(self.kind.loss(indices, x, y), self.has_begun)
        self.gathered.append(indices.tolist())
        return self.has_begun

    def _on_gradient(self, gradient):
        if self.has_begun:
            self._strike("backward")

    def cut_short(self, update: Callable[[], None]):
        """Where samples are left for a part of the passes: reduces what there is, and updates."""
        self.kind.optimizer.synchronize()
        with self.kind.optimizer.skip_synchronize():
            update()

    def update(self):
        """Ends the window, whose gradients are those of all ranks."""
        self._strike("released")
        self.kind.update()
        self.schedule.step()
        self.gathered, self.has_begun = [], False
        self.window += 1

    def end(self):
        """Windows, bits of what is trained and of the optimizer, learning rate, scale, and updates that were skipped."""
        tensors = [*self.kind.model.state_dict().values()]
        kept = self.kind.optimizer.state.values()
        tensors += [each for of_one in kept for each in of_one.values() if torch.is_tensor(each)]
        assert all(bool(tensor.isfinite().all()) for tensor in tensors), (
            "what is not finite is equal to all that is not"
        )
        bits = b"".join(tensor.numpy().tobytes() for tensor in tensors)
        scale = self.kind.further["scaler"].get_scale() if self.kind.further else 1.0
        return f"{self.window} {hashlib.sha256(bits).hexdigest()} {self.schedule.get_last_lr()[0]} {scale}"
