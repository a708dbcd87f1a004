"""The table of what a mode cannot be combined with: as docs/modes-together.md has it, and which tests try each of its pairs."""

import ast
import pathlib

from ringtrain._training.needs import NEEDS, TRAITS, table

ROOT = pathlib.Path(__file__).parents[2]
TRIED = (
    "with_torch/test_torch_modes.py", "with_tensorflow/test_tensorflow_modes.py", "with_jax/test_jax_modes.py",
    "with_keras/jax_keras_run.py",
)  # fmt: skip


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "modes-together.md").read_text()
    shown = page.split("<!-- needs -->")[1].split("<!-- /needs -->")[0]
    assert shown.strip() == table(), "run python -m ringtrain._training.needs"


def test_each_trait_is_one_that_something_excludes() -> None:
    assert {key for pairs in NEEDS.values() for key in pairs} == set(TRAITS)


def test_each_pair_is_tried() -> None:
    """In the file of a framework that can have it, by its keys."""
    tried = set()
    for name in TRIED:
        for node in ast.walk(ast.parse((ROOT / "tests" / name).read_text())):
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PAIRS":
                tried |= {tuple(ast.literal_eval(key)) for key in node.value.keys if key is not None}  # type: ignore[attr-defined]
    assert {(column, key) for column, pairs in NEEDS.items() for key in pairs} == tried
