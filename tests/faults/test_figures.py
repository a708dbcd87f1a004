"""The figures of docs/reliability.md are measured as the page says, and a promise that is broken is said."""

import pytest
from environments import python_with

from benchmarks import faults
from benchmarks.jobs import Job

pytestmark = pytest.mark.openmpi


@pytest.mark.parametrize("promised, kept", [(60.0, True), (0.0, False)])
def test_a_fault_is_measured_against_its_promise(promised: float, kept: bool, monkeypatch, capsys) -> None:
    """Nothing can be kept within no time."""
    python_with("openmpi")
    fault = faults.Fault("Ctrl-C", "nothing is left", promised, faults.interrupt)
    monkeypatch.setattr(faults, "FAULTS", [fault])
    assert faults.run(runs=1, dead_after_seconds=15, only="") is kept
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith(f"| Ctrl-C | nothing is left | {promised:g} s | ")
    assert row.endswith("yes |" if kept else "NO |")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_promise_is_kept_twenty_times(job: Job) -> None:
    done = job.run(python_with("openmpi"), "-m", "benchmarks", "faults", "--runs", "20", seconds=3500)
    assert done.returncode == 0 and done.stdout.count("yes |") == len(faults.FAULTS), done
