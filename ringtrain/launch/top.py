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

from ringtrain import flights, inquiries, statistics
from ringtrain.errors import InvalidArgumentError
from ringtrain.flights import FlightRecord
from ringtrain.statistics import Stats, bytes_text
from ringtrain.traces.findings import time_text
from ringtrain.traces.steps import length, numbered, union

SECONDS_TO_ANSWER = 5.0  # a program that keeps the GIL to itself answers late
LONGEST_PROGRAM = 80  # letters of its command line
CLEAR = "\x1b[H\x1b[2J"


@dataclass
class Answer:
    """What rank 0 says at a moment (seconds of the launcher's clock)."""

    at: float
    rank: int
    size: int
    hosts: int
    program: str
    stats: Stats
    record: FlightRecord


@dataclass
class Pace:
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
    before = _ask(process, name)
    while True:
        time.sleep(interval)
        try:
            now = _ask(process, name)
        except click.ClickException as problem:
            if not once and process not in inquiries.those_who_answer():
                click.echo("The job has ended.")
                return 0
            if once or not isinstance(problem, _NoWorld):
                raise
            continue  # its world has ended: soon the process does, or another world begins
        lines = map(printable, describe(before, now, process))
        click.echo((CLEAR if sys.stdout.isatty() and not once else "") + "\n".join(lines))
        if once:
            return 0
        before = now


def _chosen(job: int | None) -> tuple[int, str]:
    found = inquiries.those_who_answer()
    if not found:
        raise click.ClickException(
            "there must be a job of yours whose rank 0 runs on this host and has called init(), but there is none. "
            "For one on another host: ssh HOST ringtrain top"
        )
    if job is None and len(found) > 1:
        raise click.ClickException(
            f"--job must name one of {len(found)} jobs, by the process of its rank 0: {', '.join(map(str, sorted(found)))}."
        )
    process = next(iter(found)) if job is None else job
    if process not in found:
        raise click.ClickException(
            f"--job {process}: it must be the process of a rank 0, but these are {', '.join(map(str, sorted(found)))}."
        )
    return process, found[process]


def _ask(process: int, name: str) -> Answer:
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


def answer_of(text: bytes, at: float) -> Answer:
    """What a process has answered.

    Raises:
        NoWorldError: it is not rank 0 of an open world.
        ValueError, InvalidArgumentError: it is of another release.
    """
    told = json.loads(text or b"{}")
    if "flight_record" not in told:
        raise NoWorldError("it has no world open in which it is rank 0")
    return Answer(
        at,
        told["rank"],
        told["size"],
        told["hosts"],
        told["program"],
        statistics.from_lines(told["lateness"], told["counters"], told["traffic"]),
        flights.parse(told["flight_record"], "rank 0"),
    )


def pace_of(record: FlightRecord) -> Pace | None:
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
    return Pace(
        len(times),
        float(submitted[begins[-1]] - submitted[begins[0]]) / len(times),
        float(np.median(times)),
        min(times),
    )


def describe(before: Answer, now: Answer, process: int) -> list[str]:
    """The lines that are shown of two answers, one after the other."""
    seconds = max(now.at - before.at, 1e-9)
    since = now.stats.since(before.stats)
    on = f"{now.size} ranks on {now.hosts} host{'s' if now.hosts > 1 else ''}"
    program = " ".join(now.program.split())  # a program of -c has lines
    lines = [f"{on}, process {process}: {program[:LONGEST_PROGRAM]}"]
    pace = pace_of(now.record)
    if pace is None:
        lines.append("steps      none yet: no operation has come again under its name")
    else:
        share = pace.fastest / pace.under_way if pace.under_way else 1.0
        lines.append(
            f"steps      {1 / pace.step:.3g} a second, {time_text(pace.step * 1e6)} each (the last {pace.steps})"
        )
        lines.append(f"floor      {share:.0%}: sums under way for {time_text(pace.under_way * 1e6)} of a step, "
                     f"{time_text(pace.fastest * 1e6)} in the fastest")  # fmt: skip
    lines.append(_last_rank(since))
    moved = {name: since.counters[name] / seconds for name in ("wire_bytes_sent", "shared_bytes")}
    lines.append(f"bytes      {bytes_text(moved['wire_bytes_sent'])}/s between hosts, "
                 f"{bytes_text(moved['shared_bytes'])}/s within them; "
                 f"{since.counters['operations'] / seconds:.3g} operations a second")  # fmt: skip
    lines.append(f"waiting    {min(since.waiting_seconds / seconds, 1.0):.0%} of the time, on rank 0")
    newest = max((each.submitted for each in now.record.operations), default=None)
    if newest is not None and since.counters["operations"] == 0:
        lines.append(
            f"nothing has ended since; the newest operation was submitted {now.record.written - newest:.1f} s ago"
        )
    return lines


def _last_rank(since: Stats) -> str:
    if not since.late:
        return "last rank  none waited for"
    late = since.late[0]
    return f"last rank  rank {late.rank}, {late.times} times, for {time_text(late.seconds * 1e6)} in all; the longest in '{late.name}'"
