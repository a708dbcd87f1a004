"""A rank that keeps the others waiting: the report, its Python stacks although it holds the GIL, and phases that may last."""

import subprocess
import textwrap

import pytest
from environments import rank_environment, ringtrainrun

pytestmark = [
    pytest.mark.openmpi,
]

# PyDLL keeps the GIL, so no Python thread of the busy rank can answer. Unannounced, it is busy until the other one has
# given up. The one that computes is rank 0, which has to report the stall itself, and to show where it is; should it
# not, it computes for a minute more.
RANK = """
    import ctypes, contextlib, logging, os, sys, time, numpy as np, ringtrain as rt
    from ringtrain._runtime import reports as asked
    announces, computes, given_up = sys.argv[1] == "announced", sys.argv[1] == "computing", sys.argv[2]
    busy = 0 if computes else 1
    reports, stacks, write_stacks = [], [], asked.write_stacks
    logging.getLogger("ringtrain").addFilter(lambda record: reports.append(record) or True)
    asked.write_stacks = lambda: stacks.append(write_stacks())

    def hold_the_gil(seconds):
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def compute():
        while not os.path.exists(given_up):
            sum(range(100000))
        until = time.monotonic() + 60
        while not (reports and stacks) and time.monotonic() < until:
            sum(range(100000))
        print("reported while rank 0 computed" if reports else "not reported")

    rt.init(stall_warning_seconds=1, stall_abort_seconds=4)
    with rt.long_phase(60) if announces and rt.rank() == busy else contextlib.nullcontext():
        rt.barrier()
        if rt.rank() == busy and computes:
            compute()
        elif rt.rank() == busy:
            hold_the_gil(10)
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
    done = subprocess.run(command, env=rank_environment(), timeout=600, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
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


def test_report_and_stacks_of_rank_0_while_it_runs_python(tmp_path):
    """Its threads run, so only one that holds the GIL may look at them: the signal's handler stays out."""
    output = output_of("computing", tmp_path)
    assert "submitted by rank 1; missing rank 0" in output and "reported while rank 0 computed" in output
    assert "the other ranks wait for allreduce 'after', which rank 0 has not submitted" in output
    assert "in compute" in output and "Thread 'MainThread'" in output
    assert (
        "ringtrain-reports" not in output and "Current thread" not in output
    )  # neither our own threads nor faulthandler's words


def test_an_announced_phase_is_waited_for(tmp_path):
    output = output_of("announced", tmp_path)
    assert "rank 0 goes on." in output and "rank 1 goes on." in output
    assert "missing" not in output and "hold_the_gil" not in output
