"""What is checked with PyTorch: operations, training, mixed precision, and times beside DDP's and gloo's.

On the first GPU where torch sees one; else on the CPU, so that CI runs these lines too.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

import torch

import ringtrain.torch as hvd

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def model() -> torch.nn.Module:
    """A few layers, the same each time."""
    torch.manual_seed(1)
    layers = [
        torch.nn.Linear(256, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 512),
        torch.nn.ReLU(),
        torch.nn.Linear(512, 10),
    ]
    return torch.nn.Sequential(*layers).to(DEVICE)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels."""
    torch.manual_seed(2)
    return torch.randn(64, 256).to(DEVICE), torch.randint(10, (64,)).to(DEVICE)


def loss_of(network: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of one batch."""
    return torch.nn.functional.cross_entropy(network(inputs), labels)


def results_are_on_the_device() -> bool:
    """Each operation gives tensors of the device, with the right values."""
    right = True
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        given = torch.arange(12, device=DEVICE).reshape(3, 4).to(dtype)
        found = [
            hvd.allreduce(given, op=hvd.Sum), hvd.broadcast(given, 0), hvd.allgather(given), hvd.reducescatter(given, op=hvd.Sum),
            hvd.alltoall(given), hvd.allreduce_(given.clone(), op=hvd.Max), hvd.allreduce(given.t(), op=hvd.Sum).t(),
        ]  # fmt: skip
        right = right and all(
            each.device == DEVICE and each.dtype == dtype and torch.equal(each, given) for each in found
        )
    return right


def training_is_the_same() -> bool:
    """Five steps of a distributed optimizer of one rank are those of a plain one, as far as sums repeat on the device."""
    ends = []
    for wrap in (lambda optimizer, network: optimizer, _distributed):
        network = model()
        optimizer = wrap(torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9), network)
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(network, *batch()).backward()
            optimizer.step()
        ends.append(_flat(network))
    return torch.allclose(*ends, rtol=1e-4, atol=1e-5) and not torch.allclose(
        ends[0], _flat(model()), rtol=1e-3, atol=1e-3
    )


def an_overflow_skips_the_step() -> bool:
    """With a GradScaler: a step whose gradients overflow changes nothing but the scale, the next one trains."""
    network = model()
    optimizer = _distributed(torch.optim.SGD(network.parameters(), lr=0.1), network)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**8)
    inputs, labels = batch()
    changed = []
    for factor in (float("inf"), 1.0):
        before = network[0].weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.float16 if DEVICE.type == "cuda" else torch.bfloat16):
            loss = loss_of(network, inputs, labels) * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        changed.append(not torch.equal(before, network[0].weight))
    return changed == [False, True] and scaler.get_scale() == 2.0**7


def step_over_that_of_ddp(rounds: int) -> float:
    """Median time of a training step over DDP's, a world of one each, in turns."""
    with tempfile.NamedTemporaryFile() as store:
        backend = "nccl" if DEVICE.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, init_method=f"file://{store.name}.ddp", rank=0, world_size=1)
        wrapped, own = torch.nn.parallel.DistributedDataParallel(model()), model()
        steps = [_step_of(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.01)),
                 _step_of(own, _distributed(torch.optim.SGD(own.parameters(), lr=0.01), own))]  # fmt: skip
        taken: list[list[float]] = [[], []]
        for _ in range(rounds):
            for step, times in zip(steps, taken, strict=True):
                start = time.perf_counter()
                step()
                times.append(time.perf_counter() - start)
        torch.distributed.destroy_process_group()
    ddp, ours = (statistics.median(times[3:]) for times in taken)
    return ours / ddp


def views_train_alike() -> bool:
    """Some steps whose gradients become views of buckets are those of a distributed optimizer without, on every rank."""
    ends = []
    for chosen in ({}, {"gradient_as_bucket_view": True}):
        network = model()
        optimizer = _distributed(torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9), network, **chosen)
        inputs, labels = batch()
        for _ in range(8):
            optimizer.zero_grad()
            loss_of(network, inputs[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]).backward()
            optimizer.step()
        ends.append(_flat(network))
    memories = {parameter.grad.untyped_storage().data_ptr() for parameter in network.parameters()}
    return all(hvd.allgather_object(torch.allclose(*ends, rtol=1e-4, atol=1e-5) and len(memories) == 1))


def two_train_as_one(steps: int) -> bool:
    """Steps on each rank's share of the batch are those of one process on the whole of it, on every rank."""
    ends = []
    for alone in (True, False):
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        if not alone:
            optimizer = _distributed(optimizer, network)
        share = slice(None) if alone else slice(hvd.rank(), None, hvd.size())
        inputs, labels = batch()
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(network, inputs[share], labels[share]).backward()
            optimizer.step()
        ends.append(_flat(network))
    flats = hvd.allgather_object(ends[1].cpu())
    return torch.allclose(*ends, rtol=1e-3, atol=1e-4) and all(torch.equal(flats[0], flat) for flat in flats)


def by_hand_over_ours(megabytes: int, rounds: int) -> float:
    """Median time of a copy to the host, an allreduce there and a copy back over that of an allreduce of the tensor."""
    tensor = torch.ones(megabytes << 18, device=DEVICE)

    def by_hand() -> None:
        tensor.copy_(hvd.allreduce(tensor.cpu(), name="by hand"))

    taken = [[_seconds(work) for _ in range(rounds)] for work in (by_hand, lambda: hvd.allreduce_(tensor, name="ours"))]
    return statistics.median(taken[0]) / statistics.median(taken[1])


def seconds_of_foreach_copies(sizes: list[int], rounds: int) -> float:
    """Seconds that ``torch._foreach_copy_`` takes for tensors of so many elements into one flat tensor and back."""
    tensors = [torch.ones(size, device=DEVICE) for size in sizes]
    flat = torch.empty(sum(sizes), device=DEVICE)
    views = list(flat.split(sizes))

    def there_and_back() -> None:
        torch._foreach_copy_(views, tensors)
        torch._foreach_copy_(tensors, views)

    there_and_back()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        there_and_back()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds


def gloo_over_ours(megabytes: int, rounds: int) -> float:
    """Median time of gloo's allreduce of one tensor over ours, on the launcher's ranks, in turns."""
    tensor = torch.ones(megabytes << 18, device=DEVICE)
    with tempfile.TemporaryDirectory() as own:
        store = hvd.broadcast_object(f"file://{own}/store", 0)
        torch.distributed.init_process_group("gloo", init_method=store, rank=hvd.rank(), world_size=hvd.size())
        ours: list[float] = []
        gloos: list[float] = []
        for _ in range(rounds):
            ours.append(_seconds(lambda: hvd.allreduce_(tensor, name="beside gloo's")))
            gloos.append(
                _seconds(lambda: torch.distributed.all_reduce(tensor))
            )  # 2 to the number of rounds is little enough
        torch.distributed.destroy_process_group()
        hvd.barrier()  # the folder is rank 0's
    return statistics.median(gloos) / statistics.median(ours)


def _seconds(work: Callable[[], object]) -> float:
    hvd.barrier()
    start = time.perf_counter()
    work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _step_of(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    inputs, labels = batch()

    def step() -> None:
        optimizer.zero_grad()
        loss_of(network, inputs, labels).backward()
        optimizer.step()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    return step


def _flat(network: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def _distributed(optimizer: torch.optim.Optimizer, network: torch.nn.Module, **chosen: bool) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters(), **chosen)
