"""`ringtrain doctor --speed`: how fast each rank computes a training script's steps, and what shares by speed would bring.

The script runs for a while as `ringtrainrun --elastic --batch balanced` would run it, and rank 0 is asked as by `ringtrain top`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import click

from ringtrain._runtime import inquiries
from ringtrain._runtime.statistics import Share
from ringtrain.elastic import balance
from ringtrain.launch.hosts import Host

SECONDS_TO_BEGIN = 300.0  # until all ranks have told a speed
SECONDS_TO_SETTLE = 10.0  # after that: speeds move slowly with what is measured
SECONDS_TO_END = 30.0
SECONDS_BETWEEN = 0.5
SECONDS_TO_ANSWER = 5.0


class Speeds(NamedTuple):
    """What rank 0 has said. hosts: names, by rank."""

    shares: list[Share]
    hosts: list[str]


def measure(command: Sequence[str], hosts: Sequence[Host], flags: Mapping[str, object]) -> Speeds:
    """Runs a script on all ranks until their speeds are known, and ends it.

    Raises:
        click.ClickException: it has ended before, or has told no speeds.
    """
    before = set(inquiries.those_who_answer())
    with _job(_launched(command, hosts, flags)) as job:
        deadline, found = time.monotonic() + SECONDS_TO_BEGIN, None
        while time.monotonic() < deadline:
            if job.poll() is not None:
                raise click.ClickException(_ended_with(job.returncode))
            time.sleep(SECONDS_BETWEEN)
            told = _asked(before)
            if told and found is None:
                deadline = time.monotonic() + SECONDS_TO_SETTLE
            found = told or found
    if found is None:
        raise click.ClickException(
            f"--speed: all ranks must have told their speeds within {SECONDS_TO_BEGIN:g} s, and rank 0 must run on this host, but none was "
            "heard of. The script must train in the loop of a State or Elastic with a sampler; name this host first."
        )
    return found


def _launched(command: Sequence[str], hosts: Sequence[Host], flags: Mapping[str, object]) -> list[str]:
    ranks = sum(host.slots for host in hosts) or 2
    named = ["-H", ",".join(map(str, hosts))] if hosts else []
    given = [
        word
        for name, value in flags.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    elastic = ["--transport", "tcp", "--elastic", "--batch", "balanced", "--launcher-grace", "0"]
    launch = [sys.executable, "-m", "ringtrain.launch", *elastic, "-np", str(ranks)]
    return [*launch, *named, *given, *command]


@contextlib.contextmanager
def _job(line: Sequence[str]) -> Iterator[subprocess.Popen]:
    job = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    try:
        yield job
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(SECONDS_TO_END)
        if job.poll() is None:
            job.kill()


def _asked(before: set[int]) -> Speeds | None:
    """What the rank 0 of a job says that was not there before; None as long as some rank's speed is unknown."""
    for process, name in inquiries.those_who_answer().items():
        if process in before:
            continue
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(inquiries.ask(name, SECONDS_TO_ANSWER) or b"{}")
            shares = [Share(int(rank), int(samples), speed) for rank, samples, speed in told.get("shares", ())]
            if shares and all(share.samples_per_second > 0 for share in shares):
                return Speeds(shares, _hosts_of(json.loads(told["flight_record"])["hosts"], len(shares)))
    return None


def _hosts_of(ranks_of: Mapping[str, Sequence[int]], count: int) -> list[str]:
    by_rank = {rank: host for host, ranks in ranks_of.items() for rank in ranks}
    return [by_rank.get(rank, "?") for rank in range(count)]


# ---- pure ----


def _ended_with(code: int) -> str:
    if code:
        return f"--speed: the script must train, but has failed with code {code}. Its error is above; the command comes behind --."
    return (
        f"--speed: the script must train for some {SECONDS_TO_SETTLE:g} s at least, but has ended with code 0. "
        "Give it more epochs, and a State or Elastic with a sampler."
    )


def speed_report(found: Speeds) -> list[str]:
    """What people read: speeds, both kinds of shares, and what the one is better by."""
    speeds = [share.samples_per_second for share in found.shares]
    batch = sum(share.samples for share in found.shares)
    equal, balanced = balance.equal_shares(batch, len(speeds)), balance.shares(speeds, batch)
    lines = [f"a batch of {batch} samples", "rank  samples/s  equal  balanced  host"]
    lines += [
        f"{rank:4d}  {speed:9.4g}  {equal[rank]:5d}  {balanced[rank]:8d}  {found.hosts[rank]}"
        for rank, speed in enumerate(speeds)
    ]
    lines += [
        f"{name} shares: {batch / balance.seconds_of(shares, speeds):.4g} samples a second in all, communication left out"
        for name, shares in (("equal", equal), ("balanced", balanced))
    ]
    gain = 100 * (balance.gain(balanced, speeds) - 1)
    advice = "ringtrainrun --elastic --batch balanced" if gain >= 100 * (balance.PAYS - 1) else "equal shares do"
    return [*lines, f"balanced shares are {gain:+.0f} %: {advice}"]
