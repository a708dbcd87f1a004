"""What is promised of a plan, by docs/promises.md and docs/launch.md; pure."""

from __future__ import annotations

from dataclasses import dataclass

from drawn.plan import BEFORE_THE_WORLD, FAULTS, LAYOUTS, REFUSED, START_TIMEOUT, Plan

SECONDS_TO_END = 12.0  # after ranks could know: 2 for their reports, 3 until SIGKILL, 5 until agents kill, and some
SECONDS_OF_WORK = 30.0  # of a job in which nothing breaks, after the moment
CODES_OF_A_REFUSAL = (2, 125)
UNREADABLE = ("unread", "closed")  # outputs of which nothing, or not the end, can be read


@dataclass(frozen=True)
class Expectation:
    """What the laws ask for.

    Attributes:
        codes: exit codes of ringtrainrun; () for any but 0.
        seconds: from the fault to the launcher's end, on a quiet machine.
        account: pattern of the launcher's last words; "" if it must blame nobody.
        is_readable: whether these words can be read.
        told: pattern of what a rank is told that another one's fault concerns; "" if nothing is promised.
        told_within: seconds.
        teller: the ranks whose own error it is, so that they hear it in other words; those that the fault is done to.
        ends_well: whether each rank must come to its end.
        is_complete: whether all that ranks wrote must arrive.
        texts: how many different ones ranks may be told: one, but one on each side of a cut.
    """

    codes: tuple[int, ...]
    seconds: float
    account: str
    is_readable: bool
    told: str
    told_within: float
    teller: tuple[int, ...]
    ends_well: bool
    is_complete: bool
    texts: int = 1


def expect(plan: Plan) -> Expectation:
    """What the laws ask of a plan."""
    fault = FAULTS[plan.fault]
    readable = plan.output not in UNREADABLE
    if plan.surroundings in REFUSED:
        return Expectation(CODES_OF_A_REFUSAL, SECONDS_TO_END, r"ringtrainrun: \S", readable, "", 0, (), False, False)
    if plan.goes_on:
        return Expectation(
            (0,),
            SECONDS_OF_WORK,
            "",
            readable,
            "",
            0,
            (),
            True,
            readable and plan.output not in ("full", "full-folder"),
        )
    waits_to_start = plan.moment in BEFORE_THE_WORLD and plan.fault in ("stop", "stall")
    # A rank that ends before there is a world cannot be told of in one, nor can who waits in MPI_Init raise.
    in_a_world = plan.moment not in (*BEFORE_THE_WORLD, "shutdown")
    within = START_TIMEOUT if waits_to_start else fault.within
    codes, account = fault.codes, fault.account
    if waits_to_start:
        codes, account = (), r"\S"
    if plan.fault == "launcher-kill":
        account = ""
    return Expectation(
        codes,
        within + SECONDS_TO_END,
        for_victims(account, plan),
        readable,
        for_victims(fault.told, plan) if in_a_world else "",
        within,
        () if plan.fault in ("dtype", "shape") else plan.victims,
        False,
        False,
        texts=2 if plan.fault == "cut" else 1,
    )


def for_victims(pattern: str, plan: Plan) -> str:
    """The pattern with the numbers of the victims in it."""
    victims = plan.victims or (0,)
    return pattern.replace("{v}", str(victims[0])).replace("{w}", str(victims[-1]))


def sizes(plan: Plan) -> range:
    """The ranks of a plan."""
    return range(LAYOUTS[plan.layout].size)
