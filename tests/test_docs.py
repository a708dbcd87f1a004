"""The programs in the documentation run as they stand there: on two ranks, block after block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ringtrain.testing import World

DOCS = Path(__file__).parents[1] / "docs"

pytestmark = pytest.mark.timeout(120)


def blocks(name: str, language: str) -> list[str]:
    """The fenced blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def run_on_two_ranks(*programs: str, page: str) -> list[dict]:
    """Runs programs one after the other in one namespace, which is returned for each rank."""
    codes = [compile(program, page, "exec") for program in programs]

    def on_rank(rank: int) -> dict:
        namespace: dict = {"__name__": "__main__"}
        for code in codes:
            exec(code, namespace)
        return namespace

    with World(2) as world:
        return world.run(on_rank)


def assert_replicas_equal(first: dict, second: dict) -> None:
    for mine, theirs in zip(first["model"].parameters(), second["model"].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_training():
    rates = "rates = [base_rate * hvd.size() * warm_up(update) for update in (0, 250, 500, 10_000)]"
    first, second = run_on_two_ranks(*blocks("training.md", "python"), rates, page="training.md")
    assert_replicas_equal(first, second)
    assert first["step"] == second["step"] == 14 and first["seen"] == 100 and first["accuracy"] == second["accuracy"]
    assert first["rates"] == pytest.approx([0.01, 0.015, 0.02, 0.02])
    assert first["schedule"].last_epoch == 14  # 2 epochs of 7 updates


def test_accumulation():
    first, second = run_on_two_ranks(*blocks("accumulation.md", "python"), page="accumulation.md")
    assert_replicas_equal(first, second)
    for rank in (first, second):
        assert rank["before"] == rank["quiet"] and rank["before"]["operations"] > 0
        assert rank["number"] == 10
