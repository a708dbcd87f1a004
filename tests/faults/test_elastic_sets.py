"""Elastic jobs with process sets, on real processes: sets go on while their members live, and a rule makes them anew."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from environments import python_with, rank_environment, transport_of

from benchmarks.jobs import Job

pytestmark = [
    pytest.mark.tcp,
]
SECONDS = 200.0
STEPS = 16
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
LOST = (
    "process set {}: all of its members must live, but the one in slot {} of host 'localhost' is gone. Add it again on all "
    "ranks, for those that are left; or have State(process_sets=...) make sets for each world."
)


def run(job: Job, *flags: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess:
    """Runs the program under the launcher; a slot gets a rank again only if others wait for it."""
    python, script = python_with("tcp"), Path(__file__).with_name("elastic_sets.py")
    cooldown = "1" if "JOINED" in variables else "60"
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", *flags]
    line += ["--blacklist-cooldown-range", cooldown, cooldown, python, str(script)]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = job.run(*line, seconds=SECONDS, env=rank_environment(**quiet, **variables))
    assert done.returncode == code, done.stdout + done.stderr[-6000:]
    return done


def said(done: subprocess.CompletedProcess) -> dict[int, dict[int, list[str]]]:
    """By step and slot, what of the first and the second set, the even and the odd one; each once."""
    steps: dict[int, dict[int, list[str]]] = {}
    for step, slot, words in re.findall(r"^\[\d+\] said (\d+) (\d+) \d+ \d+ (.*)$", done.stdout, re.MULTILINE):
        by_slot = steps.setdefault(int(step), {})
        assert int(slot) not in by_slot, f"step {step} twice in slot {slot}"
        by_slot[int(slot)] = words.split("|")
    return steps


WHOLE = {0: ["3", "5", "5", "0"], 1: ["3", "0", "0", "2"], 2: ["0", "5", "5", "0"]}


@pytest.mark.parametrize(
    "framework", ["numpy", *(pytest.param(name, marks=pytest.mark.long) for name in ("torch", "tensorflow"))]
)
def test_sets_go_on_without_a_rank_and_with_another(framework: str, job: Job) -> None:
    """Slot 1 dies within the sum of the set that it has with slot 0, which is lost; that of slots 0 and 2 is not.

    The rank that comes again to slot 1 is another one: it belongs to what the rule makes alone, and knows of the loss.
    """
    done = run(job, "-np", "2:3", FRAMEWORK=framework, FAULTS=json.dumps({"1/4/first": KILL}), JOINED="3")
    steps, lost = said(done), LOST.format(1, 1)
    kept = {0: [lost, "5", "1", "0"], 2: [lost, "5", "0", "4"]}
    joined = {0: [lost, "5", "3", "0"], 1: [lost, "0", "3", "0"], 2: [lost, "5", "0", "4"]}
    whole = [step for step in sorted(steps) if steps[step] == WHOLE]
    assert whole == [step for step in sorted(steps) if step < 4]
    assert [steps[step] for step in sorted(steps) if 4 <= step < 9] == [kept] * 5
    assert steps[max(steps)] == joined and 1 in steps[max(steps) - 1], steps
    ids = set(re.findall(r"^\[\d+\] end (.*)$", done.stdout, re.MULTILINE))
    assert ids == {"3 None 2 3 4"}
    assert "WorldChangedError" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("faults", [{}, {"1/12/again": KILL}, {"0/12/again": KILL}], ids=" ".join)
def test_a_lost_set_is_added_again(faults: dict[str, str], job: Job) -> None:
    """For whom is left, while a rank that has joined stands by; who dies meanwhile is not in it, or ends it once more."""
    faults |= {"1/4/first": KILL}
    done = run(job, "-np", "1:3", FAULTS=json.dumps(faults), JOINED="3", AWAITED_AT="[9]", AGAIN_AT="12")
    steps = said(done)
    whole = {0: ["1", "5", "3", "0"], 1: ["0", "0", "3", "0"], 2: ["0", "5", "0", "4"]}
    left = {(): whole, ("1/12/again",): {0: ["1", "5", "1", "0"], 2: ["0", "5", "0", "4"]}}
    if "0/12/again" in faults:  # with it all of the set are gone, and one of the second one
        assert sorted(steps[12]) == [1, 2]
        ((words,),) = {(words[0],) for words in steps[12].values()}
        assert words in (
            LOST.format(5, 0),
            "process set: all ranks must have added it, but the world ended before. Add it again, on all ranks.",
        )  # as far as they had come
        assert {words[1] for words in steps[12].values()} == {LOST.format(2, 0)}
    else:
        assert steps[12] == left[tuple(sorted(faults.keys() - {"1/4/first"}))]


@pytest.mark.long
def test_rank_0_dies_and_takes_both_sets_along(job: Job) -> None:
    """The words are the same on all that are left; what the rule makes goes on."""
    done = run(job, "-np", "1:3", FAULTS=json.dumps({"0/4/even": KILL}))
    first, second = LOST.format(1, 0), LOST.format(2, 0)
    steps = said(done)
    assert steps[3] == WHOLE and steps[STEPS - 1] == {1: [first, second, "2", "0"], 2: [first, second, "0", "4"]}
    assert steps[4] == {1: ["3", "0", "2", "0"], 2: ["0", "5", "0", "4"]}  # the sums before were released


@pytest.mark.long
def test_scripts_with_other_sets_do_not_join(job: Job) -> None:
    """The rank that comes again makes a set more; it ends, and the others go on without it."""
    faults = {"1/4/first": KILL}
    done = run(job, "-np", "2:3", FAULTS=json.dumps(faults), JOINED="3", MORE="1")
    assert "the number of process sets before the loop is 3 there, and 2 on rank 0" in done.stderr
    assert sorted(said(done)[STEPS - 1]) == [0, 2]


@pytest.mark.long
def test_a_rank_dies_while_the_others_renew_their_sets(job: Job) -> None:
    """Slot 3 has added some of them to the world behind the death of slot 1; the two that are left begin again."""
    planted = """
from ringtrain.elastic.sets import Sets
add = Sets._add
def die_or_add(sets, process_set, context):
    if slot == 3 and context.size == 3 and process_set.origin[1] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    add(sets, process_set, context)
Sets._add = die_or_add
"""
    done = run(job, "-np", "1:4", FAULTS=json.dumps({"1/4/first": KILL}), PLANTED=planted)
    steps, lost = said(done), LOST.format(1, 1)
    kept = {0: [lost, "5", "1", "0"], 2: [lost, "5", "0", "4"]}
    assert sorted(steps[3]) == [0, 1, 2, 3]
    assert [steps[step] for step in range(4, STEPS)] == [kept] * (STEPS - 4)


@pytest.mark.long
def test_a_rank_that_joins_dies_while_it_takes_sets_over(job: Job) -> None:
    """The next one comes to the same."""
    planted = """
from ringtrain.elastic.sets import Sets
take_over = Sets._take_over
def take_over_or_die(sets, agreed):
    take_over(sets, agreed)
    mark = folder / 'struck-while-joining'
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
Sets._take_over = take_over_or_die
"""
    faults = json.dumps({"1/4/first": KILL})
    done = run(job, "-np", "2:3", FAULTS=faults, JOINED="3", AWAITED_AT="[9, 12]", PLANTED=planted)
    steps, lost = said(done), LOST.format(1, 1)
    assert steps[STEPS - 1] == {0: [lost, "5", "3", "0"], 1: [lost, "0", "3", "0"], 2: [lost, "5", "0", "4"]}
    assert sorted(steps[11]) == [0, 2]
