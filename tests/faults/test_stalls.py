"""A rank that keeps the others waiting: the report, its Python stacks although it holds the GIL, and phases that may last."""

import subprocess
import textwrap

import pytest
from environments import rank_environment, ringtrainrun
from worlds import LAUNCHED

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.openmpi,
    pytest.mark.skipif(LAUNCHED, reason="starts jobs of its own"),
]

# PyDLL keeps the GIL, so no Python thread of rank 1 can answer. Unannounced, it is busy until rank 0 has given up.
RANK = """
    import ctypes, contextlib, os, sys, time, numpy as np, ringtrain as rt
    announces, computes, given_up = sys.argv[1] == "announced", sys.argv[1] == "computing", sys.argv[2]

    def hold_the_gil(seconds):
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def compute():
        while not os.path.exists(given_up):
            sum(range(100000))

    rt.init(stall_warning_seconds=1, stall_abort_seconds=4)
    with rt.long_phase(60) if announces and rt.rank() == 1 else contextlib.nullcontext():
        rt.barrier()
        if rt.rank() == 1 and computes:
            compute()
        elif rt.rank() == 1:
            hold_the_gil(5)
            while not announces and not os.path.exists(given_up):
                hold_the_gil(0.1)
    try:
        rt.allreduce(np.ones(1), name="after")
        print(f"rank {rt.rank()} goes on.")
    except rt.errors.TimeoutError as problem:
        print(f"rank {rt.rank()} heard: {problem}")
        open(given_up, "w").close()
"""


def output_of(way: str, tmp_path) -> str:
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    command = ringtrainrun("openmpi", 2, "python", str(script), way, str(tmp_path / "given up"))
    done = subprocess.run(command, env=rank_environment(), timeout=100, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, errors="replace")  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_report_and_stacks_of_a_busy_rank(tmp_path):
    output = output_of("unannounced", tmp_path)
    assert "submitted by rank 0; missing rank 1" in output
    assert "the other ranks wait for allreduce 'after', which rank 1 has not submitted" in output
    assert "in hold_the_gil" in output
    for rank in (0, 1):
        assert f"rank {rank} heard: allreduce 'after'" in output and "RINGTRAIN_STALL_ABORT_SECONDS" in output


def test_stacks_of_a_rank_that_runs_python(tmp_path):
    """Its threads run, so only one that holds the GIL may look at them: the signal's handler stays out."""
    output = output_of("computing", tmp_path)
    assert "the other ranks wait for allreduce 'after', which rank 1 has not submitted" in output
    assert "in compute" in output and output.count("Current thread") == output.count("in _answer") > 0


def test_an_announced_phase_is_waited_for(tmp_path):
    output = output_of("announced", tmp_path)
    assert "rank 0 goes on." in output and "rank 1 goes on." in output
    assert "missing" not in output and "hold_the_gil" not in output
