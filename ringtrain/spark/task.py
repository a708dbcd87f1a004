"""What runs in a task of Spark's: it finds out where the others are, starts this partition's rank, and waits for its end."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pyspark import BarrierTaskContext

from ringtrain._binding import options
from ringtrain.errors import HorovodInternalError
from ringtrain.launch.agent.host_networks import free_port
from ringtrain.launch.agent.rank_command import end_with
from ringtrain.launch.interpreter import module


class SparkJob(NamedTuple):
    """What all ranks are given.

    Attributes:
        call: function, arguments and keywords, pickled.
        paths: `sys.path` of the driver, behind the executors' own.
        secret: 32 bytes by which ranks know each other.
        variables: of the environment.
        executable: Python, None for that of the task.
    """

    call: bytes
    paths: list[str]
    secret: bytes
    variables: dict[str, str]
    executable: str | None


class Outcome(NamedTuple):
    """How a rank has ended.

    Attributes:
        rank: its number.
        kind: "returned", "raised", "lost a peer" (also raised), or "died".
        result: what it returned, or its exception and traceback; pickled.
        code: of its process.
    """

    rank: int
    kind: str
    result: bytes = b""
    code: int = 0


class TaskPlace(NamedTuple):
    """Where a rank is.

    Attributes:
        rank, size: its number, and how many there are.
        host: of rank 0.
        port: where the ranks meet there.
        store_port: another one, for torch's store.
        local_rank, local_size: among the ranks whose host has the same name.
    """

    rank: int
    size: int
    host: str
    port: int
    store_port: int
    local_rank: int
    local_size: int


def run(job: SparkJob, failures: Any) -> Iterator[Outcome]:
    """The end of this task's rank; added to an accumulator, too, if it is not as hoped."""
    context = BarrierTaskContext.get()
    rank = context.partitionId()
    addresses = [info.address for info in context.getTaskInfos()]
    outcome = _ended(job, place_of(rank, addresses, context.allGather(_said(rank))))
    if outcome.kind != "returned":
        failures.add([outcome])
    yield outcome


def _said(rank: int) -> str:
    """What a task tells the others: its host's name, and if it is the first, free ports."""
    ports = _free_ports() if rank == 0 else [0, 0]
    return "\n".join([socket.gethostname(), *map(str, ports)])


def place_of(rank: int, addresses: Sequence[str], said: Sequence[str]) -> TaskPlace:
    """Pure.

    Args:
        rank: this task's.
        addresses: of all tasks' executors, as Spark knows them: "host" or "host:port".
        said: by all tasks.
    """
    names = [text.split("\n")[0] for text in said]
    port, store_port = map(int, said[0].split("\n")[1:])
    host = _host_of(addresses[0])
    local = [other for other, name in enumerate(names) if name == names[rank]]
    return TaskPlace(
        rank=rank,
        size=len(said),
        host=host,
        port=port,
        store_port=store_port,
        local_rank=local.index(rank),
        local_size=len(local),
    )


def _host_of(address: str) -> str:
    """ "10.0.0.1" of "10.0.0.1" and "10.0.0.1:4711", "fd00::1" of "fd00::1" and "[fd00::1]:4711"; pure."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address


def _free_ports() -> list[int]:
    """Two that the system gives to no socket by itself, since they are used only once all tasks know them."""
    one = other = free_port("0.0.0.0", (0, 0))
    while other == one:
        other = free_port("0.0.0.0", (0, 0))
    return [one, other]


def _ended(job: SparkJob, place: TaskPlace) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="ringtrain-spark-") as name:
        folder = Path(name)
        call = pickle.dumps((in_world, (place, job.secret, job.call), {}))
        with os.fdopen(os.open(folder / "function", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pickle.dumps((job.paths, call)))
        line = module("ringtrain.launch.call", python=job.executable or sys.executable)
        code = subprocess.Popen(
            line, env=_environment(job, place, name), preexec_fn=partial(end_with, os.getpid())
        ).wait()
        code = 128 - code if code < 0 else code  # by a signal, as shells say it
        if (result := folder / f"result.{place.rank}").exists() and code == 0:
            return Outcome(place.rank, "returned", result.read_bytes())
        if (failure := folder / f"failure.{place.rank}").exists():
            return Outcome(place.rank, _kind(failure.read_bytes()), failure.read_bytes(), code)
        return Outcome(place.rank, "died", code=code)


def _kind(failure: bytes) -> str:
    try:
        return "lost a peer" if isinstance(pickle.loads(failure)[0], HorovodInternalError) else "raised"
    except Exception:  # its class is known where the function is
        return "raised"


def _environment(job: SparkJob, place: TaskPlace, folder: str) -> dict[str, str]:
    """Of the rank: torchrun's variables, for functions that were written for it, and what finds the function."""
    return {
        **options.environment(),
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.store_port),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        **job.variables,
        "RINGTRAIN_FUNCTION": folder,
        "RINGTRAIN_RANK": str(place.rank),
    }


def in_world(place: TaskPlace, secret: bytes, pickled: bytes) -> Any:
    """The rank's function, in its world."""
    from ringtrain._bootstrap.start import init

    where = f"[{place.host}]:{place.port}" if ":" in place.host else f"{place.host}:{place.port}"
    init(rank=place.rank, size=place.size, rendezvous=where, secret=secret)
    function, arguments, keywords = pickle.loads(pickled)
    return function(*arguments, **keywords)
