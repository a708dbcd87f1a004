"""A rank whose program hangs is evicted by name where the others have waited until the stall limit; one that saves is waited for."""

from __future__ import annotations

import json
import re
import textwrap

import pytest
from test_elastic_frameworks import NUMPY, STEPS, applied, ends
from test_elastic_frameworks import run as run_frame
from test_elastic_steps import LATER, TRAINING, run
from test_elastic_steps import ends as ends_of

from benchmarks.jobs import Job

pytestmark = [
    pytest.mark.tcp,
]
IMPATIENT = {"RINGTRAIN_STALL_ABORT_SECONDS": "3"}


@pytest.mark.parametrize("slot", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_hangs_is_evicted_and_the_others_do_the_step_again(slot: int, job: Job) -> None:
    """Its thread that speaks to the launcher is well, and so is its host."""
    hangs = json.dumps({f"{slot}/4/begun": "time.sleep(600)"})
    done = run_frame(job, NUMPY, "--elastic", "-np", "2:3", FAULTS=hangs, **IMPATIENT)
    others = [each for each in range(3) if each != slot]
    assert applied(done) == [[0, 1, 2]] * 4 + [others] * (STEPS - 4)
    assert len(ends(done)) == 2 and len(set(ends(done))) == 1, done.stdout + done.stderr
    evicted = re.findall(
        r"^ringtrainrun: The rank in slot (\d) of .* was evicted: the others have waited for it", done.stderr, re.M
    )
    assert evicted == [str(slot)], done.stderr
    assert "TimeoutError" not in done.stderr and "before it had joined" not in done.stderr, done.stderr


def test_one_that_goes_another_way_than_all_others_ends_and_they_go_on(job: Job) -> None:
    """Each side waits for the other, and what the one has submitted is the first at the stall limit."""
    late = {f"{slot}/1/begun": "time.sleep(1.5)" for slot in (0, 2)}
    faults = json.dumps({"1/1/begun": "rt.allreduce([1.0], name='alone')", **late})
    done = run_frame(job, NUMPY, "--elastic", "-np", "2:3", FAULTS=faults, **IMPATIENT)
    assert len(ends(done)) == 2 and len(set(ends(done))) == 1, done.stdout + done.stderr
    assert not re.search("The rank in slot [02] of .* was evicted", done.stderr), done.stderr


SAVING = """
    from ringtrain.torch.elastic.checkpoints import TorchFolder
    from ringtrain.torch.elastic.transparent import TransparentState

    write = TorchFolder.write

    def write_slowly(self, *arguments):
        time.sleep(float(os.environ["RINGTRAIN_STALL_ABORT_SECONDS"]) + 1.5)
        write(self, *arguments)

    TorchFolder.write = write_slowly
    begin = TransparentState.epochs

    def epochs(self, count):
        self.save_every(folder / "saved", steps=12)
        return begin(self, count)

    TransparentState.epochs = epochs
"""


def test_a_rank_that_saves_for_longer_than_the_stall_limit_is_waited_for(job: Job) -> None:
    """The others wait in their next step."""
    done = run(
        job, "--elastic", "-np", "2:2", *LATER, program=textwrap.dedent(SAVING) + textwrap.dedent(TRAINING), **IMPATIENT
    )
    assert len(ends_of(done)) == 2 and len(set(ends_of(done))) == 1, done.stdout + done.stderr
    assert "evicted" not in done.stderr and "given up" not in done.stderr, done.stderr
