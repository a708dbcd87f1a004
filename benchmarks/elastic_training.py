"""What the ranks of `python -m benchmarks faults --elastic` train, in the way of each system; not for users' own jobs.

``python -m benchmarks.elastic_training SYSTEM FOLDER`` is one rank. A network of three layers has as many bytes as
asked for; a sample is a batch of its own, drawn from its number, so that a step's gradients follow from the samples that
were dealt for it. All systems have the same network, optimizer and samples, and note alike.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.elastic_records import APPLIED, DRAWN, Notes

SAMPLES = 200_000  # of an epoch
BATCH = 8
INPUTS, CLASSES = 64, 10


class Samples(torch.utils.data.Dataset):
    """The numbers of an epoch's samples."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (BATCH, INPUTS) and labels (BATCH,), the same wherever they are drawn."""
    drawn = torch.Generator().manual_seed(number)
    return torch.randn(BATCH, INPUTS, generator=drawn), torch.randint(CLASSES, (BATCH,), generator=drawn)


def make_network(size_bytes: int) -> nn.Module:
    """Three layers, the same on all ranks, of about so many bytes."""
    torch.manual_seed(0)
    width = max(8, math.isqrt(size_bytes // 4) - (INPUTS + CLASSES) // 2)
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES)
    )


def make_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum: the state is twice the network."""
    return torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)


def digest_of(network: nn.Module) -> str:
    """Of the bits of all parameters."""
    bits = hashlib.sha256()
    for parameter in network.parameters():
        bits.update(parameter.detach().numpy().tobytes())
    return bits.hexdigest()


class Job:
    """What one rank is asked for and tells, whichever system trains.

    Args:
        folder: where all ranks note. A file ``last`` in it has the number of the last step; ``fail-N`` has slot N raise.
        size_bytes: of the network.
        pace_seconds: a step takes at least so long: it sleeps for the rest, as a processor waits for an accelerator.
        checkpoint_steps: of systems that go back to a checkpoint.
        slot: of this rank.
    """

    def __init__(self, folder: Path, size_bytes: int, pace_seconds: float, checkpoint_steps: int, slot: int):
        self.folder, self.size_bytes, self.slot = folder, size_bytes, slot
        self.pace_seconds, self.checkpoint_steps = pace_seconds, checkpoint_steps
        self._notes = Notes(folder, slot)
        self._begun = 0.0

    def drawn(self, step: int, world: int, rank: int, size: int, index: int) -> None:
        """A step begins."""
        self._begun = time.monotonic()
        self._notes.add(DRAWN, self._begun, step, world, rank, size, index)

    def backward(self, network: nn.Module, number: int) -> None:
        """Computes with a sample, for as long as a step takes at least."""
        x, y = sample(number)
        loss = nn.functional.cross_entropy(network(x), y)
        time.sleep(max(0.0, self._begun + self.pace_seconds - time.monotonic()))
        loss.backward()

    def applied(self, step: int, world: int, rank: int, size: int) -> None:
        """A step is done."""
        self._notes.add(APPLIED, time.monotonic(), step, world, rank, size)
        if (self.folder / f"fail-{self.slot}").exists():
            (self.folder / f"fail-{self.slot}").unlink()
            raise ValueError("the fault")

    def ends(self, step: int) -> bool:
        """Whether this was the last step."""
        try:
            return step >= int((self.folder / "last").read_text())
        except (FileNotFoundError, ValueError):  # ValueError: it is being written
            return False

    def end(self, network: nn.Module) -> None:
        """Leaves what the rank has come to."""
        whole = self.folder / f".end-{os.getpid()}"
        whole.write_text(digest_of(network))
        whole.rename(self.folder / f"end-{os.getpid()}")


def train_by_ringtrain(job: Job) -> None:
    """In an elastic job, with the two lines of docs/elastic.md.

    Network and optimizer are made before the rank is one of the world: the first optimizer has torch import a third of what
    itself is, and from ``init`` on the others would wait for that.
    """
    import ringtrain.torch as hvd
    from ringtrain._runtime.context import current

    network = make_network(job.size_bytes)
    optimizer = make_optimizer(network)
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, network.named_parameters())
    sampler = hvd.elastic.ElasticSampler(Samples())
    loader = torch.utils.data.DataLoader(Samples(), batch_size=None, sampler=sampler)
    state = hvd.elastic.State(model=network, optimizer=optimizer, sampler=sampler)
    ends = False
    for epoch in state.epochs(sys.maxsize):
        for index in loader:
            number = epoch * SAMPLES + index
            job.drawn(state.step + 1, current().world, hvd.rank(), hvd.size(), number)
            optimizer.zero_grad()
            job.backward(network, number)
            optimizer.step()
            job.applied(state.step, current().world, hvd.rank(), hvd.size())
            if ends := job.ends(state.step):
                break
        if ends:
            break
    job.end(network)


def train_by_torchrun(job: Job) -> None:
    """With DDP, from a checkpoint that rank 0 writes each so many steps, as torchrun's documentation has it."""
    import torch.distributed as distributed

    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    distributed.init_process_group("gloo", **_store_of(job, attempt))
    rank, size = distributed.get_rank(), distributed.get_world_size()
    network = make_network(job.size_bytes)
    optimizer = make_optimizer(network)
    checkpoint = job.folder / "checkpoint.npz"
    step = _load(checkpoint, network, optimizer) if checkpoint.exists() else 0
    replicas = nn.parallel.DistributedDataParallel(network)
    while not job.ends(step):
        step += 1
        job.drawn(step, attempt, rank, size, step * size + rank)
        optimizer.zero_grad()
        job.backward(replicas, step * size + rank)
        optimizer.step()
        job.applied(step, attempt, rank, size)
        if rank == 0 and step % job.checkpoint_steps == 0:
            _save(checkpoint, network, optimizer, step)
    job.end(network)
    distributed.destroy_process_group()


def _save(checkpoint: Path, network: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Writes a file that is whole from the first moment, as arrays, which nobody unpickles."""
    whole = checkpoint.with_name(".checkpoint.npz")
    parameters = list(network.parameters())
    momenta = [optimizer.state[each]["momentum_buffer"] for each in parameters]
    np.savez(whole, np.array(step), *(each.detach().numpy() for each in [*parameters, *momenta]))
    whole.rename(checkpoint)


def _load(checkpoint: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Goes back to a checkpoint; returns its step."""
    parameters = list(network.parameters())
    with np.load(checkpoint) as saved:
        arrays = [torch.from_numpy(saved[f"arr_{place}"]) for place in range(1, 1 + 2 * len(parameters))]
        for place, parameter in enumerate(parameters):
            parameter.data.copy_(arrays[place])
            optimizer.state[parameter]["momentum_buffer"] = arrays[len(parameters) + place]
        return int(saved["arr_0"])


def _store_of(job: Job, attempt: int) -> dict[str, Any]:
    """A fresh store for each attempt: in the agent's own, restarted ranks find the addresses of the dead and give up."""
    store = f"file://{job.folder}/store-{attempt}"
    return {"init_method": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


def train_by_torchft(job: Job) -> None:
    """Each rank a replica group of its own, which asks a lighthouse for a quorum in each step."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    network = make_network(job.size_bytes)
    optimizer = make_optimizer(network)

    def load(saved: dict[str, Any]) -> None:
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        load_state_dict=load,
        state_dict=lambda: {"network": network.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"slot-{job.slot}-",
    )
    replicas = DistributedDataParallel(manager, network)
    managed = Optimizer(manager, optimizer)
    tries = 0
    while not job.ends(manager.current_step()):
        tries += 1
        job.drawn(manager.current_step() + 1, manager._quorum_id, job.slot, 0, tries * 64 + job.slot)
        managed.zero_grad()
        job.backward(replicas, tries * 64 + job.slot)
        before = manager.current_step()
        managed.step()
        if manager.current_step() > before:
            size, place = manager.num_participants(), manager.participating_rank()
            job.applied(manager.current_step(), manager._quorum_id, -1 if place is None else place, size)
    job.end(network)


def train_by_plan(job: Job) -> None:
    """A job of a fixed size, which is told whose gradients are in which step: what the job with faults must have come to."""
    import ringtrain.torch as hvd

    hvd.init()
    plan = json.loads((job.folder / "plan.json").read_text())
    members = {size: hvd.add_process_set(range(size)) for size in range(1, hvd.size())} | {
        hvd.size(): hvd.global_process_set
    }
    network = make_network(job.size_bytes)
    optimizer = make_optimizer(network)
    for indices in _by_members(plan):
        ours = members[len(indices[0])]
        if hvd.rank() in range(len(indices[0])):
            distributed = hvd.DistributedOptimizer(optimizer, network.named_parameters(), process_set=ours)
            for step in indices:
                x, y = sample(step[hvd.rank()])
                distributed.zero_grad()
                nn.functional.cross_entropy(network(x), y).backward()
                distributed.step()
        network, optimizer = _taken_over(network, optimizer)
    job.end(network)
    hvd.shutdown()


def _by_members(plan: list[list[int]]) -> Iterator[list[list[int]]]:
    """The steps, cut where the number of ranks changes."""
    begin = 0
    for end in range(1, len(plan) + 1):
        if end == len(plan) or len(plan[end]) != len(plan[begin]):
            yield plan[begin:end]
            begin = end


def _taken_over(network: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network and an optimizer without hooks, with the state of rank 0, on all ranks."""
    import ringtrain.torch as hvd

    fresh = nn.Sequential(*(type(layer)(*_shape(layer)) for layer in network))
    fresh.load_state_dict(network.state_dict())
    kept = hvd.broadcast_object(optimizer.state_dict(), 0)
    hvd.broadcast_parameters(fresh.state_dict(), root_rank=0)
    renewed = make_optimizer(fresh)
    renewed.load_state_dict(kept)
    return fresh, renewed


def _shape(layer: nn.Module) -> tuple[int, ...]:
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else ()


SYSTEMS: dict[str, Callable[[Job], None]] = {
    "ringtrain": train_by_ringtrain,
    "torchrun": train_by_torchrun,
    "torchft": train_by_torchft,
    "plan": train_by_plan,
}


def main() -> None:
    """Trains as one rank."""
    parser = argparse.ArgumentParser(description="One rank of a job of `python -m benchmarks faults --elastic`.")
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--pace-seconds", type=float, default=0.0)
    parser.add_argument("--checkpoint-steps", type=int, default=50)
    given = parser.parse_args()
    slot = next(int(os.environ[name]) for name in ("RINGTRAIN_RANK", "REPLICA_GROUP_ID", "RANK") if name in os.environ)
    torch.set_num_threads(1)
    SYSTEMS[given.system](Job(given.folder, given.bytes, given.pace_seconds, given.checkpoint_steps, slot))


if __name__ == "__main__":
    main()
