"""The laws: what every drawn job is asked, whatever breaks in it. Each says what is wrong, or ""; pure.

What they ask is the same for all plans; the values that they compare with follow from the plan (`expectation`).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from drawn.expectation import expect, sizes
from drawn.outcome import Outcome
from drawn.plan import Plan
from ringtrain._runtime.rank_lists import ranks_of

TAG = re.compile(r"\[(\d+)\] (.*)")
OURS = re.compile(r"(.*: )?ringtrainrun: ")
# What a program that breaks down prints: Python's, the C library's, and that of a sanitizer.
BREAKDOWN = re.compile(r"Traceback \(most recent call last\)|Exception ignored in|Fatal Python error|terminate called|"
                       r"Assertion .* failed|free\(\): |ERROR: AddressSanitizer|\*\*\* stack smashing")  # fmt: skip
LINE, ALL_SAID = re.compile(r"line (\d+) "), re.compile(r"said (\d+) lines")
# What concerns all ranks may end one of them before it ends another, which then learns it from that one.
PASSED_ON = re.compile(
    r"^rank \d+ ended with an uncaught exception: (MismatchError|TimeoutError|InvalidArgumentError): "
)
# "ranks 1-3 on host 'a'", of whose ends none was seen before the others'.
SEVERAL = re.compile(r"^(ranks [\d, -]+) on host ")
Law = Callable[[Plan, Outcome], str]


def came_to_the_fault(plan: Plan, outcome: Outcome) -> str:
    """The job lives until the fault: neither its surroundings nor its output keep it from starting."""
    return (
        "" if outcome.struck else f"the job ended before the fault, with code {outcome.code}: {outcome.stderr[-1500:]}"
    )


def ended_in_bound(plan: Plan, outcome: Outcome) -> str:
    """The launcher ends within seconds, whatever happened to whom."""
    bound = expect(plan).seconds * outcome.load
    if outcome.code is None:
        return f"the launcher had not ended {outcome.seconds:.1f} s after the fault"
    if outcome.struck and outcome.seconds > bound:
        return f"the launcher ended after {outcome.seconds:.1f} s, not within {bound:.1f} s"
    return ""


def right_code(plan: Plan, outcome: Outcome) -> str:
    """The exit code is that of the first rank that failed, or of the signal that ended the launcher."""
    codes = expect(plan).codes
    if outcome.code is None or outcome.code in codes or (not codes and outcome.code != 0):
        return ""
    return f"the exit code is {outcome.code}, not {' or '.join(map(str, codes)) or 'one of a failure'}"


def first_cause_last(plan: Plan, outcome: Outcome) -> str:
    """The launcher's last words name who or what was first, and nothing but that rank's own words follows."""
    expected = expect(plan)
    if not expected.is_readable or outcome.code is None:
        return ""
    lines = [line.rstrip("\r") for line in outcome.stderr.splitlines()]
    starts = [number for number, line in enumerate(lines) if OURS.match(line)]
    if not expected.account:
        blaming = [
            lines[number] for number in starts if re.search("rank .*(failed|killed)|ended the job|lost", lines[number])
        ]
        return f"nothing failed, but the launcher says: {blaming[-1]}" if blaming else ""
    if not starts:
        return "the launcher says nothing about the end"
    header = max(starts)
    while header - 1 in starts:  # an account may have several lines
        header -= 1
    if max(starts) == len(lines) - 1:  # what it ended with is not repeated, because it stands right above
        while header and TAG.match(lines[header - 1]):
            header -= 1
    account = "\n".join(lines[header:])
    if not re.search(expected.account, account):
        return f"the last words must match '{expected.account}', but are: {account[:1500]}"
    words = [TAG.match(line) for line in lines[max(starts) + 1 :] if line]
    if not all(words) or len({match[1] for match in words}) > 1:
        return f"after the last words there are others: {account[:1500]}"
    return ""


def same_text(plan: Plan, outcome: Outcome) -> str:
    """All ranks that are told of a fault are told the same, and that it was the right rank."""
    expected = expect(plan)
    told = {rank: heard for rank, heard in outcome.heard.items() if rank not in expected.teller}
    if expected.ends_well and outcome.heard:
        return f"nothing failed, but ranks were told: {outcome.heard}"
    if not (expected.told and told and outcome.struck):
        return ""
    texts = {PASSED_ON.sub("", heard.text) for heard in told.values()}
    if len(texts) > expected.texts:
        return f"ranks were told different things: { {rank: heard.text for rank, heard in told.items()} }"
    wrong = [text for text in texts if not any(re.search(expected.told, one) for one in of_each_rank(text))]
    return f"ranks must be told what matches '{expected.told}', but heard: {wrong[0]}" if wrong else ""


def of_each_rank(text: str) -> list[str]:
    """The text as it would be of each rank that it names alone, if it names several."""
    if not (several := SEVERAL.match(text)):
        return [text]
    return [SEVERAL.sub(f"rank {rank} on host ", text) for rank in ranks_of(several[1])]


def told_in_bound(plan: Plan, outcome: Outcome) -> str:
    """Ranks that live are told of a fault within seconds, unless they were ended first."""
    expected = expect(plan)
    late = {
        rank: heard
        for rank, heard in outcome.heard.items()
        if rank not in expected.teller and heard.seconds > expected.told_within * outcome.load
    }
    if not (expected.told and late and outcome.struck):
        return ""
    return f"ranks were told later than after {expected.told_within * outcome.load:.1f} s: {late}"


def nothing_left(plan: Plan, outcome: Outcome) -> str:
    """No process, socket, shared memory or temporary file of the job is left, on no host."""
    return "left over: " + "; ".join(outcome.left) if outcome.left else ""


def no_breakdown_of_ours(plan: Plan, outcome: Outcome) -> str:
    """No traceback of the launcher, its agents or the supervisors of ranks: what ranks print carries their tag."""
    for line in outcome.lines():
        if not TAG.match(line) and BREAKDOWN.search(line):
            return f"something of ours broke down: {line} ... {outcome.stderr[-3000:]}"
    return ""


def nothing_lost(plan: Plan, outcome: Outcome) -> str:
    """Of a job that ends well, each rank has said all, in order, and it has arrived."""
    expected = expect(plan)
    if not expected.is_complete or outcome.code is None:
        return ""
    for rank in sizes(plan):
        words = outcome.files.get(rank, "").splitlines() if plan.output == "folder" else words_of(rank, outcome)
        numbers = [int(match[1]) for match in map(LINE.match, words) if match]
        said = [int(match[1]) for match in map(ALL_SAID.match, words) if match]
        if said != [len(numbers)] or numbers != list(range(len(numbers))):
            return f"rank {rank} must have said all its lines, but said {said}, and {len(numbers)} lines have arrived"
    return ""


def words_of(rank: int, outcome: Outcome) -> list[str]:
    """What a rank wrote, without its tag."""
    matches = [TAG.match(line.rstrip("\r")) for line in outcome.lines()]
    return [match[2] for match in matches if match and int(match[1]) == rank]


LAWS: dict[str, Law] = {
    law.__name__: law
    for law in (
        came_to_the_fault,
        ended_in_bound,
        right_code,
        first_cause_last,
        same_text,
        told_in_bound,
        nothing_left,
        no_breakdown_of_ours,
        nothing_lost,
    )
}


def problems(plan: Plan, outcome: Outcome) -> dict[str, str]:
    """What is wrong with a job, by law; {} if nothing is."""
    return {name: problem for name, law in LAWS.items() if (problem := law(plan, outcome))}
