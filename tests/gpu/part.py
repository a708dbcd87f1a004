"""One part of the plan, in a process whose environment names the driver: python -m gpu.part NAME. ``check`` starts it.

Prints a line of JSON for each result: what was checked, whether it is right, a figure, and its target.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from fakes import driver

import ringtrain as rt
from gpu import collectives, kernels, machine
from ringtrain import launcher
from ringtrain.testing import World


def report(what: str, right: bool, figure: str = "", target: str = "") -> None:
    """Prints a result, where this is the process of rank 0 or the only one."""
    if not rt.is_initialized() or rt.rank() == 0:
        print(json.dumps({"what": what, "right": bool(right), "figure": figure, "target": target}), flush=True)


def load() -> None:
    """The libraries, and where they were found."""
    for name, (version, path) in rt.gpu_libraries().items():
        report(f"{name} is found", bool(version), f"{version} {path}".strip())


def pack_kernels() -> None:
    """Every kernel, bit for bit."""
    for tensor, buffer in kernels.PAIRS:
        right = all(kernels.is_exact(tensor, buffer, kernels.SIZES, shift) for shift in (0, 1, 2))
        report(f"{tensor} tensors, {buffer} buffer: all sizes and offsets", right)
    for count in (1, 161, 1361):
        report(f"{count} tensors", kernels.is_exact("float32", "bfloat16", [i % 97 for i in range(count)], 1))
    found = [kernels.finds_infinity(value) for value in (1.0, float("inf"), float("-inf"), float("nan"))]
    report("infinities are found", found == [False, True, True, True])
    for dtype in kernels.CARRIERS:
        right = all(
            kernels.sums_in_order(dtype, members, elements)
            for members, elements in ((2, 1), (3, 16385), (8, 1 << 17), (5, 1003))
        )
        report(f"{dtype} sums in the order of the ranks", right)


def floors() -> None:
    """Packing against copying."""
    million, rounds = (1, 1) if machine.is_fake() else (256, 20)
    resnet = [
        64 * 147,
        64,
        64,
        64 * 64,
        64 * 576,
        64 * 256,
        256,
        128 * 256,
        128 * 1152,
        512,
        2359296,
        1048576,
        2048 * 1000,
    ]
    many = resnet * max(1, (million << 20) // sum(resnet))
    for what, sizes, limit in (
        ("one tensor", [million << 20], 1.15),
        ("ResNet-50's shapes again and again", many, 1.25),
    ):
        share, rate = kernels.shares_of_floor(sizes, rounds)
        right = machine.is_fake() or share <= limit
        report(
            f"pack + unpack of {what}, {4 * sum(sizes) / 2**30:.2f} GiB",
            right,
            f"{share:.2f} x the copies ({rate / 1e12:.2f} TB/s)",
            f"{limit} x",
        )


def order() -> None:
    """Streams, with a world of one."""
    in_world(
        1,
        "auto",
        lambda: (
            report("a late kernel's values are awaited", collectives.late_writer_is_awaited(3, 50)),
            report("dropped tensors live on", collectives.dropped_tensors_live_on(50 if machine.is_fake() else 1000)),
            report("refusals are clear", collectives.refusals_are_clear()),
            report(
                "CPU in allreduce_async and wait, GPU busy for 200 ms",
                True,
                f"{1e3 * collectives.seconds_in_synchronize(200):.2f} ms",
                "1 ms by NCCL",
            ),
            report("CPU of allreduce_async_", True, f"{collectives.microseconds_of_a_submission(20):.1f} us", "15 us"),
        ),
    )


def torch_tensors() -> None:
    """PyTorch, in a world of one."""
    from gpu import torch_checks  # here: the other parts do without torch

    rt.init()
    where = str(torch_checks.DEVICE)
    report(f"results are tensors of {where}", torch_checks.results_are_on_the_device())
    report(f"training on {where} is that of a plain optimizer", torch_checks.training_is_the_same())
    report(f"an overflow on {where} skips the step", torch_checks.an_overflow_skips_the_step())
    report(f"a step on {where} beside DDP's", True, f"{torch_checks.step_over_that_of_ddp(30):.2f} x", "1.02 x")


def torch_ranks() -> None:
    """PyTorch, on the launcher's ranks, staged."""
    from gpu import torch_checks

    rt.init(gpu_plane="staged")
    report("training with views of buckets is that without", torch_checks.views_train_alike())
    megabytes, rounds = (1, 2) if machine.is_fake() else (64, 10)
    ratio = torch_checks.gloo_over_ours(megabytes, rounds)
    report(f"gloo's allreduce of {megabytes} MB over ours, on {torch_checks.DEVICE}", True, f"{ratio:.1f} x", "3 x")
    rt.shutdown()


def two_ranks(plane: str) -> Callable[[], None]:
    """The operations, by one plane, of whatever world this process is in; two threads without a launcher."""

    def checks() -> None:
        report("every operation and dtype is right", collectives.operations_are_right())
        report("bfloat16 by DLPack is right", collectives.bfloat16_is_summed())
        report("factors and compression are right", collectives.floats_scale_and_compress())
        report("late kernels' values are awaited", collectives.late_writer_is_awaited(2, 20))
        for megabytes in (1,) if machine.is_fake() else (1, 16, 64, 256):
            seconds = collectives.seconds_of_allreduce(megabytes, 5)
            report(
                f"allreduce of {megabytes} MB", True, f"{1e3 * seconds:.2f} ms, {megabytes / 1e3 / seconds:.2f} GB/s"
            )

    return lambda: in_world(2, plane, checks)


def in_world(size: int, plane: str, checks: Callable[[], object]) -> None:
    """Runs the checks on the launcher's ranks, or on threads of this process without one."""
    options = {"gpu_plane": plane, "nccl_multi_rank": int(plane == "nccl")}
    if launcher.find(os.environ) is not None:
        rt.init(**options)
        checks()
        rt.shutdown()
        return
    with World(size, **options) as world:
        world.run(lambda rank: checks())


PARTS: dict[str, Callable[[], None]] = {
    "load": load,
    "kernels": pack_kernels,
    "floors": floors,
    "order": order,
    "torch": torch_tensors,
    "torch_ranks": torch_ranks,
    "staged": two_ranks("staged"),
    "nccl": two_ranks("nccl"),
}

if __name__ == "__main__":
    if sys.argv[1] != "load":
        driver.use_device(0)
    PARTS[sys.argv[1]]()
