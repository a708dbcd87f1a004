"""Drawn scripts of Keras end on ranks as in one process; `python -m training keras` in this folder goes on.

Keras has one backend in each process: here that of the other tests. On PyTorch, where a script takes a fifth of the time, each run has
some in torch_keras_run.py, and a long one this file, with planted faults, which no process on TensorFlow collects. On JAX each run has
some in jax_keras_run.py, and a long one this file.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from training import keras_script, with_keras
from training.keras_script import SCRIPTS, Script, Turn
from training.shrinking import shrunk
from training.with_keras import FUZZER, LANGUAGE, ON_JAX, ON_TENSORFLOW

from ringtrain._training.agreement import Agreement
from ringtrain.keras import optimizer
from ringtrain.keras.backends import backend
from ringtrain.keras.callbacks.fit_start import StartHooks
from ringtrain.keras.callbacks.metrics import MetricHooks
from ringtrain.keras.stepping import Stepping
from ringtrain.keras.watching import StepWatch

pytestmark = [pytest.mark.timeout(600)]

# A turn takes some 2 seconds of a core on TensorFlow.
SEEDS, LONG_SEEDS = (3, 1000) if ON_TENSORFLOW or ON_JAX else (20, 5000)


def not_on_tensorflow(test: Callable[..., None]) -> Callable[..., None] | None:
    """A test of processes with Keras on PyTorch or JAX; others do not collect it."""
    return None if ON_TENSORFLOW else test


def not_on_jax(test: Callable[..., None]) -> Callable[..., None] | None:
    """A test of what there is not on JAX."""
    return None if ON_JAX else test


def on_tensorflow(test: Callable[..., None]) -> Callable[..., None] | None:
    """A test that asks nothing of the backend, or starts a process with the other one."""
    return test if ON_TENSORFLOW else None


def test_scripts_end_as_in_one_process() -> None:
    seeds = [seed for seed in range(100) if not (ON_TENSORFLOW or ON_JAX) or len(LANGUAGE.drawn(seed).turns) == 1]
    FUZZER.hold(seeds[:SEEDS])


@on_tensorflow
def test_sums_of_passes_that_come_late_are_applied_once() -> None:
    """Seed 800031, made small: a graph asked whether they apply before it had sent them."""
    assert not FUZZER.verdict(
        Script(turns=(Turn(steps=2),), model="functional", runs="graph", method="late", passes_per_step=2)
    )


@not_on_jax
def test_rows_of_a_sharded_table_change_at_once_where_the_rest_is_late() -> None:
    """Seed 1040015, made small, and one whose last gradients are not applied."""
    for turn in (Turn(validates=True), Turn(does="batches", steps=2)):
        assert not FUZZER.verdict(Script(turns=(turn,), table="sharded", method="late"))


def test_what_adafactor_keeps_for_a_local_layer_is_not_sent_to_the_others() -> None:
    """Seed 4000137: its path does not have the layer's name."""
    turns = Turn(), Turn(does="batches")
    assert not FUZZER.verdict(Script(turns, optimizer="adafactor", method="partial"))


@on_tensorflow
def test_turns_that_reach_other_layers_have_no_gradients_that_are_late_between_them() -> None:
    """Seed 500322: fit without the broadcast callback leaves a step behind, which the next one's gradients must fit."""
    last = Turn(routes=((1,), ()), broadcasts=False)
    left, flushed = (
        Script(turns=(Turn(), Turn(broadcasts=broadcasts), last), model="subclassed", method="late")
        for broadcasts in (False, True)
    )
    assert SCRIPTS.why_illegal(left).startswith("delay: the gradients of a step are of the variables of the one before")
    assert not SCRIPTS.why_illegal(flushed)


@on_tensorflow
def test_an_optimizer_that_keras_builds_wrongly_in_a_graph_is_built_before() -> None:
    """Seed 4000000: one process in a graph is off by as much from one without."""
    turns = (Turn(), Turn(does="batches", begins="fresh", broadcasts=False))
    script = Script(turns, optimizer="schedule free", runs="graph")
    assert SCRIPTS.why_illegal(script).startswith("Keras: ScheduleFreeAdamW that is built within a graph")


@on_tensorflow
def test_each_of_two_optimizers_has_a_gradient_in_each_group_of_ranks() -> None:
    """Seed 3000204: with its only trained layer left out on all members, Keras refuses the step."""

    def why(*routes: tuple[int, ...]) -> str:
        turn = Turn(frozen=(0,), routes=routes)
        return SCRIPTS.why_illegal(Script((turn,), 3, model="subclassed", step="two", members=(0, 1)))

    assert why((2,), (), (1, 2)).startswith("Keras: each of two optimizers has a gradient")
    assert not why((2,), (1,), (1, 2))


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_many_scripts_end_as_in_one_process() -> None:
    first = random.SystemRandom().randrange(1 << 31)
    FUZZER.hold(range(first, first + LONG_SEEDS))


@on_tensorflow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("which", ["not long", "long"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.long
def test_other_frameworks_below_keras(framework: str, which: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, __file__]
    done = subprocess.run(command, env=dict(os.environ, KERAS_BACKEND=framework), capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-20000:] + done.stderr


def seeds_of(needs: Callable[[Script], Any], count: int = 3) -> list[int]:
    """The first seeds of short scripts that have what a fault needs."""
    short = (seed for seed in range(3000) if len((script := LANGUAGE.drawn(seed)).turns) < 3 and needs(script))
    return [next(short) for _ in range(count)]


def fits(script: Script) -> bool:
    """A script of which a fault can be seen, and that does not take long."""
    quick = script.ranks == 2 and script.optimizer in ("sgd", "momentum", "nesterov") and script.scales != "mixed"
    return quick and script.turns[0].does == "fit" and not script.mistake


# Each is a fault that might be, and the scripts that can show it.
PLANTS = {
    "a gradient that only other ranks have stays None": (
        Agreement, "complete", lambda self, own, *_: list(own), lambda s: any(len(set(t.routes)) > 1 for t in s.turns),
    ),
    "an average is a sum": (with_keras.hvd, "Average", with_keras.hvd.Sum, lambda s: s.op == "average" and fits(s)),
    "local gradients are not scaled": (
        backend, "divided_by_size", lambda gradient, _: gradient, lambda s: s.method == "partial" and fits(s),
    ),
    "each rank begins with its own": (StartHooks, "_make_alike", lambda *_: None, fits),
    "metrics stay a rank's own": (MetricHooks, "on_epoch_end", lambda *_: None, lambda s: s.turns[0].averages and fits(s)),
    "the last gradients are lost": (StartHooks, "on_train_end", lambda *_: None, lambda s: s.method == "late" and fits(s)),
    "LossScaleOptimizer stays outside": (
        optimizer, "reduction_of", lambda _: None, lambda s: s.scales == "around" and fits(s),
    ),
    "rates are not compared": (Stepping, "rate", lambda _: None, lambda s: s.mistake == "rate"),
    "weights are not compared": (StepWatch, "compare_now", lambda *_, **__: None, lambda s: s.mistake == "weights"),
}  # fmt: skip

OF_GRADIENTS_THAT_ARE_NONE = ("a gradient that only other ranks have stays None",)  # JAX makes zeros of them


@not_on_tensorflow
@pytest.mark.long
@pytest.mark.parametrize("fault", PLANTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_JAX and fault in OF_GRADIENTS_THAT_ARE_NONE:
        return
    owner, name, instead, needs = PLANTS[fault]
    seeds = seeds_of(needs)
    assert not FUZZER.verdict(LANGUAGE.drawn(seeds[0]))
    monkeypatch.setattr(owner, name, instead)
    monkeypatch.setattr(with_keras, "STALL_SECONDS", 2.0)
    assert FUZZER.finds_something(seeds)


@not_on_tensorflow
@pytest.mark.long
def test_a_script_is_made_as_small_as_its_fault_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sum that is taken for an average one turn is left."""
    monkeypatch.setattr(with_keras.Loop, "factor", 1.0)
    large = Script(
        turns=(Turn(steps=2, weights="sample"), Turn(does="batches")), op="sum", model="sequential", regularizes=True
    )
    small, told = shrunk(large, FUZZER.verdict, LANGUAGE.smaller)
    assert told.startswith("wrong") and small == Script(turns=(Turn(),), op="sum")


@on_tensorflow
def test_a_script_is_read_as_it_is_written_and_drawn_again() -> None:
    FUZZER.require_readable(range(50), vars(keras_script))


@on_tensorflow
def test_each_value_is_drawn_soon() -> None:
    scripts = [SCRIPTS.drawn(seed) for seed in range(1500)]
    values: dict[str, set] = {name: {getattr(each, name) for each in scripts} for name in vars(scripts[0])}
    assert values["optimizer"] == set(with_keras.OPTIMIZERS) and values["mistake"] == {"", *keras_script.MISTAKES}
    wanted = {
        "model": 3, "table": 4, "step": 4, "runs": 3, "clips": 4, "moving": 3, "keras_passes": 2, "scales": 4, "op": 2,
        "passes_per_step": 3, "groups": 4, "predivide": 2, "compression": 3, "method": 4, "members": 4,
    }  # fmt: skip
    assert {name: len(values[name]) for name in wanted} == wanted
    turns = [turn for each in scripts for turn in each.turns]
    of_turns = {
        "does": 3,
        "begins": 5,
        "rate": 6,
        "weights": 3,
        "validates": 2,
        "stops": 2,
        "averages": 2,
        "broadcasts": 2,
    }
    assert {name: len({getattr(turn, name) for turn in turns}) for name in of_turns} == of_turns
    assert (
        any(turn.routes for turn in turns) and any(turn.overflow >= 0 for turn in turns) and any(t.first for t in turns)
    )
