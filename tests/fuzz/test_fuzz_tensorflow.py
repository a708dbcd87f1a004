"""Drawn scripts of TensorFlow's tapes end on ranks as in one process; `python -m training tensorflow` in this folder goes on."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from training import tape_script, with_tensorflow
from training.with_tensorflow import FUZZER

from ringtrain._training.agreement import Agreement
from ringtrain.tensorflow import gradients

pytestmark = [pytest.mark.timeout(600)]

SEEDS, LONG_SEEDS = 60, 5000


def test_scripts_end_as_in_one_process() -> None:
    FUZZER.hold(range(SEEDS))


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_many_scripts_end_as_in_one_process() -> None:
    first = random.SystemRandom().randrange(1 << 31)
    FUZZER.hold(range(first, first + LONG_SEEDS))


# Each is a fault that might be.
PLANTS = {
    "a gradient that only other ranks have stays None": (Agreement, "complete", lambda self, own, *_: list(own)),
    "local gradients are not scaled": (gradients, "divided_by_size", lambda gradient, process_set: gradient),
    "a sum is an average": (with_tensorflow.hvd, "Sum", with_tensorflow.hvd.Average),
}


@pytest.mark.parametrize("fault", PLANTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead = PLANTS[fault]
    monkeypatch.setattr(owner, name, instead)
    monkeypatch.setattr(with_tensorflow, "STALL_SECONDS", 2.0)
    assert FUZZER.finds_something(range(SEEDS))


def test_a_script_is_made_as_small_as_its_fault_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_tensorflow.Loop, "divisor", 1.0)
    small, told = FUZZER.shrunk(FUZZER.first_failing_average(range(SEEDS)))
    assert told.startswith("wrong") and len(small.turns) == len(small.turns[0].passes) == 1


def test_a_script_is_read_as_it_is_written_and_drawn_again() -> None:
    FUZZER.require_readable(range(50), vars(tape_script))
