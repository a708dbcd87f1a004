"""Times of training steps and of an allreduce with PyTorch, beside DDP's, gloo's and a plain optimizer's.

On the first GPU where torch sees one; else on the CPU, so that CI runs these lines too.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

import ringtrain.torch as hvd
from gpu import collectives
from gpu.torch_checks import DEVICE, distributed, model, step_of


def step_over_that_of_ddp(rounds: int) -> float:
    """Median time of a training step over DDP's, a world of one each, in turns."""
    with tempfile.NamedTemporaryFile() as store:
        backend = "nccl" if DEVICE.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, init_method=f"file://{store.name}.ddp", rank=0, world_size=1)
        wrapped, own = torch.nn.parallel.DistributedDataParallel(model()), model()
        steps = [step_of(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.01)),
                 step_of(own, distributed(torch.optim.SGD(own.parameters(), lr=0.01), own))]  # fmt: skip
        ddp, ours = medians_of(steps, rounds)
        torch.distributed.destroy_process_group()
    return ours / ddp


def step_over_a_plain_one(rounds: int) -> tuple[float, float]:
    """Median time of a step of ResNet-50 in bfloat16, a world of one, over that of a plain optimizer; and its seconds."""
    import torchvision  # here: the other times do without

    steps = []
    for wraps in (False, True):
        torch.manual_seed(1)
        network = torchvision.models.resnet50().to(DEVICE, memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        steps.append(_step_of_images(network, distributed(optimizer, network) if wraps else optimizer))
    plain, ours = medians_of(steps, rounds)
    return ours / plain, ours


def _step_of_images(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    images = torch.randn(64, 3, 224, 224, device=DEVICE).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (64,), device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()

    return step


def medians_of(steps: list[Callable[[], None]], rounds: int) -> list[float]:
    """Median seconds of each step, taken in turns; the first three rounds warm up."""
    taken: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, times in zip(steps, taken, strict=True):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    return [statistics.median(times[3:]) for times in taken]


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


def microseconds_of_a_submission(rounds: int) -> float:
    """Median CPU time of ``allreduce_async_`` of a small tensor, under names that come again."""
    tensors = [torch.ones(256, device=DEVICE) for _ in range(16)]
    return collectives.microseconds_of(
        [functools.partial(hvd.allreduce_async_, each, name=f"submitted.{index}") for index, each in enumerate(tensors)],
        hvd.synchronize, rounds,
    )  # fmt: skip
