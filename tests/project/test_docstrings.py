"""What `help()` says first: what a function does, and an example."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "ringtrain").rglob("*.py"))
# What users type first, by the module that has it.
ASKED_FIRST = [
    ("start.py", "init"),
    ("operations.py", "allreduce"),
    ("torch/optimizer.py", "DistributedOptimizer"),
    ("torch/reductions.py", "allreduce"),
    ("torch/elastic/__init__.py", "State"),
    ("tensorflow/optimizer.py", "DistributedOptimizer"),
    ("tensorflow/operations.py", "allreduce"),
    ("tensorflow/tape.py", "DistributedGradientTape"),
    ("tensorflow/keras/optimizer.py", "DistributedOptimizer"),
    ("keras/optimizer.py", "DistributedOptimizer"),
    ("jax/start.py", "init"),
    ("jax/operations.py", "allreduce"),
    ("jax/optax_transformation.py", "DistributedGradientTransformation"),
]
MOST_SENTENCES = 2


def documented(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Name and paragraphs of the docstring of each function and class of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
            yield node.name, text.split("\n\n")


def is_example(paragraph: str) -> bool:
    return paragraph.startswith("Example:\n")


def test_examples_come_right_behind_the_first_paragraph() -> None:
    late = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name, paragraphs in documented(path)
        if any(map(is_example, paragraphs[2:]))
    ]
    assert not late, late


@pytest.mark.parametrize("module, name", ASKED_FIRST)
def test_what_users_ask_first_begins_with_an_example(module: str, name: str) -> None:
    says, example, *_ = dict(documented(ROOT / "ringtrain" / module))[name]
    assert is_example(example), example
    assert len(re.findall(r"[.!?](?=\s|$)", says)) <= MOST_SENTENCES, says
