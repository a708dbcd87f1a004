"""The network between two hosts is cut, comes back, loses its connections, or is slow.

The hosts are namespaces of this machine, with sshds, interfaces and shared memory of their own.
"""

from __future__ import annotations

import os
import platform
import subprocess
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import needs
import pytest
from environments import PATHS, rank_environment, ringtrainrun

from benchmarks.lines import INTERFACE, Kind, Line
from ringtrain.bench.namespaces import HostNetwork

pytestmark = [
    needs.hosts,
]
OPENMPI_OR_TCP = pytest.mark.parametrize(
    "mpi",
    [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("openmpi", "tcp")],
)
SECONDS = 90.0
ROOT = Path(__file__).parents[2]

# Works until rank 0 finds a file, or until it is told that the world has ended.
STEPS = """
    import os, sys, time, numpy as np, ringtrain as rt
    folder = sys.argv[1]
    rt.init()
    open(f"{folder}/at-work-{rt.rank()}", "w").close()
    steps = 0
    try:
        while not rt.broadcast_object(os.path.exists(f"{folder}/enough"), root_rank=0):
            assert rt.allreduce(np.ones(300_000, np.float32), name="step", op=rt.Sum).tolist() == [2.0] * 300_000
            steps += 1
            time.sleep(0.01 if rt.rank() == 0 else 0)  # while the other one waits in a step, which take two cores else
            if os.path.exists(f"{folder}/count"):
                open(f"{folder}/step-{rt.rank()}-{steps}", "w").close()
    except rt.errors.PeerLostError as problem:
        with open(f"{folder}/hears-{rt.rank()}", "w") as heard:
            heard.write(str(problem))
        os.rename(f"{folder}/hears-{rt.rank()}", f"{folder}/heard-{rt.rank()}")  # which is read once it is there
        raise
"""


# Does steps until one of the ranks kills itself, and notes what it was told, and when.
DIES = """
    import os, signal, sys, time, numpy as np, ringtrain as rt
    folder = sys.argv[1]
    rt.init()
    try:
        for step in range(1000000):
            if rt.rank() == 1 and step == 20:
                with open(f"{folder}/killed", "w") as note:
                    note.write(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            rt.allreduce(np.ones(1000), name="step")
    except rt.errors.PeerLostError as problem:
        with open(f"{folder}/heard-{rt.rank()}", "w") as heard:
            heard.write(f"{time.monotonic()} {problem}")
        raise
"""


@pytest.fixture
def start(mpi: str, network: HostNetwork, tmp_path: Path) -> Iterator:
    """Starts a rank on each of two hosts, and waits until both are at work."""
    started: list[subprocess.Popen] = []

    def start(dead_after: int, *flags: str) -> subprocess.Popen:
        started.append(network["node-a"].start(
            *ringtrainrun(mpi, 2, "-H", "node-a:1,node-b:1", *flags, "python", "-c", textwrap.dedent(STEPS), str(tmp_path)),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=rank_environment(PYTHONPATH=PATHS, RINGTRAIN_DEAD_AFTER_SECONDS=str(dead_after))))  # fmt: skip
        await_files(tmp_path, "at-work-0", "at-work-1")
        return started[0]

    yield start
    for launcher in started:
        launcher.kill()
        launcher.communicate()


def await_files(folder: Path, *names: str) -> None:
    deadline = time.monotonic() + SECONDS
    while missing := [name for name in names if not list(folder.glob(name))]:
        assert time.monotonic() < deadline, f"waited {SECONDS:.0f} s for {missing}, but found {os.listdir(folder)}"
        time.sleep(0.05)


def await_steps(folder: Path, more: int) -> None:
    """Waits until rank 1 has done so many more steps."""
    done = len(list(folder.glob("step-1-*")))
    await_files(folder, f"step-1-{done + more}")


@OPENMPI_OR_TCP
def test_both_sides_of_a_cut_end_by_themselves(start, network: HostNetwork, tmp_path: Path) -> None:
    """Behind the cut too, where neither launcher nor peers can reach: no process is left there."""
    launcher = start(dead_after=5)
    network.unplug("node-b")
    await_files(tmp_path, "heard-0", "heard-1")
    for rank, other in (0, "node-b"), (1, "node-a"):
        told = (tmp_path / f"heard-{rank}").read_text()
        assert f"rank {1 - rank} on host '{other}'" in told and "heard none for 5 s" in told and "network" in told, told
    assert launcher.wait(SECONDS) != 0


@pytest.mark.long
@pytest.mark.parametrize("mpi", [pytest.param("tcp", marks=pytest.mark.tcp)])
def test_large_packets_that_are_lost_from_now_on_are_told_as_that(start, network: HostNetwork, tmp_path: Path) -> None:
    """By the first that waits in vain; the other one sees at least that its peer has gone."""
    launcher = start(dead_after=5)
    with network.losing_large("node-b"):
        await_files(tmp_path, "heard-0", "heard-1")
    told = [(tmp_path / f"heard-{rank}").read_text() for rank in (0, 1)]
    assert any("Small packets pass between host 'node-" in each and "MTU" in each for each in told), told
    _, said = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode != 0 and "Small packets pass between host 'node-" in said.splitlines()[-1], said


# Of the 15 s of silence after which a rank counts as dead. Before Linux 6.15 TCP says nothing for up to as long again.
CUT_SECONDS = 11 if tuple(map(int, platform.release().split(".")[:2])) >= (6, 15) else 5


@OPENMPI_OR_TCP
def test_a_cut_that_heals_in_time_is_survived(start, network: HostNetwork, tmp_path: Path) -> None:
    launcher = start(dead_after=60)
    network.unplug("node-b")
    time.sleep(1.5)
    network.plug_in("node-b")
    (tmp_path / "count").touch()
    await_files(tmp_path, "step-0-*", "step-1-*")
    (tmp_path / "enough").touch()
    _, said = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 0 and not list(tmp_path.glob("heard-*")), said


@pytest.mark.long
@needs.machine("" if os.path.exists("/dev/net/tun") else "needs /dev/net/tun")
@pytest.mark.parametrize("mpi", [pytest.param("tcp", marks=pytest.mark.tcp)])
def test_a_line_that_becomes_another_loses_nobody(start, network: HostNetwork, tmp_path: Path) -> None:
    """What is on a line that is cut for a while, slow, lossy or far arrives, and the job goes on."""
    begins = Kind(mbit=50, round_trip_ms=20)
    cut = replace(begins, loss_percent=100)
    kinds = [
        begins,
        cut,
        begins,
        replace(begins, mbit=5),
        replace(begins, loss_percent=1),
        replace(begins, round_trip_ms=200),
        begins,
    ]
    with Line(network, begins) as line:
        launcher = start(15, "--network-interfaces", INTERFACE)
        (tmp_path / "count").touch()
        for kind in kinds:
            line.change(kind)
            if kind == cut:
                time.sleep(CUT_SECONDS)
            else:
                await_steps(tmp_path, 4)
        (tmp_path / "enough").touch()
        _, said = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 0 and not list(tmp_path.glob("heard-*")), said
    assert "rank" not in said, said


@OPENMPI_OR_TCP
def test_connections_that_are_reset_end_the_job(start, network: HostNetwork, tmp_path: Path) -> None:
    """Every TCP connection between the hosts, those of the engine and the launcher too."""
    launcher = start(dead_after=3)
    killed = network["node-b"].run("ss", "-K", "-t", "dst", network["node-a"].address)
    if killed.returncode != 0 or killed.stdout.count("ESTAB") == 0:
        pytest.skip(
            f"needs a kernel built with CONFIG_INET_DIAG_DESTROY, to reset connections: {killed.stderr.strip()}"
        )
    assert launcher.wait(SECONDS) != 0


@pytest.mark.tcp
def test_a_rank_killed_alone_on_its_host_is_named_at_once_and_alike(network: HostNetwork, tmp_path: Path) -> None:
    """No memory is shared with it, and nobody waits for silence: the end of its connections tells."""
    hosts_of_ranks = ",".join(f"{name}:1" for name in network.hosts)
    done = network["node-a"].run(
        *ringtrainrun("tcp", 3, "-H", hosts_of_ranks, "python", "-c", textwrap.dedent(DIES), str(tmp_path)),
        env=rank_environment(PYTHONPATH=PATHS, RINGTRAIN_DEAD_AFTER_SECONDS="60"),
    )
    killed = float((tmp_path / "killed").read_text())
    times, told = zip(*((tmp_path / f"heard-{rank}").read_text().split(" ", 1) for rank in (0, 2)), strict=True)
    assert max(map(float, times)) - killed < 2.0  # docs/reliability.md has how long it takes: some hundredths
    assert told[0] == told[1] and "rank 1 on host 'node-b'" in told[0], told
    assert done.returncode == 137 and "rank 1 (host node-b) was killed by signal 9" in done.stderr.splitlines()[-1], (
        done
    )
