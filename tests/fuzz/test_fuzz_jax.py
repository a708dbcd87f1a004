"""Drawn scripts of JAX and optax end on ranks as in one process; `python -m training jax` in this folder goes on."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from training import jax_script, with_jax
from training.jax_script import SCRIPTS, Script
from training.with_jax import FUZZER

from ringtrain.jax import gathering, watching
from ringtrain.jax.accumulation import Accumulation

pytestmark = [pytest.mark.timeout(600)]

SEEDS, LONG_SEEDS = 9, 3000


@pytest.fixture(autouse=True, scope="module")
def _forgets_programs() -> Iterator[None]:
    """They take a gigabyte."""
    yield
    jax.clear_caches()


def test_scripts_end_as_in_one_process() -> None:
    FUZZER.hold(range(SEEDS))


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_many_scripts_end_as_in_one_process() -> None:
    first = random.SystemRandom().randrange(1 << 31)
    FUZZER.hold(range(first, first + LONG_SEEDS))


def seeds_of(needs: Callable[[Script], Any], count: int = 3) -> list[int]:
    """The first seeds of quick scripts that have what a fault needs."""
    quick = (seed for seed in range(2000) if not SCRIPTS.drawn(seed).compiled and needs(SCRIPTS.drawn(seed)))
    return [next(quick) for _ in range(count)]


# Each is a fault that might be, and the scripts that can show it.
PLANTS = {
    "an average is a sum": (with_jax.hvd, "Average", with_jax.hvd.Sum, lambda s: s.op == "average" and not s.together),
    "sums of passes are no averages": (
        Accumulation, "_divided", lambda self, total: total, lambda s: s.averages_passes and len(s.turns) > 2,
    ),
    "gradients of rows are averages": (gathering, "size_of", lambda _: 1, lambda s: s.coupled == "gathered"),
    "nothing is broadcast": (
        with_jax.hvd, "broadcast_parameters", lambda given, *_, **__: given, lambda s: not s.mistake and s.replicas == "differ",
    ),
    "rates are not compared": (watching, "_hyperparameters", lambda state: {}, lambda s: s.mistake == "rate"),
}  # fmt: skip


# Of those that compile most a long run shows that they are found; each run that of others.
COSTLY = {"sums of passes are no averages", "nothing is broadcast", "rates are not compared"}


@pytest.mark.parametrize(
    "fault", [pytest.param(each, marks=pytest.mark.long if each in COSTLY else ()) for each in PLANTS]
)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead, needs = PLANTS[fault]
    seeds = seeds_of(needs)
    assert not any(FUZZER.verdict(SCRIPTS.drawn(seed)) for seed in seeds[:1])
    monkeypatch.setattr(owner, name, instead)
    assert FUZZER.finds_something(seeds)


@pytest.mark.long
def test_a_script_is_made_as_small_as_its_fault_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sum that is taken for an average, one turn with one pass is left."""
    monkeypatch.setattr(with_jax.Loop, "factor", 1.0)
    seeds = seeds_of(lambda s: s.op == "average" and len(s.turns) > 1 and not s.mistake, 8)
    small, told = FUZZER.shrunk(next(seed for seed in seeds if FUZZER.verdict(SCRIPTS.drawn(seed))))
    assert told.startswith("wrong") and len(small.turns) == len(small.turns[0].passes) == 1
    assert small == Script(turns=small.turns, ranks=small.ranks)


def test_a_script_is_read_as_it_is_written_and_drawn_again() -> None:
    FUZZER.require_readable(range(50), vars(jax_script))


def test_each_value_is_drawn_soon() -> None:
    scripts = [SCRIPTS.drawn(seed) for seed in range(1500)]
    values: dict[str, set] = {name: {getattr(each, name) for each in scripts} for name in vars(scripts[0])}
    assert values["optimizer"] == set(with_jax.OPTIMIZERS) and values["mistake"] == {"", *with_jax.MISTAKES}
    assert {dtype for each in values["dtypes"] for dtype in each} == set(jax_script.DTYPES)
    wanted = {
        "together": 3, "factors": 3, "compression": 3, "rate": 3, "clips": 3, "accumulates": 5, "frozen": 7, "finite": 3,
        "plateau": 2, "compiled": 6, "donates": 2, "wide": 2, "maps": 3, "coupled": 5, "remakes": 2, "form": 3, "reduces": 2, "gives": 2,
    }  # fmt: skip
    assert {name: len(values[name]) for name in wanted} == wanted
    turns = [turn for each in scripts for turn in each.turns]
    assert {turn.reloads for turn in turns} == {"", "own", "broadcast", "world"}
    assert any(turn.discards for turn in turns) and any(turn.overflow >= 0 for turn in turns)
