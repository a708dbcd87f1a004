"""`ringtrain top`: how a job goes that runs, asked of its rank 0, from any terminal of that host.

What is shown follows from two answers of rank 0, in pure functions: steps from the operations that it remembers (the
flight record), as in `ringtrain timeline report`; bytes, waits and who is last from its counters.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from itertools import pairwise

import click
import numpy as np

from ringtrain._binding.log import Stall
from ringtrain._runtime import flight_recorder, inquiries, rank_lists, statistics
from ringtrain._runtime.flight_recorder import FlightRecord, placed
from ringtrain._runtime.statistics import Stats, bytes_text
from ringtrain.errors import InvalidArgumentError
from ringtrain.launch.report.steps import length, numbered, union
from ringtrain.launch.report.verdicts import number_text, time_text

SECONDS_TO_ANSWER = 5.0  # a program that keeps the GIL to itself answers late
SECONDS_TO_END = 2.0  # of a process that has closed its world
SECONDS_TO_SAY_WHAT = 1.0  # of several jobs each
STEPS_OF_A_HANG = 3.0  # in which nothing has begun or ended
LONGEST_PROGRAM = 80  # letters of its command line
CLEAR = "\x1b[H\x1b[2J"


@dataclass
class Moment:
    """What rank 0 says at a moment (seconds of the launcher's clock)."""

    at: float
    rank: int
    size: int
    hosts: int
    program: str
    stats: Stats
    record: FlightRecord
    stall: Stall | None = None


@dataclass
class RecentSteps:
    """Of the last steps that a record has whole; times in seconds.

    Attributes:
        steps: how many.
        step: the mean of their lengths.
        under_way, fastest: for how long sums were under way in a step: the median, and the least.
    """

    steps: int
    step: float
    under_way: float
    fastest: float


class NoWorldError(ValueError):
    """A process has none open in which it is rank 0."""


class _NoWorld(click.ClickException):
    """The same, said to the user."""


@click.command()
@click.option("--once", is_flag=True, help="prints what it finds once, for scripts")
@click.option("--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, metavar="SECONDS")
@click.option("--job", type=int, metavar="PROCESS", help="of several jobs, the one whose rank 0 is this process")
def top(once: bool, interval: float, job: int | None) -> int:
    """Shows how a job of yours goes that runs on this host: steps, share of the floor, who is last, bytes.

    It asks rank 0, so it must run where that is: on the launcher's host, unless the launcher has no ranks beside it; there,
    ssh HOST ringtrain top. A job that nobody looks at pays nothing for it.
    """
    process, name = _chosen(job)
    before = None
    while True:
        try:
            now = _ask(process, name)
        except click.ClickException as problem:
            if _has_ended(process):
                click.echo("The job has ended.")
                return 0
            if once or before is None or not isinstance(problem, _NoWorld):
                raise
            time.sleep(interval)
            continue  # another world may begin
        if before is not None:
            lines = map(printable, describe(before, now, process))
            click.echo((CLEAR if sys.stdout.isatty() and not once else "") + "\n".join(lines))
            if once:
                return 0
        before = now
        time.sleep(interval)


def _chosen(job: int | None) -> tuple[int, str]:
    found = inquiries.those_who_answer()
    if not found:
        raise click.ClickException(
            "there must be a job of yours whose rank 0 runs on this host and has called init(), but there is none. "
            "For one on another host or in a container: ssh HOST ringtrain top, or call it within the container."
        )
    if job is None and len(found) > 1:
        listed = [f"{process} ({_what_it_is(found[process])})" for process in sorted(found)]
        raise click.ClickException(
            f"--job must name one of {len(found)} jobs, by the process of its rank 0:\n" + "\n".join(listed)
        )
    process = next(iter(found)) if job is None else job
    if process not in found:
        raise click.ClickException(
            f"--job {process}: it must be the process of a rank 0, but these are {', '.join(map(str, sorted(found)))}."
        )
    return process, found[process]


def _has_ended(process: int) -> bool:
    """Whether a process that gave no answer is gone, as it soon is when its world has just ended."""
    until = time.monotonic() + SECONDS_TO_END
    while process in inquiries.those_who_answer():
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True


def _what_it_is(name: str) -> str:
    """A job among several, in a few words."""
    try:
        answer = answer_of(inquiries.ask(name, SECONDS_TO_SAY_WHAT), time.monotonic())
    except (OSError, ValueError, InvalidArgumentError):
        return "it does not answer"
    return printable(f"{_size_of(answer)}: {_program_of(answer)}")


def _ask(process: int, name: str) -> Moment:
    must = (
        f"process {process}: it must answer within {SECONDS_TO_ANSWER:g} s as rank 0 of a world of this release, but: "
    )
    try:
        return answer_of(inquiries.ask(name, SECONDS_TO_ANSWER), time.monotonic())
    except NoWorldError as problem:
        raise _NoWorld(f"{must}{problem}.") from None
    except (OSError, ValueError, InvalidArgumentError) as problem:
        raise click.ClickException(f"{must}{problem}.") from None


# ---- pure ----


def printable(line: str) -> str:
    """A line without what a terminal would obey: names and programs are another process's, perhaps another user's."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def answer_of(text: bytes, at: float) -> Moment:
    """What a process has answered.

    Raises:
        NoWorldError: it is not rank 0 of an open world.
        ValueError, InvalidArgumentError: it is of another release.
    """
    told = json.loads(text or b"{}")
    if "flight_record" not in told:
        raise NoWorldError("it has no world open in which it is rank 0")
    return Moment(
        at=at,
        rank=told["rank"],
        size=told["size"],
        hosts=told["hosts"],
        program=told["program"],
        stats=statistics.from_lines(told["lateness"], told["counters"], told["traffic"], told.get("shares", ())),
        record=flight_recorder.parse(told["flight_record"], "rank 0"),
        stall=Stall(*told["stall"]) if told.get("stall") else None,
    )


def pace_of(record: FlightRecord) -> RecentSteps | None:
    """The steps in a record; None if no operation comes again often enough."""
    own = [each for each in record.operations if each.finished is not None and each.process_set == 0]
    if not own:
        return None
    own.sort(key=lambda each: each.submitted)
    number_of: dict[str, int] = {}
    tensor = np.array([number_of.setdefault(each.subject, len(number_of)) for each in own])
    submitted = np.array([each.submitted for each in own])
    ended = np.array([each.finished or 0.0 for each in own])
    started = np.array([each.submitted if each.started is None else each.started for each in own])
    before = np.maximum.accumulate(ended)
    size_bytes = np.array([each.bytes for each in own], float)
    step = numbered(tensor, submitted - np.concatenate(([0.0], before[:-1])), size_bytes)
    begins = np.flatnonzero(np.diff(step)) + 1  # of the steps after the first, of which the record may lack a part
    if len(begins) < 2:
        return None
    times = [length(union(started[a:b], ended[a:b])) for a, b in pairwise(begins.tolist())]
    return RecentSteps(
        len(times),
        float(submitted[begins[-1]] - submitted[begins[0]]) / len(times),
        float(np.median(times)),
        min(times),
    )


def describe(before: Moment, now: Moment, process: int) -> list[str]:
    """The lines that are shown of two answers, one after the other."""
    seconds = max(now.at - before.at, 1e-9)
    since = now.stats.since(before.stats)
    pace, still = pace_of(now.record), _stands_still_for(now.record, since)
    hangs = still is not None and still > STEPS_OF_A_HANG * (pace.step if pace else 0.0)
    lines = [f"{_size_of(now)}, process {process}: {_program_of(now)}"]
    if pace is None:
        lines.append("steps      none yet: no operation has come again under its name")
    else:
        each = f"{number_text(1 / pace.step)} a second, {time_text(pace.step * 1e6)} each"
        lines.append(
            f"steps      none for {time_text((still or 0.0) * 1e6)}; before that {each}"
            if hangs
            else f"steps      {each} (the last {pace.steps})"
        )
    if pace is not None and not hangs:
        share = pace.fastest / pace.under_way if pace.under_way else 1.0
        lines.append(f"floor      {share:.0%}: sums under way for {time_text(pace.under_way * 1e6)} of a step, "
                     f"{time_text(pace.fastest * 1e6)} in the fastest")  # fmt: skip
    lines.append(f"last rank  {_awaited(now) if hangs else _last_rank(since, now.record)}")
    moved = {name: since.counters[name] / seconds for name in ("wire_bytes_sent", "shared_bytes")}
    lines.append(f"bytes      {bytes_text(moved['wire_bytes_sent'])}/s between hosts, "
                 f"{bytes_text(moved['shared_bytes'])}/s within them; "
                 f"{number_text(since.counters['operations'] / seconds)} operations a second")  # fmt: skip
    if since.shares:
        lines.append(f"shares     {statistics.shares_text(since.shares)}")
    lines.append(f"waiting    {min(since.waiting_seconds / seconds, 1.0):.0%} of the time, on rank 0")
    if still is not None:
        newest = now.record.written - max(each.submitted for each in now.record.operations)
        lines.append(f"nothing has ended since; the newest operation was submitted {newest:.1f} s ago")
    return lines


def _size_of(answer: Moment) -> str:
    return f"{answer.size} ranks on {answer.hosts} host{'s' if answer.hosts > 1 else ''}"


def _program_of(answer: Moment) -> str:
    return " ".join(answer.program.split())[:LONGEST_PROGRAM]  # a program of -c has lines


def _stands_still_for(record: FlightRecord, since: Stats) -> float | None:
    """Seconds in which no operation has begun or ended; None if some has ended since the answer before, or there is none."""
    if since.counters["operations"] or not record.operations:
        return None
    return record.written - max(max(each.submitted, each.finished or 0.0) for each in record.operations)


def _last_rank(since: Stats, record: FlightRecord) -> str:
    if not since.late:
        return "none waited for"
    late = since.late[0]
    return (
        f"{placed([late.rank], record.hosts)}, {late.times} times, for {time_text(late.seconds * 1e6)} in all; "
        f"the longest in '{late.name}'"
    )


def _awaited(now: Moment) -> str:
    """Whom a job waits for that stands still, as far as rank 0 knows."""
    record, stall = now.record, now.stall
    ended = max((each.finished or 0.0 for each in record.operations), default=0.0)
    if stall is not None and stall.at > ended:
        missing = placed(rank_lists.ranks_of(stall.missing), record.hosts)
        return f"{missing}: missing in {stall.operation}, which {stall.submitters} submitted"
    waiting = [each for each in record.operations if each.is_open and each.finished is None]
    if not waiting:
        return f"rank 0 has submitted nothing for {time_text((record.written - ended) * 1e6)}; others may wait for it"
    return (
        f"not known yet: rank 0 waits in {waiting[0].subject}, for {time_text((record.written - waiting[0].submitted) * 1e6)}; "
        "who is missing is reported after stall_warning_seconds"
    )
