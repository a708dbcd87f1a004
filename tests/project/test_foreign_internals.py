"""docs/foreign-internals.md lists each place where the package touches what Python or a framework keeps to itself."""

import re
from pathlib import Path

import foreign
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "foreign-internals.md"


def rows() -> dict[str, list[str]]:
    """The cells of each row, by its file."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if match := re.match(r"\| `([\w/]+\.py)` \|", line):
            found[match[1]] = [cell.strip() for cell in line.strip("|").split("|")]
    return found


def test_the_page_has_what_the_code_touches_and_nothing_else() -> None:
    listed = {place: set(re.findall(r"`([^`]+)`", cells[1])) for place, cells in rows().items()}
    touched = foreign.words_by_file(ROOT / "ringtrain")
    assert listed == touched


def test_each_row_says_why_and_names_a_release_and_a_test() -> None:
    for place, (_, _, why, release, test) in rows().items():
        assert why and re.fullmatch(r"[\w ]+ [\d.]+", release), place
        assert (ROOT / "tests" / test.strip("`")).exists(), f"{place}: {test}"


@pytest.mark.parametrize(
    "planted, words",
    [
        ("import sys\nsys.excepthook = print", {"sys.excepthook ="}),
        (
            "from torch.utils.data import BatchSampler as B\nB.__iter__ = print",
            {"torch.utils.data.BatchSampler.__iter__ ="},
        ),
        ("import torch\ntorch._C._engine()", {"torch._C", "torch._C._engine"}),
        ("from keras.src import _private", {"keras.src._private"}),
        ("import sys\nsys._getframe(1).f_back", {"frames"}),
        ("model.__class__ = Other", {"__class__"}),
        ("def patch(model_class):\n    model_class.fit = print", {"fit ="}),
        ("import os\nsetattr(os, 'fork', print)", {"os.fork ="}),
    ],
)
def test_planted_places_are_found(planted: str, words: set[str]) -> None:
    assert foreign.touched(planted) == words


def test_private_attributes_of_others_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A:\n    def f(self, other):\n        self._own = other._theirs")
    (tmp_path / "b.py").write_text("def g(each):\n    return each._own, getattr(each, '_of_torch', None)")
    assert foreign.private_names(tmp_path) == {"a.py": {"_theirs"}, "b.py": {"_of_torch"}}
