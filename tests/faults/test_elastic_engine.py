"""Elastic jobs whose processes an engine starts, and starts again: `ringtrain authority` beside real processes of bash's.

What they compute is what a run with the planned members computes, to the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import test_elastic_frameworks as arrays
import test_elastic_steps as steps
from engine import AGAIN, Engine

from benchmarks.jobs import Job

pytestmark = [
    pytest.mark.tcp,
]
ARRAYS = Path(__file__).with_name("elastic_arrays.py")
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
WAIT = "import time\nwhile not (folder / 'go').exists(): time.sleep(0.02)"  # within a step, with the others


def bits_of(plan: list[list[int]]) -> str:
    """The last word of `elastic_arrays`, for steps with the contributions of these slots in rank order; computed here."""
    weights = momentum = np.full(257, 1.0 if plan[0][0] == 0 else 2.0, np.float32)
    for step, slots in enumerate(plan):
        drawn = [np.random.default_rng([step, slot]).standard_normal(257).astype(np.float32) for slot in slots]
        sums = np.zeros(257, np.float32)
        for number, each in enumerate(drawn):
            mine = each + weights * np.float32(0.1)
            sums = mine if number == 0 else sums + mine
        momentum = momentum * np.float32(0.5) + sums / np.float32(len(slots))
        weights = weights - momentum * np.float32(0.1)
    return f"{len(plan)} {hashlib.sha256(weights.tobytes() + momentum.tobytes()).hexdigest()}"


def made(done: subprocess.CompletedProcess) -> list[list[int]]:
    """By step, the slots whose contributions are in it, in rank order: that of the step before where one has died in it."""
    arrays.applied(done)  # each step once in each slot, and all have the same contributions
    ranks: dict[int, dict[int, int]] = {}
    slots: dict[int, list[int]] = {}
    for line in re.findall(r"^\[\d+\] applied (.*)$", done.stdout, re.MULTILINE):
        step, rank, slot, *contributors = map(int, line.split())
        ranks.setdefault(step, {})[slot] = rank
        slots[step] = contributors
    order = {step: ranks[step] if {*slots[step]} <= {*ranks[step]} else ranks[step - 1] for step in slots}
    return [sorted(slots[step], key=order[step].__getitem__) for step in sorted(slots)]


def assert_planned(engine: Engine, ranks: int, **codes: int) -> list[list[int]]:
    """All that have come to the end have the bits of a run whose members were planned so, and each step was made once."""
    done = engine.end(**codes)
    plan, ends = made(done), arrays.ends(done)
    assert ends == [bits_of(plan)] * ranks, done.stdout
    assert len(plan) == arrays.STEPS
    return plan


def test_a_rank_that_dies_is_started_again_and_joins(job: Job, tmp_path: Path) -> None:
    """The others lose no step, and meet it where the next one begins."""
    engine = Engine(job, tmp_path, "-np", "2:3", "--gather", "100")
    for number in range(3):
        engine.start(number, ARRAYS, loop=AGAIN, FAULTS=json.dumps({"1/4/begun": KILL}), JOINED="3")
    plan = assert_planned(engine, 3)
    steps_of_two = sum(len(step) == 2 for step in plan)
    assert [sorted(step) for step in plan] == [[0, 1, 2]] * 4 + [[0, 2]] * steps_of_two + [[0, 1, 2]] * (
        20 - steps_of_two
    )
    assert steps_of_two > 0
    assert plan[-1][2] == 1  # who joins stands behind those who stay
    said = engine.said.read_text()
    assert said.count("is gone: its connection has ended.") == 1, said
    assert said.endswith("All ranks have come to their end.\n") and not engine.state.exists()


@pytest.mark.long
def test_torch_under_a_death_and_a_joiner_is_as_planned(job: Job, tmp_path: Path) -> None:
    """The same script as under the launcher: parameters, momentum, schedule and samples."""
    source = steps.CONSTANTS + "".join(map(textwrap.dedent, (steps.PLACE, steps.PROGRAM, steps.TRAINING)))
    engine = Engine(job, tmp_path, "-np", "2:3", "--gather", "100")
    for number in range(3):
        faults = json.dumps({"1/4/backward": KILL})
        engine.start(number, "-c", source, loop=AGAIN, FAULTS=faults, JOINED="3")
        engine.await_that(lambda: "A process has come" in engine.said.read_text())  # slot 0 is to be rank 0
    done = engine.end()
    plan = steps.assert_as_planned(job, done, 3, tmp_path)
    assert [len(step) for step in plan] == [3] * 4 + [2] * 6 + [3] * (len(plan) - 10)
    assert (done.stdout.count("change 3 2"), done.stdout.count("change 2 3")) == (2, 3)  # the one that joins, too


@pytest.mark.long
@pytest.mark.parametrize("code", [0, 75])
def test_a_process_that_is_asked_to_leave_does_so_between_two_steps(code: int, job: Job, tmp_path: Path) -> None:
    """By SIGTERM, as an engine does; nobody is called dead, and another one may come."""
    engine = Engine(job, tmp_path, "-np", "2:3", "--gather", "100", "--leave-code", str(code))
    held = json.dumps({"0/6/begun": WAIT, "2/6/begun": WAIT})
    for number in range(3):
        engine.start(number, ARRAYS, FAULTS=held, JOINED="3")
    engine.await_line(1, "applied 5")
    engine.kill(1, signal.SIGTERM)
    engine.await_that(lambda: "leaves on notice" in engine.said.read_text())
    (Path(job.temporary) / "go").touch()
    engine.ranks[1].wait(60)
    engine.start(3, ARRAYS, JOINED="3")
    plan = assert_planned(engine, 3, r1=code)
    assert sorted(plan[0]) == [0, 1, 2] and sorted(plan[8]) == [0, 2] and sorted(plan[-1]) == [0, 2, 3]
    assert "this rank has left on notice" in engine.output(1).read_text()
    assert "gone" not in engine.said.read_text()


@pytest.mark.long
def test_an_authority_that_is_killed_is_followed_by_another(job: Job, tmp_path: Path) -> None:
    """Meanwhile steps are made; then a death, and who comes again, are as before."""
    engine = Engine(job, tmp_path, "-np", "2:3", "--gather", "100", "--state", str(tmp_path / "state"))
    late = {f"{number}/8/begun": WAIT for number in range(3)}
    faults = json.dumps({"0/3/begun": WAIT.replace("'go'", "'first'"), **late, "1/8/released": KILL})
    for number in range(3):
        engine.start(number, ARRAYS, loop=AGAIN, FAULTS=faults, JOINED="3", AWAITED_AT="[12]")
    engine.await_line(1, "applied 2")
    engine.authority.kill()
    engine.authority.wait()
    (Path(job.temporary) / "first").touch()
    for number in range(3):
        engine.await_line(number, "applied 7")  # without it
    engine.start_authority()
    assert "goes on with the job" in engine.said.read_text()
    engine.await_that(lambda: engine.said.read_text().count("has called again.") == 3)
    (Path(job.temporary) / "go").touch()
    plan = assert_planned(engine, 3)
    sizes = [len(step) for step in plan]
    assert sizes[:9] == [3] * 9 and sizes[9] == 2 and sizes[-1] == 3
    assert engine.said.read_text().count("is gone") == 1 and not engine.state.exists()


@pytest.mark.long
def test_an_authority_that_is_killed_before_the_first_world_is_followed_by_another(job: Job, tmp_path: Path) -> None:
    """Who has waited for the others calls again, and they train."""
    engine = Engine(job, tmp_path, "-np", "2:2", "--state", str(tmp_path / "state"))
    engine.start(0, ARRAYS)
    engine.await_that(lambda: "A process has come" in engine.said.read_text())
    engine.authority.kill()
    engine.authority.wait()
    engine.start_authority()
    engine.await_that(lambda: "has called again." in engine.said.read_text())
    engine.start(1, ARRAYS)
    assert_planned(engine, 2)


@pytest.mark.long
def test_ranks_that_finish_without_an_authority_wait_for_the_next_one(job: Job, tmp_path: Path) -> None:
    """It ends well, though it has led no step."""
    engine = Engine(job, tmp_path, "-np", "2", "--state", str(tmp_path / "state"))
    for number in range(2):
        engine.start(number, ARRAYS, FAULTS=json.dumps({"0/3/begun": WAIT}))
    engine.await_line(1, "applied 2")
    engine.authority.send_signal(signal.SIGTERM)  # which leaves the job to the next
    assert engine.authority.wait(60) == 128 + signal.SIGTERM
    (Path(job.temporary) / "go").touch()
    for number in range(2):
        engine.await_line(number, "end 24")
    engine.start_authority()
    assert [sorted(step) for step in assert_planned(engine, 2)] == [[0, 1]] * 24


@pytest.mark.long
def test_ranks_without_an_authority_end_after_the_grace(job: Job, tmp_path: Path) -> None:
    """Who holds the state cannot know who goes on without it."""
    engine = Engine(job, tmp_path, "-np", "2", "--grace", "3")
    for number in range(2):
        engine.start(number, ARRAYS, FAULTS=json.dumps({"0/3/begun": WAIT, "1/3/begun": WAIT}))
    engine.await_line(1, "applied 2")
    engine.authority.kill()
    done = engine.end(r0=1, r1=1, authority=-signal.SIGKILL)
    assert done.stdout.count("nothing was heard of the authority at") == 2


@pytest.mark.long
def test_an_authority_without_the_record_leads_none_of_its_ranks(job: Job, tmp_path: Path) -> None:
    """It could grant a world that there has been."""
    engine = Engine(job, tmp_path, "-np", "2")
    for number in range(2):
        engine.start(number, ARRAYS, FAULTS=json.dumps({"0/3/begun": WAIT, "1/3/begun": WAIT}))
    engine.await_line(1, "applied 2")
    engine.authority.kill()
    engine.authority.wait()
    engine.start_authority()
    for number in range(2):
        assert engine.ranks[number].wait(60) == 1
        assert "the authority must lead the job that this rank is of" in engine.output(number).read_text()
    engine.authority.send_signal(signal.SIGINT)
    engine.end(r0=1, r1=1, authority=128 + signal.SIGINT)


@pytest.mark.long
def test_an_authority_that_stood_still_has_lost_nobody(job: Job, tmp_path: Path) -> None:
    """Ranks call it again, and take what their first connections still had."""
    engine = Engine(job, tmp_path, "-np", "2:3", "--gather", "100")
    faults = {f"{number}/8/begun": WAIT for number in range(3)}
    for number in range(3):
        engine.start(number, ARRAYS, FAULTS=json.dumps({**faults, "1/8/released": KILL}))
    engine.await_line(0, "applied 7")
    engine.authority.send_signal(signal.SIGSTOP)
    time.sleep(12)  # beyond the bound of silence, and a call
    engine.authority.send_signal(signal.SIGCONT)
    (Path(job.temporary) / "go").touch()
    plan = assert_planned(engine, 2, r1=-signal.SIGKILL)
    assert [len(step) for step in plan] == [3] * 9 + [2] * 15
    assert "evicted" not in engine.said.read_text()


@pytest.mark.long
def test_a_process_that_stands_still_is_given_up_and_ends_itself(job: Job, tmp_path: Path) -> None:
    """The others tell of its silence; nobody else could end it."""
    engine = Engine(job, tmp_path, "-np", "2:3", "--gather", "100")
    for number in range(3):
        engine.start(number, ARRAYS, FAULTS=json.dumps({"1/4/begun": "os.kill(os.getpid(), signal.SIGSTOP)"}))
    engine.await_line(0, "end 24")
    engine.kill(1, signal.SIGCONT)
    plan = assert_planned(engine, 2, r1=1)
    assert [len(step) for step in plan] == [3] * 4 + [2] * 20
    assert "was evicted" in engine.output(1).read_text()


@pytest.mark.long
def test_too_few_end_the_job(job: Job, tmp_path: Path) -> None:
    """The one that has come is told why."""
    engine = Engine(job, tmp_path, "-np", "2:3", "--elastic-timeout", "4")
    engine.start(0, ARRAYS)
    done = engine.end(r0=1, authority=1)
    assert done.stdout.count("A world must have 2 ranks, but has fewer.") == 2


@pytest.mark.long
def test_one_too_many_waits_and_takes_the_place_of_one_that_dies(job: Job, tmp_path: Path) -> None:
    """It is told so. Who comes when there is none to wait for is dismissed."""
    engine = Engine(job, tmp_path, "-np", "1:2")
    for number in range(2):
        engine.start(number, ARRAYS, FAULTS=json.dumps({"0/3/begun": WAIT, "1/4/begun": KILL}), JOINED="2")
    engine.await_line(1, "applied 2")
    for number in (2, 3):
        engine.start(number, ARRAYS, JOINED="2")
        engine.await_line(number, "the job has 2 ranks, and may have no more")
    (Path(job.temporary) / "go").touch()
    plan = assert_planned(engine, 2, r1=-signal.SIGKILL)
    assert [len(step) for step in plan][:4] == [2] * 4 and sorted(plan[-1]) == [0, 2]
    assert "the job has come to its end before" in engine.output(3).read_text()


@pytest.mark.long
def test_all_that_are_told_to_leave_end_the_job_badly(job: Job, tmp_path: Path) -> None:
    """Nobody is left to go on."""
    engine = Engine(job, tmp_path, "-np", "1:2", "--gather", "100")
    for number in range(2):
        engine.start(number, ARRAYS, FAULTS=json.dumps({f"{number}/3/begun": WAIT}))
    for number in range(2):
        engine.await_line(number, "applied 2")
        engine.kill(number, signal.SIGTERM)
    engine.await_that(lambda: engine.said.read_text().count("leaves on notice") == 2)
    (Path(job.temporary) / "go").touch()
    engine.end(authority=1)
    assert "All ranks have left on notice" in engine.said.read_text()


@pytest.mark.long
def test_another_secret_lets_nobody_in(job: Job, tmp_path: Path) -> None:
    """The process says so at once, and the job never hears of it."""
    engine = Engine(job, tmp_path, "-np", "2", "--gather", "100")
    engine.start(0, ARRAYS)
    engine.secret, secret = os.urandom(32).hex(), engine.secret
    engine.start(7, ARRAYS)
    assert engine.ranks.pop(7).wait(60) == 1
    assert "RINGTRAIN_SECRET: it must be that of the authority at" in engine.output(7).read_text()
    engine.secret = secret
    engine.start(1, ARRAYS)
    assert [sorted(step) for step in assert_planned(engine, 2)] == [[0, 1]] * 24
