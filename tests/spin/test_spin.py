"""Protocols as small models, searched completely by Spin, and proof that the search finds planted faults."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import needs
import pytest

NEGOTIATION, EPOCHS, SCHEDULE = (
    Path(__file__).with_name(name) for name in ("negotiation.pml", "epochs.pml", "schedule.pml")
)
DEADLOCK, ASSERTION = "invalid end state", "assertion violated"
FAULTS = {
    "IGNORES_GONE": DEADLOCK,
    "LEAVES_SILENTLY": DEADLOCK,
    "SKIPS_A_NAME": DEADLOCK,
    "SURVIVES_ABORT": DEADLOCK,
    "COUNTS_MESSAGES": ASSERTION,
    "TELLS_ALL_BUT_ONE": ASSERTION,
}
EPOCH_FAULTS = {
    "RELEASES_EARLY": ASSERTION,
    "TRUSTS_ONE_STANDING": ASSERTION,
    "REUSES_THE_COUNT": ASSERTION,
    "IGNORES_A_DEATH": DEADLOCK,
    "FORGETS_THE_RELEASED": ASSERTION,
    "UNDOES_WHOLE": ASSERTION,
}
SCHEDULE_FAULTS = {
    "TRUSTS_ONE_COUNTER": ASSERTION,
    "ENDS_EARLY": ASSERTION,
    "PROMISES_ON": ASSERTION,
    "STARTS_ALONE": ASSERTION,
    "ANSWERS_NOT": DEADLOCK,
}
MEMORY = 2048  # MiB

pytestmark = [
    pytest.mark.long,  # the models change with the protocol alone
    needs.package("spin", "spin"),
]


def search(folder: Path, model: Path = NEGOTIATION, **definitions: int | str) -> str:
    """Spin's report on a model with these definitions."""
    defined = [f"-D{name}={value}" if value != "" else f"-D{name}" for name, value in definitions.items()]
    subprocess.run(["spin", "-a", *defined, model], cwd=folder, check=True, capture_output=True)
    subprocess.run(
        ["gcc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY}", "-o", "pan", "pan.c"],
        cwd=folder,
        check=True,
    )
    return subprocess.run(
        ["./pan", "-m200000", "-w24"], cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


@pytest.mark.parametrize("ranks, crashes", [(2, 1), (3, 0), (3, 1)])
def test_no_interleaving_goes_wrong(ranks: int, crashes: int, tmp_path: Path) -> None:
    check_complete(search(tmp_path, N=ranks, F=crashes))


def check_complete(report: str) -> None:
    """Nothing was found, and nothing was left out."""
    assert "errors: 0" in report, report
    assert "Search not completed" not in report and "max search depth too small" not in report, report
    assert int(float(re.search(r"([\d.e+]+) states, stored", report)[1])) > 1000


@pytest.mark.parametrize("ranks, crashes", [(3, 2), (4, 1)])
def test_no_interleaving_of_more_crashes_goes_wrong(ranks: int, crashes: int, tmp_path: Path) -> None:
    test_no_interleaving_goes_wrong(ranks, crashes, tmp_path)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    report = search(tmp_path, F=1 if fault in ("IGNORES_GONE", "SURVIVES_ABORT") else 0, **{fault: ""})
    assert FAULTS[fault] in report, report


@pytest.mark.parametrize("ranks, crashes", [(2, 1), (3, 1)])
def test_no_change_of_epochs_goes_wrong(ranks: int, crashes: int, tmp_path: Path) -> None:
    check_complete(search(tmp_path, EPOCHS, N=ranks, F=crashes))


def test_no_change_of_epochs_with_two_crashes_goes_wrong(tmp_path: Path) -> None:
    check_complete(search(tmp_path, EPOCHS, F=2))


@pytest.mark.parametrize("fault", EPOCH_FAULTS)
def test_planted_fault_in_the_change_of_epochs_is_found(fault: str, tmp_path: Path) -> None:
    report = search(tmp_path, EPOCHS, **{fault: ""})
    assert EPOCH_FAULTS[fault] in report, report


@pytest.mark.parametrize("ranks, batches", [(2, 3), (3, 1)])
def test_no_end_of_a_schedule_goes_wrong(ranks: int, batches: int, tmp_path: Path) -> None:
    check_complete(search(tmp_path, SCHEDULE, N=ranks, T=batches))


@pytest.mark.parametrize("fault", SCHEDULE_FAULTS)
def test_planted_fault_in_a_schedule_is_found(fault: str, tmp_path: Path) -> None:
    report = search(tmp_path, SCHEDULE, **{fault: ""})
    assert SCHEDULE_FAULTS[fault] in report, report
