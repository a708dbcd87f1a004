"""Deaths while a job recovers from a death, and again and again: the others take the next step, and lose none."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import threading
import time
from pathlib import Path

import pytest
from environments import python_with, rank_environment, transport_of
from test_elastic_programs import KILL, SCRIPT, assert_as_planned, run, sizes

from benchmarks.jobs import Job

pytestmark = [
    pytest.mark.tcp,
]
# SECOND is the slot that dies next, once and after the death in window 4, where a line of RECOVERY says.
PLANTED = """
from ringtrain._bootstrap.member import Member
import ringtrain.torch.elastic.transparent as states

def die():
    once = folder / "second"
    if str(slot) == os.environ["SECOND"] and (folder / "struck-1-4-backward").exists() and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)

def plant(owner, name, before=lambda *_: None, after=lambda *_: None):
    whole = getattr(owner, name)
    def planted(*given):
        before(*given)
        result = whole(*given)
        after(*given)
        return result
    setattr(owner, name, planted)

def said(kind):
    return lambda member, frame: frame.startswith(kind) and die()

"""
# What the second one has done when it dies; frames are known by their first byte (control.h).
RECOVERY = {
    "heard of the first death": "plant(Member, '_abandon', before=lambda *_: die())",
    "reported": "plant(Member, '_tell', after=said('05'))",
    "heard of the next world": "plant(Member, '_open', before=lambda *_: die())",
    "connected": "plant(Member, '_tell', after=said('07'))",
    "begun to settle": "plant(states._Training, 'enter_world', after=lambda *_: die())",
}
TAKING = "plant(states, 'take_over', after=lambda value: hasattr(value, 'forward') and die())"


def made(done: subprocess.CompletedProcess, window: int) -> float:
    """When the last rank had the results of a window; seconds since the epoch."""
    return max(float(at) for at in re.findall(rf"^\[\d+\] made {window} ([\d.]+)$", done.stdout, re.MULTILINE))


def struck(job: Job, mark: str) -> float:
    """When a rank has left its mark, and died."""
    return Path(job.temporary, mark).stat().st_mtime


@pytest.mark.long
@pytest.mark.parametrize("stage", [*RECOVERY, ""], ids=lambda stage: stage or "one death")
def test_a_death_while_the_others_recover(stage: str, job: Job) -> None:
    """The window in which the first rank has died is that of whoever is left."""
    planted = PLANTED + RECOVERY.get(stage, "")
    faults = json.dumps({"1/4/backward": KILL})
    done = run(job, "plain", ranks=3, FAULTS=faults, PLANTED=planted, SECOND="2")
    left = 1 if stage else 2
    plan = assert_as_planned(done, "plain", left)
    assert sizes(plan) == [3] * 4 + [left] * (len(plan) - 4)
    seconds = made(done, 4) - struck(job, "struck-1-4-backward")
    print(f"the next window after {seconds:.2f} s")
    assert seconds < 4.0  # a rank that waits for one that never comes to be connected takes 6 s


@pytest.mark.long
@pytest.mark.parametrize("second", [0, 1], ids=["who gives it", "who takes it"])
def test_a_death_while_a_rank_takes_the_state(second: int, job: Job) -> None:
    """It has the model, and not the optimizer. Whoever joins then takes all of it, from one that has it."""
    variables = {"FAULTS": json.dumps({"1/4/backward": KILL}), "PLANTED": PLANTED + TAKING, "SECOND": str(second)}
    done = run(job, "plain", ranks=3, **variables, JOINED="3", AWAITED_AT="[9, 15]")
    plan = assert_as_planned(done, "plain", 3)
    assert sizes(plan) == [3] * 4 + [2] * 12 + [3] * (len(plan) - 16)
    assert Path(job.temporary, "second").exists()


@pytest.mark.long
def test_ranks_that_die_again_and_again(job: Job, tmp_path: Path) -> None:
    """Ten deaths in a minute, also of ranks that join, cost the others at most a tenth of their steps, and no step is lost."""
    python, complaints = python_with("tcp"), tmp_path / "stderr"
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", "-np", "2:4"]
    line += ["--blacklist-cooldown-range", "1", "1", python, str(SCRIPT)]
    environment = rank_environment(KIND="plain", SAMPLES="1000000", PAUSE="0.1")
    with complaints.open("w") as stderr:
        launcher = job.start(*line, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(launcher.stdout))
    reader.start()
    wait_for(lambda: times_of_steps(lines)[-60:][:1], complaints)
    begun, killed = time.time(), 0
    while killed < 10:
        time.sleep(max(0.0, begun + 6.0 * killed - time.time()))
        killed += wait_for(lambda number=killed: kill_one(job, 2 + number % 2), complaints)
    seconds = time.time() - begun
    end = time.time()
    wait_for(lambda: times_of_steps(lines)[-1] > end, complaints)
    os.kill(next(iter(job.find("-m ringtrain.launch"))), signal.SIGINT)
    launcher.wait(60.0)
    reader.join()
    steps = times_of_steps(lines)
    undisturbed = statistics.median(later - earlier for earlier, later in itertools.pairwise(steps))
    share = sum(begun <= at <= end for at in steps) * undisturbed / seconds
    print(f"{killed} deaths in {seconds:.0f} s left {share:.1%} of the steps of {undisturbed:.3f} s")
    assert share >= 0.9
    numbers = [int(each) for each in re.findall(r"^\[0\] made (\d+) ", "".join(lines), re.MULTILINE)]
    assert numbers == list(range(len(numbers)))


def times_of_steps(lines: list[str]) -> list[float]:
    """Of the rank in slot 0, which nobody kills."""
    return [float(each.split()[3]) for each in lines if each.startswith("[0] made ")]


def kill_one(job: Job, slot: int) -> bool:
    """Whether there was a rank in a slot, in whatever state; it is killed."""
    for process in job.find(SCRIPT.name):
        try:
            environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RINGTRAIN_RANK={slot}".encode() in environment:
            os.kill(process, signal.SIGKILL)
            return True
    return False


def wait_for(condition, complaints: Path, seconds: float = 120.0):
    """What a condition gives as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, complaints.read_text()
        time.sleep(0.05)
    return found
