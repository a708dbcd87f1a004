"""Elastic jobs of Keras and TensorFlow on real processes: a rank is killed in the middle of ``fit``, others join.

Each batch moves the weight by an exact number that the size of its world gives, so one that was applied twice, or left out,
changes the result.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from environments import python_with, rank_environment, transport_of

from benchmarks.jobs import Job

pytestmark = [
    pytest.mark.tcp,
]
SECONDS = 150.0
FRAMES = {
    "Keras on TensorFlow": {"KERAS_BACKEND": "tensorflow"},
    "Keras on PyTorch": {"KERAS_BACKEND": "torch"},
    "tf_keras": {"TF_USE_LEGACY_KERAS": "1"},
}


def said(job: Job, program: str, ranks: str, *flags: str, **variables: str) -> str:
    """What the ranks print, without the numbers of their slots."""
    python, script = python_with("tcp"), Path(__file__).with_name(program)
    cooldown = "1" if "JOINED" in variables else "60"
    line = [python, "-m", "ringtrain.launch", *transport_of("tcp"), "--elastic", "-np", ranks, *flags,
            "--blacklist-cooldown-range", cooldown, cooldown, python, str(script)]  # fmt: skip
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    done = job.run(*line, seconds=SECONDS, env=rank_environment(**quiet, **variables))
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return re.sub(r"^\[\d+\] ", "", done.stdout, flags=re.MULTILINE)


def ends(text: str) -> list[str]:
    return re.findall(r"^end (.*)$", text, re.MULTILINE)


def worlds(text: str) -> set[tuple[int, int]]:
    """(size, batch) of each world that began."""
    return {(int(size), int(at)) for size, at in re.findall(r"^world of (\d+) at (\d+)$", text, re.MULTILINE)}


@pytest.mark.long
@pytest.mark.parametrize("frame", FRAMES)
def test_fit_goes_on_without_a_killed_rank(frame: str, job: Job) -> None:
    """In the middle of an epoch, in graph mode, from the last commit on: the batch before."""
    text = said(job, "elastic_keras.py", "2:3", AT="17", SLOT="1", **FRAMES[frame])
    assert worlds(text) == {(3, 0), (2, 17)} and text.count("reset to 2 at 17") == 2, text
    assert len(ends(text)) == 2 and all(end.startswith("4 0 48 48 True ") for end in ends(text)), text


@pytest.mark.long
@pytest.mark.parametrize("frame", FRAMES)
def test_a_rank_joins_fit(frame: str, job: Job) -> None:
    """It takes the place of the lowest; it traces alone, and the others have traced before."""
    text = said(job, "elastic_keras.py", "2:3", AT="17", SLOT="0", JOINED="3", **FRAMES[frame])
    assert worlds(text) == {(3, 0), (2, 17), (3, 30)}, text
    assert len(ends(text)) == 3 and all(end.startswith("4 0 48 48 True ") for end in ends(text)), text


@pytest.mark.long
@pytest.mark.parametrize("frame", FRAMES)
def test_a_world_of_one_grows(frame: str, job: Job) -> None:
    """What a rank traces alone reduces gradients when it is joined."""
    text = said(job, "elastic_keras.py", "1:2", ALONE="1", JOINED="2", **FRAMES[frame])
    assert worlds(text) == {(2, 0), (1, 0), (2, 30)}, text
    assert len(ends(text)) == 2 and all(end.startswith("4 0 48 48 True ") for end in ends(text)), text


@pytest.mark.long
@pytest.mark.parametrize("frame", FRAMES)
def test_a_sum_of_gradients_begins_anew(frame: str, job: Job) -> None:
    """The killed rank dies between the two passes of an update, of which the others have done one."""
    text = said(job, "elastic_keras.py", "2:3", AT="17", SLOT="1", JOINED="3", PASSES="2", **FRAMES[frame])
    counts = {end.split()[3] for end in ends(text)}
    assert worlds(text) == {(3, 0), (2, 17), (3, 30)} and len(counts) == 1 and len(ends(text)) == 3, text


@pytest.mark.long
@pytest.mark.parametrize("slot", ["0", "2"])
def test_a_loop_with_the_tape(slot: str, job: Job) -> None:
    """Sizes, ranks and roots in a graph are those of the world that it runs in; the root is another rank then."""
    text = said(job, "elastic_tensorflow.py", "2:3", AT="17", SLOT=slot, JOINED="3")
    assert worlds(text) == {(3, 0), (2, 15), (3, 30)}, text
    assert ends(text) == [f"40 {[True] * 5} 1"] * 3, text


def test_a_loop_goes_on_alone(job: Job) -> None:
    text = said(job, "elastic_tensorflow.py", "1:2", AT="7", SLOT="0")
    assert worlds(text) == {(2, 0), (1, 5)} and ends(text) == [f"40 {[True] * 5} 1"], text
