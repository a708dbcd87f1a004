"""What the training benchmarks compare: each trains a copy of one PyTorch network in its own way."""

import hashlib
import importlib.metadata
import math
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain._runtime import context as contexts
from ringtrain.bench import ranks
from ringtrain.bench.measured_worlds import MeasuredWorld
from ringtrain.bench.torch_networks import Batch, loss_of
from ringtrain.errors import UnsupportedError

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


def make_optimizer(network: torch.nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    """The optimizer of all of them, where a benchmark has none of its own."""
    return torch.optim.SGD(network.parameters(), lr=0.01, momentum=momentum)


def replicas_are_equal(network: torch.nn.Module) -> bool:
    """Whether the network's parameters are equal bit for bit on all ranks."""
    digest = hashlib.sha256()
    for parameter in network.parameters():
        digest.update(parameter.detach().contiguous().numpy().data)
    return len(set(ranks.gathered(digest.hexdigest()))) == 1


class TrainingSystem(Protocol):
    """What a training benchmark needs from a system.

    Attributes:
        communicates: False for the floor, whose ranks train alone.
        passes: backward passes in a step.
        loses: how far off its parameters may be after some steps, as a share of the way that they have come; 0 for what
            rounding in float32 does, and infinity for another algorithm.
    """

    name: str
    communicates: bool
    passes: int
    loses: float
    optimizer: torch.optim.Optimizer  # of the network that it uses

    def use(self, network: torch.nn.Module, make: MakeOptimizer = make_optimizer) -> None:
        """Takes the network that the coming steps train, and makes its optimizer."""

    def accumulate(self, passes: int) -> None:
        """From the next step on, so many backward passes make one."""

    def step(self, batch: Batch) -> None:
        """One training step, with this rank's batch in each of its passes; this is what is timed."""

    def sent(self) -> int:
        """Bytes of gradients that this rank has sent to other hosts so far; 0 where that is not known."""

    def finish(self) -> None:
        """Makes the replicas equal, where the steps do not: before the network is evaluated."""

    def close(self) -> None:
        """Gives back what it holds."""


class NoExchange:
    """The floor: every rank trains its own network on its own batches, all at the same time."""

    name = "alone"
    communicates = False
    passes = 1
    loses = 0.0

    def use(self, network: torch.nn.Module, make: MakeOptimizer = make_optimizer) -> None:
        self.network = network
        self.optimizer = make(network)

    def accumulate(self, passes: int) -> None:
        self.passes = passes

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.passes):
            loss_of(self.network, batch).backward()
        self.optimizer.step()

    def sent(self) -> int:
        return 0

    def finish(self) -> None:
        pass

    def close(self) -> None:
        del self.network, self.optimizer


class RingtrainTorch(NoExchange):
    """Ours, in the world that ``hvd.init`` opened.

    Args:
        variant: what its name says beyond ours.
        layout: ranks of each simulated host; None for the hosts that there are.
        settings: arguments of ``DistributedOptimizer``.
    """

    name = "ringtrain"
    communicates = True

    def __init__(self, variant: str = "", layout: str | None = None, **settings: Any) -> None:
        self.name = f"{RingtrainTorch.name}-{variant}" if variant else RingtrainTorch.name
        self._settings = settings
        hvd.init(host_layout=layout)

    def use(self, network: torch.nn.Module, make: MakeOptimizer = make_optimizer) -> None:
        super().use(network, make)
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, network.named_parameters(), **self._settings)

    def accumulate(self, passes: int) -> None:
        super().accumulate(passes)
        self.optimizer.set_backward_passes_per_step(passes)

    def sent(self) -> int:
        return rt.counters()["wire_bytes_sent"]

    def finish(self) -> None:
        self.optimizer.flush()
        if isinstance(self._settings.get("mode"), hvd.LocalSteps):
            self.optimizer.synchronize()

    def close(self) -> None:
        super().close()
        hvd.shutdown()


class RingtrainShardedStep(RingtrainTorch):
    """Ours with shares of the optimizer's state; new values travel in the next forward pass."""

    def __init__(self) -> None:
        super().__init__("sharded-step")

    def use(self, network: torch.nn.Module, make: MakeOptimizer = make_optimizer) -> None:
        self._settings = {"mode": hvd.ShardedStep(network)}
        super().use(network, make)


class InAWorldOfItsOwn(RingtrainTorch):
    """Ours in a world over TCP beside the others', with other options.

    Args:
        variant: what its name says beyond ours.
        chosen: options of that world.
    """

    def __init__(self, variant: str, **chosen: object):
        self.name, self._settings = f"{RingtrainTorch.name}-{variant}", {}
        host = socket.gethostname()
        self._world = MeasuredWorld("tcp", {host: [socket.gethostbyname(host)]}, **chosen)

    def use(self, network: torch.nn.Module, make: MakeOptimizer = make_optimizer) -> None:
        with self._within():
            super().use(network, make)

    def step(self, batch: Batch) -> None:
        with self._within():
            super().step(batch)

    def sent(self) -> int:
        with self._within():
            return super().sent()

    @contextmanager
    def _within(self) -> Iterator[None]:
        self._world.enter()
        try:
            yield
        finally:
            contexts.make_current(None)  # that of ``hvd.init`` again

    def close(self) -> None:
        NoExchange.close(self)
        self._world.context.close()


class Horovod(NoExchange):
    """Horovod, where its own package is installed and was built for an MPI, which has started the ranks."""

    name = "horovod"
    communicates = True

    def __init__(self) -> None:
        try:
            found = importlib.metadata.version("horovod")
        except importlib.metadata.PackageNotFoundError:
            raise UnsupportedError(
                "peer 'horovod': Horovod must be installed, built with PyTorch and an MPI, but is not. Leave it out, or install "
                "horovod[pytorch]."
            ) from None
        import horovod.torch

        if not ranks.IS_OVER_MPI or not horovod.torch.mpi_built():
            raise UnsupportedError(
                f"peer 'horovod': the ranks must meet by an MPI, but Horovod {found} was built without, or TCP connects them. "
                "Leave it out, or set RINGTRAIN_TRANSPORT=mpi and build it with HOROVOD_WITH_MPI=1."
            )
        self._horovod = horovod.torch
        self._horovod.init()

    def use(self, network: torch.nn.Module, make: MakeOptimizer = make_optimizer) -> None:
        super().use(network, make)
        self.optimizer = self._horovod.DistributedOptimizer(self.optimizer, network.named_parameters())

    def close(self) -> None:
        super().close()
        self._horovod.shutdown()


class RingtrainLocalSteps(RingtrainTorch):
    """Ours with local steps: what it calls a step is as many of them as lie between two averages, so it has as many passes.

    It is another algorithm, whose parameters are compared with nobody's: only its replicas must be equal.
    """

    loses = math.inf

    def __init__(self, every: int) -> None:
        super().__init__(f"every-{every}", mode=hvd.LocalSteps(every))
        self.passes = every

    def step(self, batch: Batch) -> None:
        for _ in range(self.passes):
            self.optimizer.zero_grad()
            loss_of(self.network, batch).backward()
            self.optimizer.step()


class _Groups:
    """Process groups of torch.distributed for systems that take turns: the default one is gloo's while any is open."""

    def __init__(self) -> None:
        self._open = 0

    def open(self, backend: str) -> torch.distributed.ProcessGroup:
        """A group of all ranks."""
        if self._open == 0:
            self._folder = ranks.shared_folder()
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{self._folder}/store", rank=ranks.rank(), world_size=ranks.size()
            )
        self._open += 1
        if backend == "gloo":
            return torch.distributed.group.WORLD
        return torch.distributed.new_group(backend=backend)

    def close(self) -> None:
        """Gives one back; the last one ends all of them."""
        self._open -= 1
        if self._open == 0:
            torch.distributed.destroy_process_group()
            ranks.wait_for_all()
            shutil.rmtree(self._folder, ignore_errors=True)


_groups = _Groups()


class Ddp(NoExchange):
    """torch's DistributedDataParallel over gloo, with the settings that it comes with."""

    name = "ddp"
    communicates = True
    backend = "gloo"

    def __init__(self) -> None:
        self._group = _groups.open(self.backend)

    def use(self, network: torch.nn.Module, make: MakeOptimizer = make_optimizer) -> None:
        super().use(torch.nn.parallel.DistributedDataParallel(network, process_group=self._group), make)

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        with self.network.no_sync():
            for _ in range(self.passes - 1):
                loss_of(self.network, batch).backward()
        loss_of(self.network, batch).backward()
        self.optimizer.step()

    def close(self) -> None:
        super().close()
        del self._group
        _groups.close()


class DdpOfOurs(Ddp):
    """The same over our backend of torch.distributed, in the world that ``hvd.init`` opened."""

    name = "ddp-ringtrain"
    backend = "ringtrain"

    def __init__(self) -> None:
        hvd.init()
        super().__init__()

    def close(self) -> None:
        super().close()
        hvd.shutdown()


class DdpThatSendsNothing(Ddp):
    """DDP's own floor: it copies gradients into its buckets and back, and each rank keeps what it had."""

    name = "ddp-silent"
    communicates = False

    def use(self, network: torch.nn.Module, make: MakeOptimizer = make_optimizer) -> None:
        super().use(network, make)
        self.network.register_comm_hook(None, _send_nothing)


def _send_nothing(_: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    sent: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    sent.set_result(bucket.buffer())
    return sent


class PowerSgd(Ddp):
    """DDP with torch's PowerSGD hook, from the third step on, as it must be exact at first."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.name = f"ddp-powersgd-{rank}"
        self._rank = rank

    def use(self, network: torch.nn.Module, make: MakeOptimizer = make_optimizer) -> None:
        super().use(network, make)
        self._state = PowerSGDState(None, matrix_approximation_rank=self._rank, start_powerSGD_iter=2)
        self.network.register_comm_hook(self._state, powerSGD_hook)

    def sent(self) -> int:
        """By the elements that the hook counts, from the third step on, where each is alone on its host."""
        return round(2 * (ranks.size() - 1) / ranks.size() * 4 * self._state.total_numel_after_compression)


def _compressed(compression: str, loses: float) -> Callable[[], TrainingSystem]:
    def make() -> TrainingSystem:
        system = RingtrainTorch(compression, compression=getattr(hvd.Compression, compression))
        system.loses = loses
        return system

    return make


def _accumulating(passes: int) -> Callable[[], TrainingSystem]:
    def make() -> TrainingSystem:
        system = RingtrainTorch(f"{passes}-passes", backward_passes_per_step=passes, average_aggregated_gradients=True)
        system.passes = passes
        return system

    return make


# What ``--peers`` can name: ours with gradients that become views of buckets, that travel in fewer bytes, or less often,
# over TCP, and that with settings that were tuned before; Horovod; and DDP, over gloo, over our backend, and without
# anything to send.
PEERS: dict[str, Callable[[], TrainingSystem]] = {
    "buckets": lambda: RingtrainTorch("buckets", mode=hvd.Synchronous(gradient_as_bucket_view=True)),
    "uncompared": lambda: RingtrainTorch(
        "uncompared", mode=hvd.Synchronous(replicas="differ")
    ),  # what it costs to notice drift
    "fp16": _compressed("fp16", loses=0.01),
    "bf16": _compressed("bf16", loses=0.02),
    "int8": _compressed("int8", loses=0.1),
    "int4": _compressed("int4", loses=0.6),
    "4-passes": _accumulating(4),
    "every-32": partial(RingtrainLocalSteps, 32),
    "sharded-step": RingtrainShardedStep,
    "tcp": partial(InAWorldOfItsOwn, "tcp"),
    "horovod": Horovod,
    "ddp": Ddp,
    "ddp-ringtrain": DdpOfOurs,
    "ddp-silent": DdpThatSendsNothing,
}
