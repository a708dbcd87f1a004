"""What `ringtrain doctor` measures, on the ranks: each host by itself, each link between neighbours, and an allreduce.

Links are those of the ring of hosts, each way by itself and all at once, as `links` has it; `throughput` sends the bytes.
`doctor` hands `examine` to `ringtrain.run` and turns what rank 0 returns into a report.
All of it takes some seconds, on slow links and with many hosts too.
"""

from __future__ import annotations

import glob
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import ringtrain as rt
from ringtrain._runtime import context as contexts
from ringtrain._runtime.mpi import version_text
from ringtrain._runtime.statistics import lines_of
from ringtrain.errors import RingtrainError
from ringtrain.errors import TimeoutError as RanksLateError
from ringtrain.launch import cuda_aware, links, progress
from ringtrain.launch.interpreter import program, version_of
from ringtrain.launch.links import Way
from ringtrain.launch.modes import MODES
from ringtrain.launch.throughput import (
    SECONDS_OF_SILENCE,
    TOKEN_BYTES,
    Listeners,
    MpiThroughput,
    TcpThroughput,
    Throughput,
)

COPY_BYTES = 64 << 20
FEWEST_BYTES = 64 << 10  # of an allreduce that is measured
SECONDS_FOR_A_RATE, MOST_SECONDS_FOR_A_RATE = 0.2, 1.0
ROUND_TRIPS = 20  # in which TCP finds out what a way carries
SECONDS_FOR_LINKS = 6.0  # after which no round is done again
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
    try:
        return _examine(model_bytes)
    except (RingtrainError, OSError) as problem:  # its text says all; where it came about here tells nothing more
        sys.exit(str(problem))


def _examine(model_bytes: int) -> dict[str, Any] | None:
    rt.init()
    leads = rt.local_rank() == 0
    shown = progress.of_starter(os.environ if rt.rank() == 0 else {})
    facts = rt.allgather_object(facts_of_host() if leads else None)
    speeds = rt.allgather_object(speeds_of_memory() if leads else None)
    leaders = [rank for rank, fact in enumerate(facts) if fact]
    measured = measure_links(leaders, [facts[rank]["name"] for rank in leaders], shown)
    part = part_to_measure(model_bytes, ring_rate(measured))
    shown.show(f"allreduce of {part / 1e6:.0f} MB")
    allreduce = {
        name: seconds_of_all(seconds, model_bytes / part, measured)
        for name, seconds in measure_allreduce(part, leaders).items()
    }
    lines = rt.allgather_object(lines_of(contexts.current()) if leads else [])
    shown.show("codecs")
    codecs = measure_codecs(min(part, CODEC_BYTES)) if len(leaders) > 1 else {}
    shown.clear()
    if rt.rank() != 0:
        return None
    hosts = [
        {**facts[rank], **speeds[rank], "ranks": ranks} for rank, ranks in zip(leaders, _counts(leaders), strict=True)
    ]
    return {"model_bytes": model_bytes, "ranks": rt.size(), "transport": transport(), "hosts": hosts, "links": measured,
            "allreduce_seconds": allreduce, "measured_bytes": part, "tcp": [line._asdict() for each in lines for line in each],
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
            "interfaces_in_use": interfaces_in_use(os.environ), "site": os.environ.get("RINGTRAIN_SITE", "")}  # fmt: skip


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


def measure_links(leaders: Sequence[int], names: Sequence[str], shown: progress.Progress) -> list[dict[str, Any]]:
    """Of each pair of neighbours in the ring of hosts: latency, and bytes per second each way, alone and all at once.

    Called on all ranks, and the same on all. leaders: the rank that measures on each host; names: of the hosts.
    """
    if len(leaders) < 2:
        return []
    measuring = Measuring(leaders, names, shown)
    measuring.run()
    return measuring.found()


class Measuring:
    """The rounds in which links are measured: one rank of each host takes part, the others sleep."""

    def __init__(self, leaders: Sequence[int], names: Sequence[str], shown: progress.Progress):
        self.hosts, self.names, self.shown = len(leaders), names, shown
        self.place = leaders.index(rt.rank()) if rt.rank() in leaders else None
        self.throughput = open_throughput(leaders, self.place)
        self.begin, self.rounds = time.monotonic(), 0
        self.seconds = SECONDS_FOR_A_RATE
        self.latency: dict[Way, float] = {}
        self.alone: dict[Way, float] = {}
        self.at_once: dict[Way, float] = {}

    def run(self) -> None:
        """Every round once; then again while there is time, and the faster turn counts: other work only slows down."""
        for pairs in links.apart(links.pairs(self.hosts)):
            self._swap(pairs)
        self.seconds = seconds_for_a_rate(max(self.latency.values()))
        rounds = [(ways, self.at_once) for ways in (links.forward(self.hosts), links.backward(self.hosts)) if ways]
        rounds += [(ways, self.alone) for ways in links.one_by_one(self.hosts)]
        for ways, rates in rounds:
            self._carry(ways, rates)
        rounds += [(ways, self.alone) for ways in links.suspects(self.alone)]
        for ways, rates in rounds:
            if self._has_time():
                self._carry(ways, rates)
        if self.throughput is not None:
            self.throughput.close()

    def found(self) -> list[dict[str, Any]]:
        """What was measured."""
        return [
            {
                "between": list(pair),
                "latency_seconds": self.latency[pair],
                "alone_rates": [self.alone[pair], self.alone[pair[::-1]]],
                "at_once_rates": [self.at_once[pair], self.at_once[pair[::-1]]],
            }
            for pair in links.pairs(self.hosts)
        ]

    def _swap(self, pairs: Sequence[Way]) -> None:
        pair = next((each for each in pairs if self.place in each), None)
        taken = 0.0
        if pair is not None and self.throughput is not None:
            leads = self.place == pair[0]
            taken = self.throughput.latency(pair[leads], leads)
        for each, seconds in self._gather(pair, taken):
            self.latency[each] = max(seconds, self.latency.get(each, 0.0))  # only who leads knows it

    def _carry(self, ways: Sequence[Way], rates: dict[Way, float]) -> None:
        self.rounds += 1
        self.shown.show(f"links: round {self.rounds}")
        to = next((end for start, end in ways if start == self.place), None)
        source = next((start for start, end in ways if end == self.place), None)
        rate = 0.0
        if self.throughput is not None and (to is not None or source is not None):
            rate = self.throughput.carry(to, source, self.seconds)
        way = None if source is None or self.place is None else (source, self.place)
        for each, carried in self._gather(way, rate):
            if carried <= 0:  # the same on all ranks
                sender, receiver = (self.names[place] for place in each)
                raise RanksLateError(
                    f"link from host '{sender}' to host '{receiver}': it must carry bytes, but carried none within "
                    f"{SECONDS_OF_SILENCE:.0f} s. Look at the network between the two."
                )
            rates[each] = max(carried, rates.get(each, 0.0))

    @staticmethod
    def _gather(way: Way | None, value: float) -> list[tuple[Way, float]]:
        """What all hosts have measured."""
        wait_asleep()
        return [each for each in rt.allgather_object(None if way is None else (way, value)) if each is not None]

    def _has_time(self) -> bool:
        return bool(rt.broadcast_object(time.monotonic() - self.begin < SECONDS_FOR_LINKS, root_rank=0))


def open_throughput(leaders: Sequence[int], place: int | None) -> Throughput | None:
    """What carries bytes between hosts; None on ranks that do not measure. Called on all."""
    if transport() == "mpi":
        return None if place is None else MpiThroughput(leaders)
    token = rt.broadcast_object(secrets.token_bytes(TOKEN_BYTES), root_rank=0)
    listeners = None if place is None else Listeners(os.environ["RINGTRAIN_LISTEN"])
    told = rt.allgather_object(listeners.addresses if listeners is not None else None)
    if place is None or listeners is None:
        return None
    streams = int(os.environ.get("RINGTRAIN_TCP_STREAMS", "0")) or 1
    return TcpThroughput(place, listeners, [told[rank] for rank in leaders], token, streams)


def seconds_for_a_rate(latency: float) -> float:
    """For how long hosts send: TCP needs some round trips to find out what a way carries. Pure."""
    return min(max(SECONDS_FOR_A_RATE, ROUND_TRIPS * 2 * latency), MOST_SECONDS_FOR_A_RATE)


def wait_asleep() -> None:
    """A barrier that leaves its core to the ranks that still measure; MPI's own, and ours over MPI, may spin."""
    if transport() != "mpi":
        rt.barrier()
        return
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD.Ibarrier()
    while not everyone.Test():
        time.sleep(0.001)


# ---- the job ----


def ring_rate(measured: Sequence[Mapping[str, Any]]) -> float:
    """Bytes per second on the slowest way of the ring while all hosts send, as in an allreduce; infinite on one host. Pure."""
    ways = [rate for link in measured for rate in link["at_once_rates"][: 1 if len(measured) > 1 else 2]]
    return min(ways, default=float("inf"))


def part_to_measure(model_bytes: int, rate: float) -> int:
    """Bytes of the model whose allreduce stays short at this rate; all of them on a fast network. Pure."""
    return int(min(model_bytes, max(FEWEST_BYTES, rate * SECONDS_FOR_AN_ALLREDUCE)))


def seconds_of_all(seconds: float, times: float, measured: Sequence[Mapping[str, Any]]) -> float:
    """Of an allreduce of so many times the bytes of one that took ``seconds``: it waits for the longest way only once. Pure."""
    waiting = min(seconds, 2 * max((link["latency_seconds"] for link in measured), default=0.0))
    return waiting + (seconds - waiting) * times


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
