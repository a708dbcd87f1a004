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
    ("_bootstrap/start.py", "init"),
    ("_runtime/operations.py", "allreduce"),
    ("torch/optimizer.py", "DistributedOptimizer"),
    ("torch/reductions.py", "allreduce"),
    ("torch/elastic/__init__.py", "State"),
    ("tensorflow/optimizer.py", "DistributedOptimizer"),
    ("tensorflow/operations.py", "allreduce"),
    ("tensorflow/tape.py", "DistributedGradientTape"),
    ("tensorflow/keras/optimizer.py", "DistributedOptimizer"),
    ("keras/optimizer.py", "DistributedOptimizer"),
    ("jax/library.py", "init"),
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


PUBLIC = {
    name.partition(":")[0]
    for page in (ROOT / "docs" / "reference").glob("*.md")
    for block in re.findall(r"^```{public} [\w.]+\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for name in block.split("\n")
}


def silent(source: str, public: set[str]) -> Iterator[str]:
    """Public functions, and public methods of public classes, that raise an error of which their docstring says nothing."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in public:
            found = [each for each in node.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]
        else:
            found = [node] if isinstance(node, ast.FunctionDef) and node.name in public else []
        for each in found:
            text = ast.get_docstring(each)
            if text and raises(each) and not re.search(r"\braises?\b|\brefused\b", text, re.IGNORECASE):
                yield each.name


def raises(function: ast.FunctionDef) -> bool:
    """Whether it does so itself. An error that goes on is another's, and what is to be overridden raises none."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise) and node.exc is not None and ast.unparse(node.exc) != "NotImplementedError":
            return True
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)
    return False


def test_what_a_public_function_raises_is_in_its_docstring() -> None:
    assert [f"{path.relative_to(ROOT)}: {name}" for path in SOURCES for name in silent(path.read_text(), PUBLIC)] == []


def test_a_public_function_that_says_nothing_of_its_error_is_found() -> None:
    source = 'def rank(a):\n    """Says it."""\n    if a:\n        raise ValueError(a)\n'
    assert "rank" in PUBLIC and list(silent(source, PUBLIC)) == ["rank"]
    assert list(silent(source.replace("Says it.", "Says it. Raises ValueError."), PUBLIC)) == []
    assert list(silent(source.replace("rank", "_rank"), PUBLIC)) == []
