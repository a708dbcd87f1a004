"""What `ringtrain doctor` measures, on the ranks: each host by itself, each link between neighbours, and an allreduce.

Links are measured by messages of MPI where it connects the ranks, else by ringtrain's own alltoall. `doctor` hands
`examine` to `ringtrain.run` and turns what rank 0 returns into a report.
All of it takes some seconds, on slow links too.
"""

from __future__ import annotations

import glob
import itertools
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

import ringtrain as rt
from ringtrain import context as contexts
from ringtrain.launch import cuda_aware, progress
from ringtrain.launch.interpreter import program
from ringtrain.launch.modes import MODES
from ringtrain.launch.versions import version_of
from ringtrain.mpi import version_text

COPY_BYTES = 64 << 20
MESSAGE_BYTES = 1 << 20
SECONDS_FOR_A_RATE = 0.15
FEWEST_MESSAGES = 4
TURNS = 2  # of each way on a link, of which the faster counts: other work on the hosts only slows it down
MOST_LINKS = 8  # more would take longer than a person waits
REPETITIONS = 3
CODEC_BYTES = 8 << 20  # of gradients by which codecs are measured
SECONDS_FOR_AN_ALLREDUCE = 0.4  # a model that takes longer is measured by a part of it
# NVIDIA's, AMD's, and that of Windows' Linux: without any of them torch sees no GPU.
GPU_DEVICES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
# In a process of its own, and only where there may be a GPU: importing torch takes seconds and starts threads.
ASK_TORCH = """
import torch
print(torch.cuda.device_count())
"""


def examine(model_bytes: int) -> dict[str, Any] | None:
    """Measures; returns everything on rank 0 and None elsewhere. Called on all ranks."""
    rt.init()
    leads = rt.local_rank() == 0
    shown = progress.of_starter(os.environ if rt.rank() == 0 else {})
    facts = rt.allgather_object(facts_of_host() if leads else None)
    speeds = rt.allgather_object(speeds_of_memory() if leads else None)
    leaders = [rank for rank, fact in enumerate(facts) if fact]
    links = measure_links(leaders[: MOST_LINKS + 1], shown)
    part = part_to_measure(model_bytes, links)
    shown.show(f"allreduce of {part / 1e6:.0f} MB")
    allreduce = {name: seconds * model_bytes / part for name, seconds in measure_allreduce(part, leaders).items()}
    shown.show("codecs")
    codecs = measure_codecs(min(part, CODEC_BYTES)) if len(leaders) > 1 else {}
    shown.clear()
    if rt.rank() != 0:
        return None
    hosts = [
        {**facts[rank], **speeds[rank], "ranks": ranks} for rank, ranks in zip(leaders, _counts(leaders), strict=True)
    ]
    return {"model_bytes": model_bytes, "ranks": rt.size(), "transport": transport(), "hosts": hosts, "links": links,
            "allreduce_seconds": allreduce, "measured_bytes": part,
            "codec_seconds_per_byte": codecs}  # fmt: skip


def _counts(leaders: list[int]) -> list[int]:
    """Ranks of each host, as ranks are placed host by host."""
    return [end - start for start, end in zip(leaders, [*leaders[1:], rt.size()], strict=True)]


# ---- a host ----


def facts_of_host() -> dict[str, Any]:
    """Versions, cores and GPUs of this host."""
    has_gpu = any(map(glob.glob, GPU_DEVICES))
    return {"name": platform.node(), "python": platform.python_version(), "ringtrain": rt.__version__,
            "mpi": mpi_version(), "torch": version_of("torch"), "tensorflow": version_of("tensorflow"),
            "cuda_devices_of_torch": gpus_of_torch(has_gpu), "gpu_libraries": rt.gpu_libraries() if has_gpu else {},
            "mpi_is_cuda_aware": has_gpu and mpi_is_cuda_aware(),
            "cores": len(os.sched_getaffinity(0)), "interface_mbit": nominal_rates(),
            "interfaces_in_use": interfaces_in_use(os.environ)}  # fmt: skip


def gpus_of_torch(has_gpu: bool) -> int | None:
    """Number of GPUs that torch sees, None without torch."""
    if not has_gpu:
        return None if version_of("torch") == "not installed" else 0
    asked = subprocess.run(program(ASK_TORCH), capture_output=True, text=True)
    return int(asked.stdout.splitlines()[-1]) if asked.returncode == 0 else None


def transport() -> str:
    """What connects the ranks: "mpi" or "tcp"."""
    return "mpi" if contexts.current().over_mpi else "tcp"


def mpi_version() -> str:
    """Name and version of the MPI in use, "none" without one."""
    if transport() != "mpi":
        return "none"
    from mpi4py import MPI

    return version_text(MPI)


def mpi_is_cuda_aware() -> bool:
    """What MPI says; only `check-build` tries it, for that may end a process."""
    if transport() != "mpi":
        return False
    from mpi4py import MPI

    return bool(cuda_aware.claim(MPI))


def interfaces_in_use(environment: Mapping[str, str]) -> list[str]:
    """Those that lead to the networks which the launcher has found, as it has told NCCL; [] on one host."""
    names = environment.get("NCCL_SOCKET_IFNAME", "")
    return names[1:].split(",") if names.startswith("=") else []


def nominal_rates() -> dict[str, int]:
    """Mbit/s of each interface that says so."""
    rates = {}
    for interface in sorted(os.listdir("/sys/class/net")):
        try:
            with open(f"/sys/class/net/{interface}/speed") as file:
                rates[interface] = int(file.read())
        except (OSError, ValueError):  # virtual, or down
            continue
    return {interface: rate for interface, rate in rates.items() if rate > 0}


def speeds_of_memory() -> dict[str, float]:
    """Bytes per second of a copy, and of a sum of two arrays into one of them."""
    one, other = np.ones(COPY_BYTES // 4, np.float32), np.ones(COPY_BYTES // 4, np.float32)
    return {"copy_rate": COPY_BYTES / _fastest(lambda: np.copyto(other, one)),
            "add_rate": COPY_BYTES / _fastest(lambda: np.add(one, other, out=other))}  # fmt: skip


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


# ---- links ----


def measure_links(leaders: list[int], shown: progress.Progress) -> list[dict[str, Any]]:
    """One link after the other: latency, and bytes per second one way and both ways at once; on every rank."""
    pairs = list(itertools.pairwise(leaders))
    kind = MpiLink if transport() == "mpi" else OwnLink
    opened = [kind(first, second) for first, second in pairs]  # on all ranks
    links = []
    for number, link in enumerate(opened, 1):
        shown.show(f"links: {number} of {len(opened)}")
        wait_asleep()
        if rt.rank() in link.ends:
            links.append({"between": list(link.ends), **measure_link(link)})
    wait_asleep()
    gathered = rt.allgather_object(links)
    # Hosts by their place, from 0, instead of the ranks that stood for them.
    return [{**link, "between": [leaders.index(rank) for rank in link["between"]]}
            for first, _ in pairs for link in gathered[first] if link["between"][0] == first]  # fmt: skip


def wait_asleep() -> None:
    """A barrier that leaves its core to the ranks that still measure; MPI's own, and ours over MPI, may spin."""
    if transport() != "mpi":
        rt.barrier()
        return
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD.Ibarrier()
    while not everyone.Test():
        time.sleep(0.001)


class Link(Protocol):
    """Two ranks, and how they send to each other; made on all ranks, used on these."""

    ends: tuple[int, int]

    def swap(self) -> None:
        """Sends a byte each way, or a number; this is what latency is measured by."""

    def exchange(self, sends: bool, receives: bool, count: int) -> float:
        """Seconds that `count` messages take, several under way; both ranks end together."""

    def larger(self, count: int) -> int:
        """The larger of both ranks' numbers."""


class MpiLink:
    """By messages of MPI."""

    def __init__(self, first: int, second: int):
        from mpi4py import MPI

        self.ends = (first, second)
        self._world = MPI.COMM_WORLD
        self._peer = second if rt.rank() == first else first

    def swap(self) -> None:
        self._swap(np.zeros(1, np.uint8))

    def exchange(self, sends: bool, receives: bool, count: int) -> float:
        messages = np.zeros((count, MESSAGE_BYTES), np.uint8)
        arrived = np.zeros((count, MESSAGE_BYTES), np.uint8)
        self.swap()
        start = time.perf_counter()
        requests = [self._world.Irecv(row, self._peer, 3) for row in arrived] if receives else []
        requests += [self._world.Isend(row, self._peer, 3) for row in messages] if sends else []
        for request in requests:
            request.Wait()
        self.swap()
        return time.perf_counter() - start

    def larger(self, count: int) -> int:
        return max(count, int(self._swap(np.array([count]))[0]))

    def _swap(self, mine: np.ndarray) -> np.ndarray:
        theirs = np.zeros_like(mine)
        self._world.Sendrecv(mine, self._peer, 0, theirs, self._peer, 0)
        return theirs


class OwnLink:
    """By ringtrain's alltoall between the two: rows of one go straight to the other, over all links that they share."""

    def __init__(self, first: int, second: int):
        self.ends = (first, second)
        self._pair = rt.add_process_set([first, second])

    def swap(self) -> None:
        rt.allreduce_(np.zeros(1, np.uint8), name="doctor.swap", op=rt.Sum, process_set=self._pair)

    def exchange(self, sends: bool, receives: bool, count: int) -> float:
        is_first = rt.rank() == self.ends[0]
        rows = np.zeros((count if sends else 0, MESSAGE_BYTES), np.uint8)
        splits = [0, len(rows)] if is_first else [len(rows), 0]
        self.swap()
        start = time.perf_counter()
        rt.alltoall(rows, np.array(splits, np.int32), name="doctor.exchange", process_set=self._pair)
        self.swap()
        return time.perf_counter() - start

    def larger(self, count: int) -> int:
        return int(rt.allreduce(np.array([count]), name="doctor.count", op=rt.Max, process_set=self._pair)[0])


def measure_link(link: Link) -> dict[str, float]:
    """Latency in seconds and rates in bytes per second between two ranks; called on both."""
    is_first = rt.rank() == link.ends[0]
    link.exchange(True, True, 1)  # connects
    latencies = []
    for _ in range(50):
        start = time.perf_counter()
        link.swap()
        latencies.append(time.perf_counter() - start)
    count = link.larger(messages_for(link.exchange(True, True, FEWEST_MESSAGES) / FEWEST_MESSAGES))
    turns = [(link.exchange(is_first, not is_first, count), link.exchange(True, True, count))
             for _ in range(TURNS if count > FEWEST_MESSAGES else 1)]  # fmt: skip
    one_way, both = (count * MESSAGE_BYTES / min(seconds) for seconds in zip(*turns, strict=True))
    return {"latency_seconds": float(np.median(latencies)), "one_way_rate": one_way, "both_ways_rate": both}


def messages_for(seconds_each: float) -> int:
    """Messages that keep a link busy long enough for a rate, within 64 MB."""
    return int(np.clip(SECONDS_FOR_A_RATE / seconds_each, FEWEST_MESSAGES, 64))


# ---- the job ----


def part_to_measure(model_bytes: int, links: list[dict[str, Any]]) -> int:
    """Bytes of the model whose allreduce stays short on the slowest link; all of them on a fast one. Pure."""
    rate = min((link["both_ways_rate"] for link in links), default=float("inf"))
    return int(min(model_bytes, max(MESSAGE_BYTES, rate * SECONDS_FOR_AN_ALLREDUCE)))


def measure_allreduce(model_bytes: int, leaders: list[int]) -> dict[str, float]:
    """Median seconds of an allreduce of the model's bytes: by all ranks, with 16 bits between hosts,
    and by one rank a host."""
    gradients = np.ones(max(1, model_bytes // 4), np.float32)
    seconds = {"float32": _median(lambda: rt.allreduce_(gradients, name="doctor.float32"))}
    if len(leaders) > 1:
        seconds["fp16"] = _median(lambda: rt.allreduce_(gradients, name="doctor.fp16", compression=rt.Compression.fp16))
    if 1 < len(leaders) < rt.size():
        alone = rt.add_process_set(leaders)
        taken = _median(lambda: rt.allreduce_(gradients, name="doctor.leaders", process_set=alone)
                        if rt.rank() in leaders else None)  # fmt: skip
        seconds["one_rank_a_host"] = taken
    return seconds


def measure_codecs(model_bytes: int) -> dict[str, float]:
    """Seconds for each byte of float32 that a rank encodes, adds and decodes in an allreduce, by compression: those of
    the slowest rank, each in its fastest turn. Called on all ranks."""
    gradients = np.ones(max(1, model_bytes // 4), np.float32)
    seconds = {}
    for name in sorted({mode.compression for mode in MODES} - {"none"}):
        compression, taken = getattr(rt.Compression, name), []
        for _ in range(1 + REPETITIONS):
            before = rt.counters()["codec_nanoseconds"]
            rt.allreduce_(gradients, name=f"doctor.{name}", compression=compression)
            taken.append((rt.counters()["codec_nanoseconds"] - before) * 1e-9)
        seconds[name] = max(rt.allgather_object(min(taken[1:]))) / gradients.nbytes
    return seconds


def _median(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(REPETITIONS):
        rt.barrier()
        start = time.perf_counter()
        work()
        rt.barrier()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))
