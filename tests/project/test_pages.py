"""The pages of the manual as text: what no build of the site notices."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from test_internals import lengths

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
IN_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
QUESTIONS = sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem not in ("decisions", "README"))
MOST_WORDS = 1500  # of a page, beside its programs
MOST_WORDS_OF_A_SENTENCE, MOST_OF_NINE_IN_TEN = 30, 22
CONFLICT = re.compile(r"^(?:<{7}|>{7}) |^={7}$", re.MULTILINE)


def by_path(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=by_path)
def test_no_conflict_of_a_merge_is_left(page: Path) -> None:
    assert CONFLICT.findall(page.read_text()) == []


def test_a_conflict_is_found() -> None:
    assert len(CONFLICT.findall("<<<<<<< HEAD\none\n=======\ntwo\n>>>>>>> 084c3e5\n")) == 3


def test_pictures_are_those_of_their_texts() -> None:
    svg_of = runpy.run_path(str(ROOT / "docs" / "pictures" / "draw.py"))["svg_of"]
    texts = sorted((ROOT / "docs" / "pictures").glob("*.txt"))
    assert texts
    old = [text.name for text in texts if text.with_suffix(".svg").read_text() != svg_of(text.read_text())]
    assert old == [], "run: python docs/pictures/draw.py"
    shown = "".join(page.read_text() for page in PAGES)
    assert [text.name for text in texts if f"pictures/{text.stem}.svg)" not in shown] == []


def words_beside_code(text: str) -> int:
    return len(IN_CODE.sub("", text).split())


@pytest.mark.parametrize("page", QUESTIONS, ids=by_path)
def test_a_page_answers_one_question(page: Path) -> None:
    words = words_beside_code(page.read_text())
    assert words <= MOST_WORDS, f"{words} words: split the page by questions"


@pytest.mark.parametrize("page", QUESTIONS, ids=by_path)
def test_sentences_are_short(page: Path) -> None:
    counts = lengths(page.read_text())
    assert counts[-1] <= MOST_WORDS_OF_A_SENTENCE
    assert counts[len(counts) * 9 // 10] <= MOST_OF_NINE_IN_TEN
