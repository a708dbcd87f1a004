"""ringtrainrun and srun in an allocation of a real Slurm, across three hosts on this machine; see `slurm_cluster`."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import needs
import pytest
import slurm_cluster
from environments import EACH_MPI, EACH_STARTER, python_with, transport_of
from slurm_cluster import Cluster

from ringtrain.bench import namespaces
from ringtrain.bench.namespaces import HostNetwork

pytestmark = [pytest.mark.long, needs.hosts, needs.machine(slurm_cluster.missing())]
PATIENCE = 90.0
ALLOCATION = ("salloc", "--quiet", "--nodes=3", "--ntasks=4")
PLUGINS = {"openmpi": "pmix", "mpich": "pmi2"}
# Prints host, rank, place on the host, and the sum of ones over the ranks.
PROGRAM = """
import os, numpy as np, ringtrain as rt
rt.init()
print(os.uname().nodename, rt.rank(), rt.local_rank(), rt.allreduce(np.ones(1, np.float32), op=rt.Sum)[0], flush=True)
"""
PLACES = ["node-a 0 0 4.0", "node-a 1 1 4.0", "node-b 2 0 4.0", "node-c 3 0 4.0"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with HostNetwork({"node-a": "eth0", "node-b": "ens5", "node-c": "enp3s0"}) as network:
        made = Cluster(network)
        made.environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1",
                             "RINGTRAIN_TRANSPORT": "auto"}  # fmt: skip
        yield made


def launch(cluster: Cluster, mpi: str, *arguments: str) -> subprocess.CompletedProcess:
    """ringtrainrun in an allocation of four tasks on three nodes, which names neither hosts nor ranks."""
    line = [python_with(mpi), "-m", "ringtrain.launch", *transport_of(mpi), *arguments]
    return cluster.run(*ALLOCATION, *line, timeout=PATIENCE)


def await_no_ranks(cluster: Cluster) -> None:
    """Until no host has a process of Python's."""
    deadline = time.monotonic() + PATIENCE
    while left := [line for host in cluster.hosts for line in host.processes().values() if "python" in line]:
        assert time.monotonic() < deadline, f"left over: {left}"
        time.sleep(0.1)


@EACH_MPI
@pytest.mark.parametrize("engine", [(), ("--mpi",)], ids=["srun", "mpirun"])
def test_an_allocation_gives_hosts_and_ranks(mpi: str, engine: tuple[str, ...], cluster: Cluster) -> None:
    done = launch(cluster, mpi, *engine, "python", "-c", PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {place}" for rank, place in enumerate(PLACES)]
    await_no_ranks(cluster)


@pytest.mark.tcp
def test_an_allocation_gives_hosts_and_ranks_to_agents(cluster: Cluster) -> None:
    """srun starts the agents, and they the ranks, which may use all cores that the job has on their host."""
    program = PROGRAM + "print('cores', len(os.sched_getaffinity(0)), flush=True)"
    done = launch(cluster, "tcp", "python", "-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    places = sorted(line for line in done.stdout.splitlines() if "cores" not in line)
    assert places == [f"[{rank}] {place}" for rank, place in enumerate(PLACES)]
    assert [line for line in done.stdout.splitlines() if line.endswith("cores 2")] != [], done.stdout
    await_no_ranks(cluster)


SHARED = "5e" * 32


@pytest.mark.tcp
@pytest.mark.parametrize("meets", ["in the home folder", "by a secret"])
def test_srun_alone_starts_ranks_without_an_mpi(meets: str, cluster: Cluster, tmp_path: Path) -> None:
    variables = {"HOME": str(tmp_path)}
    if meets == "by a secret":
        variables |= {"HOME": "/nowhere", "RINGTRAIN_SECRET": SHARED}
    line = ("srun", "--mpi=none", "--nodes=3", "--ntasks=4", "--kill-on-bad-exit=1", python_with("tcp"), "-c", PROGRAM)
    for _ in range(2):
        done = cluster.run(*line, env={**cluster.environment, **variables}, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(done.stdout.splitlines()) == PLACES
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@EACH_MPI
def test_srun_alone_starts_ranks_that_find_each_other(mpi: str, cluster: Cluster) -> None:
    # Without ringtrainrun nobody tells Open MPI that docker0 leads nowhere.
    network = {"OMPI_MCA_btl_tcp_if_include": f"{namespaces.NETWORK}.0/24"}
    done = cluster.run("srun", f"--mpi={PLUGINS[mpi]}", "--nodes=3", "--ntasks=4", "--kill-on-bad-exit=1", python_with(mpi), "-c",
                       PROGRAM, env={**cluster.environment, **network}, timeout=PATIENCE)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == PLACES


@EACH_MPI
@pytest.mark.parametrize("plugin", ["none", "the other MPI's"])
def test_srun_with_a_plugin_that_does_not_connect_the_ranks_is_told_which_does(
    mpi: str, plugin: str, cluster: Cluster
) -> None:
    other = next(each for name, each in PLUGINS.items() if name != mpi)
    done = cluster.run("srun", f"--mpi={'none' if plugin == 'none' else other}", "--nodes=3", "--ntasks=4", python_with(mpi), "-c",
                       PROGRAM, timeout=PATIENCE, env={**cluster.environment, "RINGTRAIN_TRANSPORT": "mpi"})  # fmt: skip
    assert done.returncode != 0 and done.stdout == "", done.stdout
    assert done.stderr.count(f"Start the script with ringtrainrun, or with srun --mpi={PLUGINS[mpi]}.") == 4, (
        done.stderr
    )


@EACH_STARTER
def test_a_failure_is_the_last_word_and_ends_all(mpi: str, cluster: Cluster) -> None:
    done = launch(
        cluster, mpi, "python", "-c", PROGRAM + "if rt.rank() == 2: raise ValueError('the cause')\nrt.barrier()"
    )
    assert done.returncode == 1
    said = done.stderr.splitlines()
    assert any("rank 2 (host node-b) failed with exit code 1" in line for line in said), done.stderr
    assert said[-1] == "[2] ValueError: the cause"
    await_no_ranks(cluster)


@pytest.mark.openmpi
def test_a_cancelled_job_leaves_no_process(cluster: Cluster) -> None:
    waiting = cluster.controller.start(*ALLOCATION, python_with("openmpi"), "-m", "ringtrain.launch", "--transport", "mpi", "python", "-c",
                                       "import time; print('ready', flush=True); time.sleep(300)", env=cluster.environment,
                                       stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    assert sorted(waiting.stdout.readline() for _ in range(4)) == [f"[{rank}] ready\n" for rank in range(4)]
    assert cluster.run("scancel", f"--user={os.getuid()}").returncode == 0
    waiting.communicate(timeout=PATIENCE)
    assert waiting.returncode != 0
    await_no_ranks(cluster)
