"""python -m benchmarks faults --elastic: what follows from the ranks' notes; and for long, the whole of it on real jobs."""

import json
import subprocess
from pathlib import Path

import environments
import numpy as np
import pytest

from benchmarks import __main__ as command_line
from benchmarks import elastic, elastic_records
from benchmarks.elastic_records import APPLIED, DRAWN, RECORD, Notes, Reader
from ringtrain.bench.command import options_of

SLOT_OF = {10: 0, 11: 1, 12: 2, 21: 1}  # by process; 21 takes the place of 11


def world(number: int, pids: tuple[int, ...], steps: range, begin: float, samples: dict | None = None) -> list[tuple]:
    """Rows of steps of a second each that processes make together, drawn when a step begins and applied at its end."""
    rows = []
    for step in steps:
        for rank, pid in enumerate(pids):
            sample = (samples or {}).get((pid, step), 100 * step + pid)
            begun = begin + step - steps[0]
            rows.append((begun, step, number, sample, DRAWN, pid, SLOT_OF[pid], rank, len(pids), 0))
            rows.append((begun + 0.9, step, number, -1, APPLIED, pid, SLOT_OF[pid], rank, len(pids), 0))
    return rows


def records(*worlds: list[tuple]) -> np.ndarray:
    return np.array([row for rows in worlds for row in rows], RECORD)


# Three ranks make steps 1 to 3; 11 is killed in step 4, which the others make at 6.9; it joins with step 6, at 12.9.
CALM = world(1, (10, 11, 12), range(1, 4), begin=0.0)
KILLED = [(3.0, 4, 1, 7, DRAWN, 11, 1, 1, 3, 0)]
SHRUNK = world(2, (10, 12), range(4, 6), begin=6.0, samples={(10, 5): 7})
GROWN = world(3, (10, 12, 21), range(6, 9), begin=12.0)
FAULT = 3.5
RUN = records(CALM, KILLED, SHRUNK, GROWN)


def test_the_next_step_is_one_of_a_world_without_the_dead() -> None:
    assert elastic_records.next_step(RUN, FAULT, world=1, most=2) == pytest.approx(6.9)
    assert elastic_records.next_step(RUN, FAULT, world=2, most=3) == pytest.approx(12.9)
    assert elastic_records.next_step(records(CALM, KILLED), FAULT, world=1, most=2) is None
    late = [(3.6, 3, 2, -1, APPLIED, 12, 2, 1, 2, 0)]  # a step that others had before the fault
    assert elastic_records.next_step(records(CALM, late), FAULT, world=1, most=2) is None


def test_a_world_is_whole_when_all_of_it_have_made_a_step() -> None:
    assert [(each.pid, each.slot, each.rank) for each in elastic_records.newest_world(RUN)] == [
        (10, 0, 0),
        (12, 2, 1),
        (21, 1, 2),
    ]
    assert elastic_records.newest_world(RUN[RUN["pid"] != 21]) == []
    assert elastic_records.newest_world(records()) == []


def test_steps_that_are_made_again_or_left_out_are_counted() -> None:
    assert elastic_records.recomputed(RUN) == elastic_records.missing(RUN) == 0
    again = records(CALM, world(2, (10, 21, 12), range(2, 5), begin=9.0))
    assert elastic_records.recomputed(again) == 2
    assert elastic_records.missing(records(CALM, world(2, (10, 12), range(6, 8), begin=9.0))) == 2


def test_a_stall_is_what_those_missed_who_were_there() -> None:
    assert elastic_records.stalls_of_joiners(RUN) == []  # of two steps no median is taken
    run = records(CALM, world(2, (10, 12), range(4, 8), begin=6.0), world(3, (10, 12, 21), range(8, 10), begin=12.5))
    assert elastic_records.stalls_of_joiners(run) == [pytest.approx(13.4 - 9.9 - 1.0)]


def test_goodput_is_measured_against_the_same_job_without_faults() -> None:
    """A step a second before; then three steps of three, and two of two, where twelve were possible."""
    found = elastic_records.goodput(RUN, begin=3.0, faults=[(FAULT, 1)], end=15.0, slots=3)
    assert found is not None
    assert found.steps == pytest.approx(5 / 12)
    assert found.of_all == pytest.approx((3 * 3 + 2 * 2) / 36)
    assert found.of_alive == pytest.approx((3 * 3 + 2 * 2) / (36 - (12.0 - FAULT)))  # its slot drew again at 12
    assert found.recomputed == 0
    assert elastic_records.goodput(RUN, begin=1.5, faults=[], end=15.0, slots=3) is None


def test_a_step_that_is_made_again_is_no_progress() -> None:
    again = records(CALM, world(2, (10, 11, 12), range(2, 5), begin=3.0))
    found = elastic_records.goodput(again, begin=3.0, faults=[], end=6.0, slots=3)
    assert found is not None and found.steps == pytest.approx(1 / 3) and found.recomputed == 2


def test_the_plan_leaves_out_what_was_dealt_again() -> None:
    """Of the killed rank's sample the next owner's draw tells that it was not in the step."""
    plan = elastic_records.plan_of(RUN)
    assert plan[2:5] == [[310, 311, 312], [410, 412], [7, 512]]
    assert plan[5] == [610, 612, 621]  # who joins stands last, whatever its slot


def test_the_plan_has_what_a_rank_gave_before_it_died() -> None:
    """Nobody drew its sample again: the others have used its gradients."""
    kept = records(CALM, KILLED, world(2, (10, 12), range(4, 6), begin=6.0))
    assert elastic_records.plan_of(kept)[3] == [410, 7, 412]


def test_notes_are_read_as_far_as_they_are_whole(tmp_path: Path) -> None:
    notes, reader = Notes(tmp_path, slot=3), Reader(tmp_path)
    notes.add(APPLIED, 1.5, step=7, world=2, rank=1, size=4)
    assert [row["step"] for row in reader.records()] == [7]
    (path,) = tmp_path.glob("notes-*")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])  # a killed rank's last words
    assert len(reader.records()) == 1
    path.write_bytes(whole + whole)
    assert [row["slot"] for row in reader.records()] == [3, 3]


def test_options_of_one_kind_of_faults_do_not_reach_the_other() -> None:
    parse = command_line.COMMAND.parser().parse_args
    name, options = command_line.chosen_faults(options_of(parse(["faults", "--runs", "3"])))
    assert name == "faults" and set(options) == {"runs", "dead_after_seconds", "only", "json"}
    line = ["faults", "--elastic", "goodput", "--systems", "ringtrain,torchrun", "--minutes", "0.5", "--together"]
    name, options = command_line.chosen_faults(options_of(parse(line)))
    assert name == "elastic" and options["elastic"] == ["goodput"] and options["minutes"] == 0.5
    assert set(options) == {*elastic.run.__annotations__} - {"return"}
    assert options_of(parse(["faults", "--elastic"]))["elastic"] == list(command_line.ELASTIC_PARTS)


@pytest.mark.long
@pytest.mark.tcp
@pytest.mark.timeout(900)
def test_faults_of_a_real_job_cost_no_step(tmp_path: Path) -> None:
    line = ["faults", "--elastic", "--runs", "2", "--only", "killed", "--sizes", "1MB", "--minutes", "0.75"]
    done = subprocess.run(
        [environments.python_with("tcp"), "-m", "benchmarks", *line, "--json", str(tmp_path / "out.json")],
        capture_output=True, text=True, env=environments.rank_environment(), timeout=850,
    )  # fmt: skip
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    faults = [result for result in results if result["part"] == "faults"]
    assert [result["fault"] for result in faults] == [each.name for each in elastic.FAULTS if "killed" in each.name]
    for result in faults:
        assert result["steps_recomputed"] == result["steps_missing"] == 0, done.stdout
        assert result["replicas"] == "as planned" and len(result["seconds"]) == 2
    (goodput,) = [result for result in results if result["part"] == "goodput"]
    assert goodput["faults"] == 2 and goodput["recomputed"] == 0 and goodput["replicas"] == "as planned"
    (overhead,) = [result for result in results if result["part"] == "overhead"]
    assert overhead["plain_seconds"] > 0 and overhead["gradient_bytes"] == 1 << 20
