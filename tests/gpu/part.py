"""One part of the plan, in a process whose environment names the driver: python -m gpu.part NAME. ``check`` starts it.

Prints a line of JSON for each result: what was checked, whether it is right, a figure, and its target.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from fakes import driver
from fakes.array import FakeDeviceArray as DeviceArray

import ringtrain as rt
from gpu import collectives, kernels, machine
from ringtrain._rendezvous import launcher
from ringtrain.testing import World


def report(what: str, right: bool, figure: str = "", target: str = "") -> None:
    """Prints a result, where this is the process of rank 0 or the only one."""
    if not rt.is_initialized() or rt.rank() == 0:
        print(json.dumps({"what": what, "right": bool(right), "figure": figure, "target": target}), flush=True)


def report_absent(what: str, why: str) -> None:
    """Prints what could not be checked here: no fault."""
    if not rt.is_initialized() or rt.rank() == 0:
        print(json.dumps({"what": what, "right": True, "absent": True, "figure": why, "target": ""}), flush=True)


def said_by(*command: str, **variables: str) -> str:
    """The last line that a command says, or why it says none."""
    try:
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=100)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"none: {problem}"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [""]
    return lines[-1] if done.returncode == 0 else f"none: {lines[-1]}"


def version_of(module: str) -> str:
    """Of a Python package; "" if it is not here."""
    names = importlib.metadata.packages_distributions().get(module, [])
    return importlib.metadata.version(names[0]) if names else ""


def describe_machine() -> None:
    """What is here."""
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm"
    report("card and driver", True, said_by("nvidia-smi", query, "--format=csv,noheader"))
    report("processor", True, f"{os.cpu_count()} cores, {platform.platform()}, Python {platform.python_version()}")
    for module in ("torch", "numpy", "cupy", "jax", "numba", "tensorflow", "mpi4py"):
        report(module, True, version_of(module) or "none")
    report("MPI", True, said_by(sys.executable, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"))
    report("compute-sanitizer", True, str(shutil.which("compute-sanitizer")))


LIBRARIES = "import ringtrain; version, path = ringtrain.gpu_libraries()['nccl']; print(version, path)"
TORCHS = (
    "import torch; torch.ones(1).cuda(); open('/proc/self/maps').read().count('libnccl') or exit('torch has no NCCL'); "
)


def load() -> None:
    """The libraries, and where they were found: by themselves, beside torch's, and by a path."""
    for name, (version, path) in rt.gpu_libraries().items():
        report(f"{name} is found", bool(version), f"{version} {path}".strip())
    alone = said_by(sys.executable, "-c", LIBRARIES)
    path = alone.partition(" ")[2]
    report("NCCL by an explicit path", said_by(sys.executable, "-c", LIBRARIES, RINGTRAIN_NCCL_LIB=path) == alone, path)
    beside = said_by(sys.executable, "-c", TORCHS + "print('loaded')")
    if beside != "loaded":
        return report_absent("the NCCL that torch has loaded", beside)
    with_torch = said_by(sys.executable, "-c", TORCHS + LIBRARIES)
    count = "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'libnccl.so' in line}))"
    copies = said_by(sys.executable, "-c", TORCHS + LIBRARIES + "; " + count)
    report("the NCCL that torch has loaded is taken, and no second one", copies == "1", with_torch)


def smoke() -> None:
    """Two ranks on one GPU by NCCL: whether that goes at all."""
    if not nccl_takes_two():
        return
    rt.init(gpu_plane="nccl", nccl_multi_rank=1)
    for what, megabytes in (("4 bytes", 4e-6), ("64 MB", 1 if machine.is_fake() else 64)):
        report(f"allreduce of {what}", True, f"{1e3 * collectives.seconds_of_allreduce(megabytes, 3):.2f} ms")
    rt.shutdown()


def nccl_takes_two() -> bool:
    """Whether this NCCL can have two ranks on one GPU; says so if not."""
    version = rt.gpu_libraries()["nccl"][0]
    if tuple(int(part) for part in version.split(".")[:2]) >= (2, 30):
        return True
    if launchers_rank() in (None, 0):
        report_absent("two ranks on one GPU", f"NCCL {version}; it takes 2.30")
    return False


def pack_kernels() -> None:
    """Every kernel, bit for bit."""
    for tensor, buffer in kernels.PAIRS:
        right = all(kernels.is_exact(tensor, buffer, kernels.SIZES, shift) for shift in (0, 1, 2))
        report(f"{tensor} tensors, {buffer} buffer: all sizes and offsets", right)
    for count in (1, 161, 1361):
        report(f"{count} tensors", kernels.is_exact("float32", "bfloat16", [i % 97 for i in range(count)], 1))
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
    from gpu import torch_times  # here: the other parts do without torch

    if torch_times.DEVICE.type != "cuda":
        return report_absent("beside torch's _foreach_copy_", "no torch with CUDA")
    ratio = kernels.seconds_there_and_back(many, rounds) / torch_times.seconds_of_foreach_copies(many, rounds)
    report("pack + unpack of ResNet-50's shapes over torch's _foreach_copy_", ratio <= 1, f"{ratio:.2f} x", "1 x")


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
    if torch_checks.DEVICE.type != "cuda":
        return report_absent("streams and the caching allocator", "no torch with CUDA")
    report("streams are followed", torch_checks.streams_are_followed(10))
    report("memory under way is not given out again", torch_checks.dropped_tensors_are_not_used_again(200))


def torch_ranks() -> None:
    """PyTorch, on the launcher's ranks, staged."""
    from gpu import torch_checks

    rt.init(gpu_plane="staged")
    report("20 steps are those of one process on the whole batch", torch_checks.two_train_as_one(20))
    report("training with views of buckets is that without", torch_checks.views_train_alike())
    report("an overflow of one rank skips the step on all", torch_checks.an_overflow_of_one_rank_skips_on_all())
    if torch_checks.DEVICE.type == "cuda":
        report("streams are followed", torch_checks.streams_are_followed(10))
        report("memory under way is not given out again", torch_checks.dropped_tensors_are_not_used_again(50))
    rt.shutdown()


def torch_modes() -> None:
    """Each way of training with PyTorch, on the launcher's ranks."""
    from gpu import torch_checks

    rt.init(gpu_plane="staged")
    for name, chosen in torch_checks.MODES.items():
        report(
            f"{name} on {torch_checks.DEVICE} trains as on the CPU", torch_checks.a_mode_trains_as_on_the_host(chosen)
        )
    report("SyncBatchNorm has the whole batch's statistics", torch_checks.statistics_are_those_of_the_whole_batch())
    rt.shutdown()


def on_the_backend(what: str, check: str, steps: int) -> Callable[[], None]:
    """Something of PyTorch's on ringtrain's backend, on the launcher's ranks, by a function of ``torch_checks``."""

    def checks() -> None:
        from gpu import torch_checks

        right = getattr(torch_checks, check)("ringtrain", steps)
        if launchers_rank() in (None, 0):
            report(f"{what} on the backend ringtrain trains as one process", right)

    return checks


def elastic() -> None:
    """An elastic job of three ranks on the device, of which one is killed."""
    command = [*machine.LAUNCH, "--elastic", "-np", "2:3", "-H", "localhost:3"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "gpu.part", "elastic_rank"], capture_output=True, text=True, timeout=100
    )
    said = [line.partition("ended as ")[2] for line in done.stdout.splitlines() if "ended as " in line]
    what = "an elastic job goes on when a rank is killed, and its replicas are equal"
    figure = ", ".join(said) or "nothing: " + done.stderr[-300:]
    report(what, bool(said) and all(line.endswith("True") for line in said), figure)


def elastic_rank() -> None:
    """A rank of the job of ``elastic``."""
    from gpu import torch_checks

    size, equal = torch_checks.train_until_a_rank_has_died(lambda: os.kill(os.getpid(), signal.SIGKILL))
    print(f"ended as one of {size}: {equal}", flush=True)


def graphs(plane: str) -> Callable[[], None]:
    """CUDA graphs of PyTorch beside operations, in a world of one."""

    def checks() -> None:
        from gpu import torch_checks

        if torch_checks.DEVICE.type != "cuda":
            return report_absent("CUDA graphs", "no torch with CUDA")
        rt.init(gpu_plane=plane)
        report(f"{plane}: an operation in a graph is refused", torch_checks.an_operation_in_a_graph_is_refused())
        right = torch_checks.graphs_are_captured_beside_operations(20)
        report(f"{plane}: graphs are captured beside operations", right)
        rt.shutdown()

    return checks


MOST_KEPT = 4 << 20  # bytes of the device, which frameworks take in pieces of 2 MiB


def memory() -> None:
    """What steps and worlds leave on the device."""
    from gpu import torch_checks

    if torch_checks.DEVICE.type != "cuda":
        return report_absent("memory that steps and worlds keep", "no torch with CUDA")
    rt.init()
    kept = torch_checks.growth_over_steps(1000)
    report("memory that 900 further steps keep", kept <= MOST_KEPT, f"{kept / 2**20:.1f} MiB", "4 MiB")
    rt.shutdown()
    kept = torch_checks.growth_over_worlds(20)
    report("memory that 18 further worlds keep", kept <= MOST_KEPT, f"{kept / 2**20:.1f} MiB", "4 MiB")


def torch_steps() -> None:
    """Times of training steps with PyTorch, in a world of one."""
    from gpu import torch_times

    rt.init()
    ratio = torch_times.step_over_that_of_ddp(30)
    report(f"a step of a small network on {torch_times.DEVICE} beside DDP's", True, f"{ratio:.2f} x", "1.02 x")
    microseconds = torch_times.microseconds_of_a_submission(50)
    report(f"CPU of allreduce_async_ of a tensor on {torch_times.DEVICE}", True, f"{microseconds:.1f} us", "15 us")
    if torch_times.DEVICE.type != "cuda" or not version_of("torchvision"):
        return report_absent("a step of ResNet-50 beside a plain optimizer's", "no torch with CUDA, or no torchvision")
    ratio, seconds = torch_times.step_over_a_plain_one(30)
    report("a step of ResNet-50 beside a plain optimizer's", ratio <= 1.02,
           f"{ratio:.3f} x, {1e3 * seconds:.1f} ms", "1.02 x")  # fmt: skip


def staging() -> None:
    """Two ranks' staging beside the bus: both copy 256 MB to the host and back at once, and sum them there."""
    from gpu import torch_times

    megabytes, rounds = (1, 2) if machine.is_fake() else (256, 5)
    rt.init(gpu_plane="staged")
    whole = collectives.seconds_of_allreduce(megabytes, rounds)
    floors = {
        "to the host": collectives.seconds_of_copies(megabytes, rounds, "cuMemcpyDtoHAsync"),
        "to the device": collectives.seconds_of_copies(megabytes, rounds, "cuMemcpyHtoDAsync"),
        "both ways": collectives.seconds_of_copies(megabytes, rounds, "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"),
        "the sum": collectives.seconds_on_the_host(megabytes, rounds),
    }
    for what, seconds in floors.items():
        report(f"{megabytes} MB, {what}", True, f"{1e3 * seconds:.1f} ms, {megabytes / 1e3 / seconds:.1f} GB/s")
    share = max(floors.values()) / whole
    report(f"share of the slowest of these that an allreduce of {megabytes} MB reaches", machine.is_fake() or share >= 0.85,
           f"{100 * share:.0f} % ({1e3 * whole:.1f} ms)", "85 %")  # fmt: skip
    ratio = torch_times.gloo_over_ours(1 if machine.is_fake() else 64, rounds)
    report(f"gloo's allreduce of 64 MB over ours, on {torch_times.DEVICE}", True, f"{ratio:.1f} x", "3 x")
    ratio = torch_times.by_hand_over_ours(1 if machine.is_fake() else 64, rounds)
    report("to the host, allreduce, back, one after the other, over ours, 64 MB", True, f"{ratio:.1f} x")
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

    return lambda: in_world(2, plane, checks) if plane == "staged" or nccl_takes_two() else None


def launchers_rank() -> int | None:
    """This process's rank among those that the launcher has started, by an MPI or without; None if it has not."""
    found = launcher.find(os.environ) or launcher.find_introduced(os.environ)
    return None if found is None else found.rank


def in_world(size: int, plane: str, checks: Callable[[], object]) -> None:
    """Runs the checks on the launcher's ranks, or on threads of this process without one."""
    options = {"gpu_plane": plane, "nccl_multi_rank": int(plane == "nccl")}
    if launchers_rank() is not None:
        rt.init(**options)
        checks()
        rt.shutdown()
        return
    with World(size, **options) as world:
        world.run(lambda rank: checks())


def nccl_algorithm(algorithm: str) -> Callable[[], None]:
    """One way to sum by NCCL, in two worlds one after the other."""

    def checks() -> None:
        if not nccl_takes_two():
            return
        for world in ("a first world", "a second one"):
            rt.init(gpu_plane="nccl", nccl_multi_rank=1, nccl_algorithm=algorithm)
            right = collectives.operations_are_right() and collectives.floats_scale_and_compress()
            report(f"{algorithm}: every operation and dtype is right in {world}", right)
            megabytes = 1 if machine.is_fake() else 64
            seconds = collectives.seconds_of_allreduce(megabytes, 5)
            report(f"{algorithm}: allreduce of {megabytes} MB", True, f"{1e3 * seconds:.2f} ms")
            rt.shutdown()

    return checks


ALLOWED_SECONDS = 20.0  # from a rank's death to the error on the others


def killed(plane: str) -> Callable[[], None]:
    """A job whose rank 1 is killed in the middle: rank 0 says when it raised, and what."""

    def checks() -> None:
        if plane == "nccl" and not nccl_takes_two():
            return
        command = [*machine.LAUNCH, "-np", "2", sys.executable, "-m", "gpu.part", "dying"]
        # Without an MPI, whose mpirun ends all ranks before they can say anything.
        variables = {"GPU_CHECK_PLANE": plane, "RINGTRAIN_TRANSPORT": "tcp"}
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=100)
        said = next(
            (line for line in done.stdout.splitlines() if "raised after" in line), "nothing: " + done.stderr[-300:]
        )
        seconds = float(said.partition("raised after ")[2].partition(" ")[0] or "inf")
        report(
            f"{plane}: rank 0 raises when rank 1 is killed",
            seconds < ALLOWED_SECONDS and "written" not in done.stdout,
            said + ("; the tensor was written to after that" if "written" in done.stdout else ""),
            f"{ALLOWED_SECONDS:.0f} s",
        )

    return checks


def dying() -> None:
    """A rank of the job of ``killed``."""
    plane = os.environ["GPU_CHECK_PLANE"]
    rt.init(gpu_plane=plane, nccl_multi_rank=int(plane == "nccl"))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher asks it to end two seconds after the other's death
    array, begin = DeviceArray(np.zeros(1 << 20, "float32")), time.monotonic()
    try:
        for _ in range(3):  # the last of which rank 1 may have ended, and be dead, while rank 0 is at it
            collectives.seconds_of_allreduce(1, 1)
        if rt.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        while time.monotonic() < begin + 60:
            array = DeviceArray(np.zeros(1 << 20, "float32"))
            rt.allreduce_(array, "under way", rt.Sum)
    except rt.RingtrainError as error:
        after = time.monotonic() - begin
        # Before the launcher kills this rank.
        print(f"raised after {after:.1f} s: {str(error)[:60]} ...", flush=True)
        array.fill_on(np.full(1 << 20, 7, "float32"), 1)  # ours again: nothing may write there any more
        time.sleep(0.5)
        if (array.numpy() != 7).any():
            print("the tensor was written to after that", flush=True)


def memcheck() -> None:
    """The kernels once more, each access of theirs checked."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or machine.is_fake():
        return report_absent(
            "compute-sanitizer", "not on the PATH" if tool is None else "the fakes check by themselves"
        )
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "gpu.part", "small_kernels"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("=========")] or [""]
    report("no access outside of its memory", done.returncode == 0, lines[-1])


def small_kernels() -> None:
    """Each kernel on few elements."""
    sizes = [0, 1, 3, 16383, 16384, 16385]
    for tensor, buffer in kernels.PAIRS:
        for shift in (0, 1):
            assert kernels.is_exact(tensor, buffer, sizes, shift)
    for dtype in kernels.CARRIERS:
        assert kernels.sums_in_order(dtype, 3, 16385)


def arrays() -> None:
    """Other libraries' arrays, on streams of their own where they have these."""
    from gpu import array_checks

    rt.init()
    for library, check in array_checks.CHECKS.items():
        version = version_of(library)
        if not version or machine.is_fake():
            report_absent(f"{library}'s arrays", "not here" if not version else "of the fakes there are none")
        else:
            report(f"{library}'s arrays, behind a late kernel where it has streams", check(), version)
    rt.shutdown()


def tensorflow() -> None:
    """TensorFlow's GPU tensors."""
    version = version_of("tensorflow")
    if not version:
        return report_absent("TensorFlow's GPU tensors", "not here")
    from gpu import tensorflow_checks  # here: the other parts do without

    rt.init()
    if tensorflow_checks.DEVICE != "/GPU:0":
        report_absent("TensorFlow's GPU tensors", f"TensorFlow {version} sees no GPU")
    report(f"late values are awaited on {tensorflow_checks.DEVICE}", tensorflow_checks.late_values_are_awaited())
    report("training is that of a plain optimizer", tensorflow_checks.training_is_the_same())
    if tensorflow_checks.DEVICE == "/GPU:0":
        milliseconds = {way: 1e3 * tensorflow_checks.seconds_of_100_megabytes(way) for way in ("device", "host")}
        report("allreduce of 100 MB, tensors on the GPU and copied to the host", True,
               f"{milliseconds['device']:.1f} ms, {milliseconds['host']:.1f} ms")  # fmt: skip
    rt.shutdown()


NCCL_ALGORITHMS = ("nccl", "scatter_gather", "ordered")
PARTS: dict[str, Callable[[], None]] = {
    "machine": describe_machine,
    "load": load,
    "smoke": smoke,
    **{f"nccl_{name}": nccl_algorithm(name) for name in NCCL_ALGORITHMS},
    "killed_staged": killed("staged"),
    "killed_nccl": killed("nccl"),
    "dying": dying,
    "memcheck": memcheck,
    "small_kernels": small_kernels,
    "arrays": arrays,
    "tensorflow": tensorflow,
    "kernels": pack_kernels,
    "floors": floors,
    "order": order,
    "torch": torch_tensors,
    "torch_ranks": torch_ranks,
    "torch_ddp": on_the_backend("DDP", "ddp_trains_as_one", 20),
    "torch_modes": torch_modes,
    "torch_fsdp": on_the_backend("FSDP2", "fsdp_trains_as_one", 10),
    "elastic": elastic,
    "elastic_rank": elastic_rank,
    "torch_steps": torch_steps,
    "staging": staging,
    "memory": memory,
    "graphs": graphs("auto"),
    "graphs_staged": graphs("staged"),
    "staged": two_ranks("staged"),
    "nccl": two_ranks("nccl"),
}

if __name__ == "__main__":
    if sys.argv[1] not in ("machine", "load"):
        driver.use_device(0)
    PARTS[sys.argv[1]]()
