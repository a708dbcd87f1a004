"""The manual as a site: bin/docs builds it without a warning, each page is in its contents, and a search finds them.

Every run reads all pages and follows their links. Writing them as HTML takes three times as long, and is for long runs.

The build also compares the API reference with the modules: public.py in docs/_site says what it asks of each name.
"""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "_site"))
import public

pytestmark = pytest.mark.timeout(900)


def built(folder: Path, *more: str) -> Path:
    """The site, built as bin/docs does after its installation."""
    script = (ROOT / "bin" / "docs").read_text().replace("\\\n", "")
    line = next(each for each in script.splitlines() if "-m sphinx" in each)
    options = re.findall(r"--(?:quiet|fail-on-warning|keep-going)", line)
    assert len(options) == 3, line
    command = [sys.executable, "-m", "sphinx", *options, *more, "--conf-dir", str(ROOT / "docs")]
    done = subprocess.run(
        [*command, "--doctree-dir", str(folder / "doctrees"), str(ROOT), str(folder / "html")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_no_page_is_left_out_and_no_link_is_broken(tmp_path: Path) -> None:
    """Without what docstrings say; Sphinx warns of both."""
    built(tmp_path, "--tag", "quick", "--builder", "dummy")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site without what docstrings say: 26 s of a core."""
    return built(tmp_path_factory.mktemp("site"), "--tag", "quick")


@pytest.mark.long
def test_the_first_page_leads_to_all_others(site: Path) -> None:
    assert "url=README.html" in (site / "index.html").read_text()
    linked = set(re.findall(r'href="([^"#]+)\.html"', (site / "README.html").read_text()))
    pages = {str(path.relative_to(ROOT).with_suffix("")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= linked, pages - linked


@pytest.mark.long
def test_a_search_finds_words_of_each_page(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    assert "docs/elastic.md" in index and "checkpoint" in index


@pytest.mark.long
def test_links_are_those_of_the_repository(site: Path) -> None:
    """Headings of other pages, and programs that are downloaded."""
    page = (site / "docs" / "README.html").read_text()
    assert 'href="training.html"' in page
    assert "keras_digits.py" in (site / "docs" / "examples" / "README.html").read_text()


@pytest.mark.long
def test_names_are_on_the_page_of_their_module(tmp_path: Path) -> None:
    """The whole site, for which all frameworks are imported: 40 s of a core."""
    pages = built(tmp_path) / "docs" / "reference"
    page = (pages / "torch.html").read_text()
    assert 'id="ringtrain.torch.DistributedOptimizer"' in page and "named_parameters" in page
    assert 'href="ringtrain.html#ringtrain.rank"' in page and 'id="ringtrain.torch.rank"' not in page
    assert 'id="ringtrain.Average"' in (pages / "ringtrain.html").read_text()


@pytest.mark.parametrize("module", public.MODULES[: public.MODULES.index("ringtrain.tensorflow")])
def test_public_names_are_documented(module: str) -> None:
    """Those of the other frameworks in the whole site."""
    assert list(public.gaps_of(module)) == []


def test_what_a_docstring_lacks_is_named() -> None:
    def whole(tensor, name=None) -> int:
        """Adds a tensor over all ranks.

        Args:
            tensor: any shape.
            name: identity among the ranks.

        Returns:
            The sum.
        """

    def at_once(tensor, name=None) -> int:
        """``whole``, as a handle."""

    def bare(tensor) -> int: ...

    module = types.SimpleNamespace(whole=whole, at_once=at_once)
    assert public.lacks(whole) == [] == public.lacks(at_once, module)
    assert [each.rpartition("docstring ")[2] for each in public.lacks(bare)] == [
        "has no sentence", "does not explain the argument tensor", "does not say what it returns"
    ]  # fmt: skip
    assert len(public.lacks(at_once)) == 3  # where nothing is found under that name
    whole.__doc__ += "\n    >>> whole(1)\n"
    assert public.has_example(whole) and not public.has_example(at_once) and public.has_example(ValueError)


def test_a_name_that_only_a_page_or_only_a_module_has_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "PAGES", tmp_path)
    (tmp_path / "testing.md").write_text("```{public} ringtrain.testing\nNosuch\n```\n")
    monkeypatch.setattr("ringtrain.testing.__dir__", lambda: ["World", "threading"])
    assert [gap.partition(":")[0] for gap in public.gaps_of("ringtrain.testing")] == ["Nosuch", "threading", "World"]
