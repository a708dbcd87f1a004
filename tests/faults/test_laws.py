"""Each law of drawn jobs finds what it is there to find: a launcher with a vice, and outcomes that are made up."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from drawn import fake_launcher
from drawn.laws import LAWS, problems, same_text
from drawn.outcome import Heard, Outcome
from drawn.perform import WITH_HOSTS, Machine
from drawn.plan import Plan, parse

FAKE = Path(fake_launcher.__file__)
KILLED, FINE = parse("fault=kill layout=3 victim=1"), parse("fault=none layout=3")
LOAD, PATIENCE = 1.5, 2.0
# What a launcher does wrong, in which job, and the law that must find it.
VICES = {
    "starts nothing": (KILLED, "came_to_the_fault"),
    "slow": (KILLED, "ended_in_bound"),
    "returns 0": (KILLED, "right_code"),
    "returns 1": (FINE, "right_code"),
    "goes on talking": (KILLED, "first_cause_last"),
    "blames another": (KILLED, "first_cause_last"),
    "says nothing": (KILLED, "first_cause_last"),
    "blames in vain": (FINE, "first_cause_last"),
    "tells another text": (parse("fault=raise layout=3 victim=1"), "same_text"),
    "tells late": (parse("fault=raise layout=3 victim=1"), "told_in_bound"),
    "leaves a process": (FINE, "nothing_left"),
    "leaves shared memory": (FINE, "nothing_left"),
    "leaves a file": (FINE, "nothing_left"),
    "breaks down": (FINE, "no_breakdown_of_ours"),
    "loses a line": (FINE, "nothing_lost"),
}


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, Future]]:
    """Of a job under each launcher with a vice."""
    with Machine(frozenset(WITH_HOSTS)) as machine, ThreadPoolExecutor(4) as pool:
        yield {
            vice: pool.submit(machine.perform, plan, (str(FAKE), vice), LOAD, PATIENCE)
            for vice, (plan, _) in VICES.items()
        }


def test_there_is_a_vice_against_each_law() -> None:
    assert {law for _, law in VICES.values()} == LAWS.keys()
    assert VICES.keys() == {
        *fake_launcher.AFTER,
        *fake_launcher.STDOUT,
        *fake_launcher.STDERR,
        *fake_launcher.CODES,
        *fake_launcher.INSTEAD,
    }


@pytest.mark.long
@pytest.mark.parametrize("vice", VICES)
def test_a_launcher_with_a_vice_is_found_out(vice: str, outcomes: dict[str, Future]) -> None:
    plan, law = VICES[vice]
    outcome = outcomes[vice].result()
    assert set(problems(plan, outcome)) == {law}, (problems(plan, outcome), outcome)


# ---- made up, where a job of its own would show nothing more ----

LINES = "".join(f"[{rank}] line 0 x\n[{rank}] said 1 lines\n" for rank in range(3))
WELL = Outcome(stdout=LINES)
LOST = Heard(
    "PeerLostError", "rank 1 on host 'a': expected it to live until shutdown() but its process has ended.", 0.5
)
WORDS = "[0] Traceback (most recent call last):\nringtrainrun: rank 1 (host a) was killed by signal 9, SIGKILL; it ended with:\n[1] Ouch\n"
ENDED = Outcome(code=137, stderr=WORDS, heard={0: LOST, 2: LOST})


def test_what_is_as_it_should_be_breaks_no_law() -> None:
    assert not problems(FINE, WELL) and not problems(KILLED, ENDED)


@pytest.mark.parametrize(
    "plan, outcome, law",
    [
        (KILLED, replace(ENDED, code=None), "ended_in_bound"),
        (KILLED, replace(ENDED, seconds=15.0), "ended_in_bound"),
        (parse("fault=stop"), replace(ENDED, code=0), "right_code"),
        (KILLED, replace(ENDED, stderr=WORDS + "[2] another one's words\n"), "first_cause_last"),
        (KILLED, replace(ENDED, stderr=WORDS.replace("signal 9", "signal 11")), "first_cause_last"),
        (parse("fault=interrupt layout=3"), replace(ENDED, code=130), "first_cause_last"),
        (KILLED, replace(ENDED, heard={0: LOST, 2: replace(LOST, text="rank 0 has ended")}), "same_text"),
        (KILLED, replace(ENDED, heard={0: replace(LOST, text="rank 2 has ended")}), "same_text"),
        (KILLED, replace(ENDED, heard={0: replace(LOST, seconds=2.5)}), "told_in_bound"),
        (FINE, replace(WELL, heard={0: LOST}), "same_text"),
        (FINE, replace(WELL, left=("process 1: sleep",)), "nothing_left"),
        (FINE, replace(WELL, stderr="Exception ignored in: <function>"), "no_breakdown_of_ours"),
        (FINE, replace(WELL, stdout=LINES.replace("[2] said 1 lines\n", "")), "nothing_lost"),
        (parse("output=folder layout=3"), WELL, "nothing_lost"),
        (parse("surroundings=no-folder"), replace(ENDED, code=1, stderr="ringtrainrun: no folder"), "right_code"),
    ],
)
def test_what_is_wrong_breaks_its_law(plan: Plan, outcome: Outcome, law: str) -> None:
    assert law in problems(plan, outcome)


TOGETHER = "ranks 0, 2, 3 on host 'a': expected them to live until shutdown() but their processes have ended."


@pytest.mark.parametrize("victim, is_named", [(0, True), (1, False), (3, True)])
def test_a_rank_may_be_named_beside_those_that_ended_with_it(victim: int, is_named: bool) -> None:
    told = {rank: replace(LOST, text=TOGETHER) for rank in range(4) if rank != victim}
    plan = parse(f"fault=kill layout=4 victim={victim}")
    assert bool(same_text(plan, replace(ENDED, heard=told))) != is_named


def test_a_busy_machine_is_allowed_for() -> None:
    late = replace(ENDED, seconds=20.0, heard={0: replace(LOST, seconds=3.0)})
    assert set(problems(KILLED, late)) == {"ended_in_bound", "told_in_bound"}
    assert not problems(KILLED, replace(late, load=2.0))
