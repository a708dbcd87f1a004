"""What the training benchmarks compare: each trains a copy of one PyTorch network in its own way."""

import hashlib
import shutil
from typing import Protocol

import torch
import torch.distributed

import ringtrain.torch as hvd
from ringtrain.bench import ranks
from ringtrain.bench.torch_networks import Batch, loss_of


def make_optimizer(network: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all of them."""
    return torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)


def replicas_are_equal(network: torch.nn.Module) -> bool:
    """Whether the network's parameters are equal bit for bit on all ranks."""
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in network.parameters())
    return len(set(ranks.gathered(hashlib.sha256(bits).hexdigest()))) == 1


class TrainingSystem(Protocol):
    """What a training benchmark needs from a system."""

    name: str
    communicates: bool  # False for the floor, whose ranks train alone

    passes: int  # backward passes in a step

    def use(self, network: torch.nn.Module) -> None:
        """Takes the network that the coming steps train."""

    def accumulate(self, passes: int) -> None:
        """From the next step on, so many backward passes make one."""

    def step(self, batch: Batch) -> None:
        """One training step, with this rank's batch in each of its passes; this is what is timed."""

    def close(self) -> None:
        """Gives back what it holds."""


class Alone:
    """The floor: every rank trains its own network on its own batches, all at the same time."""

    name = "alone"
    communicates = False
    passes = 1

    def use(self, network: torch.nn.Module) -> None:
        self.network = network
        self.optimizer = make_optimizer(network)

    def accumulate(self, passes: int) -> None:
        self.passes = passes

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.passes):
            loss_of(self.network, batch).backward()
        self.optimizer.step()

    def close(self) -> None:
        del self.network, self.optimizer


class Ringtrain(Alone):
    """Ours, in the world that ``hvd.init`` opened."""

    name = "ringtrain"
    communicates = True

    def __init__(self):
        hvd.init()

    def use(self, network: torch.nn.Module) -> None:
        super().use(network)
        self.optimizer = self._distributed(self.optimizer, network)

    def accumulate(self, passes: int) -> None:
        super().accumulate(passes)
        self.optimizer.set_backward_passes_per_step(passes)

    def close(self) -> None:
        super().close()
        hvd.shutdown()

    def _distributed(self, optimizer: torch.optim.Optimizer, network: torch.nn.Module) -> torch.optim.Optimizer:
        return hvd.DistributedOptimizer(optimizer, network.named_parameters())


class RingtrainBuckets(Ringtrain):
    """Ours with gradients that become views of buckets, beside ours without them."""

    name = "ringtrain-buckets"

    def _distributed(self, optimizer: torch.optim.Optimizer, network: torch.nn.Module) -> torch.optim.Optimizer:
        return hvd.DistributedOptimizer(optimizer, network.named_parameters(), gradient_as_bucket_view=True)


class Ddp(Alone):
    """torch's DistributedDataParallel over gloo, with the settings that it comes with."""

    name = "ddp"
    communicates = True

    def __init__(self):
        self._folder = ranks.shared_folder()
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{self._folder}/store", rank=ranks.rank(), world_size=ranks.size()
        )

    def use(self, network: torch.nn.Module) -> None:
        super().use(torch.nn.parallel.DistributedDataParallel(network))

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        with self.network.no_sync():
            for _ in range(self.passes - 1):
                loss_of(self.network, batch).backward()
        loss_of(self.network, batch).backward()
        self.optimizer.step()

    def close(self) -> None:
        super().close()
        torch.distributed.destroy_process_group()
        ranks.wait_for_all()
        shutil.rmtree(self._folder, ignore_errors=True)


PEERS = {"buckets": RingtrainBuckets, "ddp": Ddp}
