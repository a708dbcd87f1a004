"""Ranks on several hosts that ringtrainrun did not start: torchrun's, and processes that know an address or a folder."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import needs
import pytest
from environments import python_with, rank_environment

from ringtrain.bench import namespaces
from ringtrain.bench.namespaces import HostNetwork

pytestmark = [pytest.mark.tcp, needs.hosts]
PATIENCE = 150.0
ROOT = Path(__file__).parents[2]
# Says where it ran, in which world, and the sum of the ranks' numbers.
PROGRAM = """
import os, sys, numpy as np, ringtrain as rt
rt.init(**eval(sys.argv[1]) if len(sys.argv) > 1 else {})
total = rt.allreduce(np.full(200_000, rt.rank(), np.float32), op=rt.Sum)
assert (total == sum(range(rt.size()))).all()
place = os.uname().nodename, rt.rank(), rt.size(), rt.local_rank(), rt.cross_size()
os.write(1, (" ".join(map(str, place)) + "\\n").encode())  # at once, so that lines of two ranks do not mix
"""
PLACES = ["node-a 0 4 0 2", "node-a 1 4 1 2", "node-b 2 4 0 2", "node-b 3 4 1 2"]
# Its first attempt loses a rank once all have met; a later one is another world, with other processes. Agents count
# their restarts apart.
RESTARTED = """
import os, sys, numpy as np, ringtrain as hvd
hvd.init()
total = hvd.allreduce(np.ones(1), op=hvd.Sum, name="x")
if hvd.rank() == 2 and not os.path.exists(__file__ + ".lost"):
    open(__file__ + ".lost", "w").close()
    os._exit(9)
hvd.allreduce(np.ones(1), op=hvd.Sum, name="y")
os.write(1, f"rank {hvd.rank()} of {hvd.size()} sum {total[0]}\\n".encode())
"""


def on_both(network: HostNetwork, *line: str, **variables: str) -> list[tuple[int, str, str]]:
    """Runs a command on the first two hosts at once; exit code, stdout and stderr of each."""
    started = [
        network[name].start(
            *(word.format(number=number) for word in line),
            env=dict(rank_environment(), PYTHONPATH=str(ROOT), **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, name in enumerate(["node-a", "node-b"])
    ]
    said = [process.communicate(timeout=PATIENCE) for process in started]
    return [(process.returncode, *words) for process, words in zip(started, said, strict=True)]


def torchrun(network: HostNetwork, program: str, folder: Path, *flags: str) -> list[tuple[int, str, str]]:
    (folder / "train.py").write_text(program)
    endpoint = f"--rdzv-endpoint={network['node-a'].address}:29400"
    return on_both(
        *(network, python_with("tcp"), "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"),
        *("--rdzv-backend=c10d", endpoint, "--rdzv-id=7", *flags, str(folder / "train.py")),
    )


def left_behind(network: HostNetwork) -> list[str]:
    """What is still there of a job a moment after its end."""
    deadline = time.monotonic() + 10
    while left := [f"{host.name}: {what}" for host in network.hosts.values() for what in host.left()]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return left


@pytest.mark.long  # on one host every run has torchrun
def test_torchrun_on_two_hosts(three_hosts: HostNetwork, tmp_path: Path) -> None:
    done = torchrun(three_hosts, PROGRAM, tmp_path)
    assert [code for code, _, _ in done] == [0, 0], done
    assert sorted("".join(out for _, out, _ in done).splitlines()) in (PLACES, AS_GROUPS_CAME), done
    assert not left_behind(three_hosts)


# torchrun numbers hosts in the order in which they come.
AS_GROUPS_CAME = sorted(["node-b 0 4 0 2", "node-b 1 4 1 2", "node-a 2 4 0 2", "node-a 3 4 1 2"])


@pytest.mark.long
def test_torchrun_restarts_a_job_in_a_new_world(three_hosts: HostNetwork, tmp_path: Path) -> None:
    done = torchrun(three_hosts, RESTARTED, tmp_path, "--max-restarts=3", "--monitor-interval=0.2")
    assert [code for code, _, _ in done] == [0, 0], done[0][2] + done[1][2]
    lines = sorted("".join(out for _, out, _ in done).splitlines())
    assert lines == [f"rank {rank} of 4 sum 4.0" for rank in range(4)], done
    assert not left_behind(three_hosts)


def start_by_hand(network: HostNetwork, rendezvous: str, folder: Path, **variables: str) -> list[tuple[int, str, str]]:
    """Two ranks on each of two hosts, by a shell's own means."""
    place = f"dict(rank=2 * {{number}} + int(sys.argv[2]), size=4, rendezvous='{rendezvous}')"
    (folder / "train.py").write_text(PROGRAM)
    python = f"{python_with('tcp')} {folder}/train.py"
    return on_both(
        *(network, "sh", "-c", f'{python} "{place}" 0 & {python} "{place}" 1; code=$?; wait $! && exit $code'),
        **variables,
    )


def test_ranks_that_know_an_address(three_hosts: HostNetwork, tmp_path: Path) -> None:
    address = f"{three_hosts['node-a'].address}:29500"
    done = start_by_hand(three_hosts, address, tmp_path, RINGTRAIN_SECRET="5e" * 32, RINGTRAIN_PORT_RANGE="21000-21019")
    assert [code for code, _, _ in done] == [0, 0], done
    assert sorted("".join(out for _, out, _ in done).splitlines()) == PLACES


def test_ranks_that_know_a_folder(three_hosts: HostNetwork, tmp_path: Path) -> None:
    """They must be told the network: nothing in a folder says where the others are."""
    lost = start_by_hand(three_hosts, f"file://{tmp_path}/meet", tmp_path)
    assert all("init: ranks must listen where other hosts reach them, but rank 0 can be" in err for *_, err in lost)
    done = start_by_hand(
        three_hosts, f"file://{tmp_path}/meet", tmp_path, RINGTRAIN_NETWORK_INTERFACES=f"{namespaces.NETWORK}.0/24"
    )
    assert [code for code, _, _ in done] == [0, 0], done
    assert sorted("".join(out for _, out, _ in done).splitlines()) == PLACES
