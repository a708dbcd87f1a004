"""Drawn training scripts of PyTorch end on several ranks as in one process; `python -m training torch` in this folder goes on."""

from __future__ import annotations

import random
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from training import torch_script, with_torch
from training.torch_script import SCRIPTS, Pass, Script, Turn
from training.with_torch import FUZZER

from ringtrain.torch.gradients import OptimizedParameter, ReductionSettings
from ringtrain.torch.modes.sharded_gradients import SentGradient, SentGradients
from ringtrain.torch.passes import Passes
from ringtrain.torch.step import Step

pytestmark = [pytest.mark.timeout(600)]

SEEDS, LONG_SEEDS = 200, 20000
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_scripts_end_as_in_one_process(part: int) -> None:
    FUZZER.hold(range(part, SEEDS, PARTS))


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_many_scripts_end_as_in_one_process() -> None:
    first = random.SystemRandom().randrange(1 << 31)
    FUZZER.hold(range(first, first + LONG_SEEDS))


# Each is a fault that was there once, or might be.
PLANTS = {
    "a rank that did not use a parameter counts nothing": (OptimizedParameter, "fill", lambda member, sparse: None),
    "a step that another rank has opened again stays closed": (Step, "is_open_elsewhere", lambda step, agreed: False),
    "no_sync() sends": (Passes, "silence", lambda passes: nullcontext()),
    "an average is a sum": (ReductionSettings, "name", "sum"),
    "a rank that has a part of a sum alone clips by its norm": (
        SentGradients,
        "_reduced",
        lambda self, _, own, __: list(own),
    ),
    "shares are updated with values that are not read": (SentGradient, "read", lambda self: None),
}


COSTLY = {"a step that another rank has opened again stays closed"}  # of many scripts the others wait in vain


@pytest.mark.parametrize(
    "fault", [pytest.param(each, marks=pytest.mark.long if each in COSTLY else ()) for each in PLANTS]
)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead = PLANTS[fault]
    monkeypatch.setattr(owner, name, instead)
    monkeypatch.setattr(with_torch, "STALL_SECONDS", 2.0)
    assert FUZZER.finds_something(range(SEEDS))


def test_a_script_is_made_as_small_as_its_fault_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sum that is taken for an average, one turn with one pass is left."""
    monkeypatch.setattr(with_torch.Loop, "divisor", 1.0)
    small, told = FUZZER.shrunk(FUZZER.first_failing_average(range(SEEDS)))
    assert told.startswith("wrong") and len(small.turns) == len(small.turns[0].passes) == 1
    assert small == Script(turns=(Turn(passes=(Pass(used=small.turns[0].passes[0].used),)),), ranks=small.ranks)


def test_a_script_is_read_as_it_is_written_and_drawn_again() -> None:
    FUZZER.require_readable(range(50), vars(torch_script))


def test_each_value_is_drawn_soon() -> None:
    scripts = [SCRIPTS.drawn(seed) for seed in range(SEEDS)]
    assert {each.mode for each in scripts} == set(torch_script.MODES)
    assert {each.optimizer for each in scripts} == set(with_torch.OPTIMIZERS)
    turns = [turn for each in scripts for turn in each.turns]
    assert {turn.ends for turn in turns} == {"step", "closure", "discard", "go on"}
    assert {turn.clips for turn in turns} == {"", "norm", "synchronized"}
    assert (
        any(turn.adds for turn in turns) and any(turn.reloads for turn in turns) and any(turn.frozen for turn in turns)
    )
    assert any(turn.overflow >= 0 for turn in turns)
