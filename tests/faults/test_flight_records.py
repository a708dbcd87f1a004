"""The flight records of real ranks, after faults of each kind: the command names the rank and what it did."""

import subprocess
import textwrap

import pytest
from environments import EACH_STARTER, python_with, rank_environment, ringtrainrun

RANK = """
    import os, signal, sys, time, numpy as np, ringtrain as rt
    from pathlib import Path
    rt.init(stall_warning_seconds=1, stall_abort_seconds=0 if sys.argv[1] == "stopped" else 4, dead_after_seconds=5)
    fault = sys.argv[1] if rt.rank() == 1 else ""
    rt.allreduce(np.ones(3), "gradient")
    rt.allreduce(np.ones(1), "loss")
    rt.barrier()
    if fault in ("killed", "stopped"):  # not before the others have gone on: a barrier is left one after the other
        while len(list(Path(sys.argv[2]).iterdir())) < rt.size() - 1:
            time.sleep(0.01)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "other shape":
        rt.allreduce(np.ones(4), "gradient")
    if fault != "skips":
        again = rt.allreduce_async(np.ones(3), "gradient")
        Path(sys.argv[2], str(rt.rank())).touch()
        rt.synchronize(again)
    rt.allreduce(np.ones(1), "loss")
"""
TOLD = {
    "killed": ["Rank 1 left no record", "allreduce 'gradient': ranks 0, 2 submitted it", "of rank 1 nothing is known"],
    # An engine may have it go on, to end it, and then it leaves a record.
    "stopped": ["rank 1 on host '", "It is stopped;", "allreduce 'gradient': ranks 0, 2 submitted it"],
    "other shape": ["'gradient' differs: [allreduce, float64[3], average] on ranks 0, 2 but [allreduce, float64[4], average] on rank 1."],
    "skips": ["allreduce 'gradient': ranks 0, 2 submitted it", "but rank 1 has not. Rank 1 was in allreduce 'loss' instead"],
}  # fmt: skip


def told_after(fault: str, starter: str, tmp_path) -> str:
    """What the command says of a job of three ranks, of which rank 1 does this."""
    folder, gone_on = tmp_path / "records", tmp_path / "gone-on"
    gone_on.mkdir()
    command = ["--flight-record", str(folder), "python", "-c", textwrap.dedent(RANK), fault, str(gone_on)]
    job = ringtrainrun(starter, 3, *command)
    done = subprocess.run(job, env=rank_environment(), timeout=600, capture_output=True, text=True, errors="replace")
    assert done.returncode != 0, done
    command = [python_with(starter), "-m", "ringtrain.launch.commands", "flight", str(folder)]
    compared = subprocess.run(command, timeout=600, capture_output=True, text=True)
    assert compared.returncode == 0, (compared, done)
    return compared.stdout


@pytest.mark.tcp  # the engine of an MPI ends the others before they can write anything
def test_a_killed_rank_is_named(tmp_path):
    told = told_after("killed", "tcp", tmp_path)
    assert all(part in told for part in TOLD["killed"]), told


@pytest.mark.long
@EACH_STARTER
@pytest.mark.parametrize("fault", [fault for fault in TOLD if fault != "killed"])
def test_each_fault_is_named(fault, mpi, tmp_path):
    told = told_after(fault, mpi, tmp_path)
    assert all(part in told for part in TOLD[fault]), told
