"""Drawn jobs: a fault, a moment, a layout, a starter, an output, surroundings and company; each is held to the same laws.

Every run does the first plans of one seed, which have each fault once; `bin/test --long drawn` and bin/faults draw on
from a seed that they print. A plan that broke a law is run again by bin/faults --plan, and becomes one of CASES when it
is fixed.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
from drawn import program, setting
from drawn.__main__ import AT_ONCE, is_broken, main, performed
from drawn.draw import pairs_of, plans, possible_pairs
from drawn.expectation import expect
from drawn.known import KNOWN, why_excused
from drawn.laws import LAWS, problems
from drawn.outcome import Outcome
from drawn.perform import DEEDS, Machine
from drawn.plan import COMPANIES, DIMENSIONS, FAULTS, MOMENTS, PLAINEST, SURROUNDINGS, Plan, parse, why_impossible

SEED = 3
LONG_MINUTES = 60.0
PLANS_FOR_ALL_PAIRS = 320
# Plans that broke a law once.
CASES: list[str] = []
PLANS = [*itertools.islice(plans(SEED), len(FAULTS)), *map(parse, CASES)]


# ---- what is drawn ----


def test_a_seed_gives_the_same_plans_again_and_each_fault_at_once() -> None:
    assert PLANS == [*itertools.islice(plans(SEED), len(FAULTS)), *map(parse, CASES)]
    assert sorted(plan.fault for plan in PLANS[: len(FAULTS)]) == sorted(FAULTS)
    assert PLANS[: len(FAULTS)] != list(itertools.islice(plans(SEED + 1), len(FAULTS)))


def test_a_plan_is_read_as_it_is_written() -> None:
    for plan in itertools.islice(plans(SEED + 2), 100):
        assert parse(str(plan)) == plan and not why_impossible(plan)
    assert parse("fault=none") == PLAINEST and str(PLAINEST) == "fault=none"


@pytest.mark.parametrize(
    "text, words",
    [
        ("fault=boredom", "must be one of none, kill"),
        ("colour=red", "must set one of fault, moment"),
        ("victim=one", "a number"),
        ("fault=kill victim=4", "there is no such rank"),
        ("fault=cut", "a network is between hosts"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)


def test_all_pairs_of_values_come_soon() -> None:
    """In an hour some hundreds of jobs are done."""
    missing = possible_pairs()
    assert len(missing) > 1500
    for plan in itertools.islice(plans(SEED + 3), PLANS_FOR_ALL_PAIRS):
        missing -= pairs_of(plan)
    assert not missing


def test_what_a_machine_cannot_do_is_not_drawn() -> None:
    without = frozenset({"cut", "1+1", "2+1", "1+1+1", "mpich", "backward"})
    for plan in itertools.islice(plans(SEED, without), 100):
        assert not without & {value for _, value in plan.values()}


def test_each_value_is_made_and_each_fault_is_done() -> None:
    inside = {name for name, fault in FAULTS.items() if fault.inside}
    assert program.DEEDS.keys() == inside and DEEDS.keys() == FAULTS.keys() - inside
    assert program.MOMENTS.keys() == MOMENTS.keys() and program.COMPANIES.keys() == COMPANIES.keys()
    assert setting.SETTINGS.keys() == SURROUNDINGS.keys()


def test_exceptions_are_of_laws_and_plans_that_there_are() -> None:
    for known in KNOWN:
        assert LAWS.keys() >= {*known.laws} and known.laws and known.reason
        assert all(value in DIMENSIONS[name] for name, values in known.where.items() for value in values)


def test_an_exception_excuses_nothing_else() -> None:
    plan, left = parse("fault=agent-kill engine=mpich"), "left over: /dev/shm/mpich_shm_39_0"
    assert why_excused(plan, "nothing_left", left) and why_excused(
        plan, "nothing_left", f"{left}; node-b: /dev/shm/mpich_shm_39_1"
    )
    assert not why_excused(plan, "nothing_left", f"{left}; process 7: sleep") and not why_excused(
        plan, "right_code", left
    )
    assert not why_excused(replace(plan, engine="openmpi"), "nothing_left", left)


# ---- what becomes of it ----


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Machine() as made:
        yield made


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, machine: Machine) -> Iterator[dict[Plan, Future]]:
    """Of all plans that are selected and that this machine can do; some are done at once, since jobs mostly wait."""
    asked = {item.callspec.params.get("plan") for item in request.session.items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            plan: pool.submit(machine.perform, plan) for plan in PLANS if plan in asked and not beyond(machine, plan)
        }
        pool.shutdown(cancel_futures=True)


def beyond(machine: Machine, plan: Plan) -> set[str]:
    """The values of a plan that this machine cannot do."""
    return {value for name, value in plan.values() if name in DIMENSIONS} & machine.cannot


def complaint(plan: Plan, outcome: Outcome) -> str:
    """What is wrong with a job, for people; "" if nothing is, or all of it is known."""
    if not is_broken(plan, outcome):
        return ""
    found = [
        f"{law}: {problem}" for law, problem in problems(plan, outcome).items() if not why_excused(plan, law, problem)
    ]
    return "\n".join(
        [*found, f"expected: {expect(plan)}", f"found: {outcome.brief()}", f"again: bin/faults --plan {str(plan)!r}"]
    )


def test_the_command_counts_what_no_job_has_had(capsys: pytest.CaptureFixture[str]) -> None:
    """bin/faults, of few values, so that all their pairs are soon known."""
    without = [value for listed in DIMENSIONS.values() for value in listed[2:]]
    assert main(["--seed", "1", "--count", "0", *(f"--without={value}" for value in without)]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"bin/faults: 0 jobs, 0 of them broke a law; [1-9]\d* pairs of values were in none", said)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "plan",
    [  # every other one, and those that broke a law once
        pytest.param(plan, id=str(plan), marks=pytest.mark.long if number < len(FAULTS) and number % 2 else ())
        for number, plan in enumerate(PLANS)
    ],
)
def test_a_drawn_job_keeps_every_law(plan: Plan, outcomes: dict[Plan, Future], machine: Machine) -> None:
    if plan not in outcomes:
        reasons = "; ".join(sorted({machine.lacks[value] for value in beyond(machine, plan)}))
        pytest.skip(f"needs another machine: {reasons}")
    assert not (found := complaint(plan, outcomes[plan].result())), found


@pytest.mark.long
@pytest.mark.timeout(LONG_MINUTES * 60 + 600)
def test_an_hour_of_drawn_jobs(machine: Machine) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"bin/faults --minutes {LONG_MINUTES:g} --seed {seed}")
    missing, found = possible_pairs(machine.cannot), []
    for plan, outcome in performed(machine, plans(seed, machine.cannot), LONG_MINUTES, AT_ONCE):
        missing -= pairs_of(plan)
        found += filter(None, [complaint(plan, outcome)])
    assert not found, "\n\n".join(found)
    assert not missing, f"{len(missing)} pairs of values were in no job"
