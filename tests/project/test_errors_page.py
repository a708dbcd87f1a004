"""The pages in docs/errors and the code have the same messages: none is missing there, none is there that nobody says.

tests/project/messages.py finds them in the sources. The pages have the beginning of each, with "…" for values as there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import messages
import pytest

INDEX = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
PAGES = sorted(INDEX.with_suffix("").glob("*.md"))
MOST_WORDS = 2400  # of a page; half of them are the messages
LEAST_LETTERS = 8  # of an entry: a shorter one would stand for anything
CLASSES = re.compile(r"Error$")


def entries_of(page: str) -> list[str]:
    """The beginnings of messages in the first columns of the page's tables."""
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [
        entry.removesuffix(messages.HOLE)
        for row in rows
        for entry in re.findall(r"`([^`]+)`", row)
        if not CLASSES.search(entry)
    ]


def all_entries() -> list[str]:
    return [entry for page in PAGES for entry in entries_of(page.read_text())]


def differences(entries: Iterable[str], templates: Iterable[str]) -> tuple[list[str], list[str]]:
    """Messages without an entry, and entries without a message; of several entries a message belongs to the longest."""
    entries = sorted(entries, key=len, reverse=True)
    missing, used = [], set()
    for template in templates:
        entry = next((entry for entry in entries if template.startswith(entry)), None)
        used.add(entry)
        if entry is None:
            missing.append(template)
    return missing, [entry for entry in entries if entry not in used]


def test_page_and_code_have_the_same_messages() -> None:
    places = {message.template: message.place for message in messages.of_project()}
    missing, unsaid = differences(all_entries(), places)
    assert not missing, "docs/errors lacks:\n" + "\n".join(f"{places[each]}: {each}" for each in missing)
    assert not unsaid, "docs/errors has what nobody says:\n" + "\n".join(unsaid)


def test_the_first_page_leads_to_all_others_and_has_no_message_itself() -> None:
    text = INDEX.read_text()
    assert entries_of(text) == []
    assert sorted(re.findall(r"^\| \[.*\]\(errors/([\w-]+\.md)\) \|", text, re.MULTILINE)) == [
        page.name for page in PAGES
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_can_be_looked_over(page: Path) -> None:
    assert len(page.read_text().split()) <= MOST_WORDS


def test_entries_are_told_apart() -> None:
    entries = all_entries()
    assert len(entries) == len(set(entries))
    assert all(len(re.findall("[A-Za-z]", entry)) >= LEAST_LETTERS for entry in entries)


PLANTED = {
    "raise": ("py", "def f(x):\n    raise ValueError(f'f {x}: wants an even number')", "f …: wants an even number"),
    "raise of pieces": ("py", "raise E('one ' + kind + ' is too ' 'few for all.')", "one … is too few for all."),
    "warning": ("py", "logger.warning('the moon %s is not full', name)", "the moon … is not full"),
    "text made elsewhere": (
        "py", "text = f'the value must be {y}'\nif z:\n    text += ', not more.'", "the value must be …"),
    "text in a call": ("py", "told.append(f'host {h}: this must not be.')", "host …: this must not be."),
    "status": (
        "cc", 'return Status::Closed(r.Subject() + ": the door " + std::to_string(n) + " is shut.");', "…: the door … is shut."),
    "choice within": (
        "cc", 'Fail("the wire " + (up ? "is up and well." : "is cut by a mouse.") + " End.");', "is cut by a mouse."),
    "text that grows": (
        "cc", 'std::string text = first + ": all of them must be " + kind; text += " on rank 0.";',
        "…: all of them must be …"),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANTED)
def test_a_new_message_is_found(case: str) -> None:
    language, source, template = PLANTED[case]
    found = [
        message.template for message in (messages.of_cpp if language == "cc" else messages.of_python)(source, "new")
    ]
    assert template in found
    missing, _ = differences(all_entries(), found)
    assert template in missing


@pytest.mark.parametrize("source", [
    '"""A docstring must not be taken for a message."""',
    "@click.option('--x', help='The number must be even.')\ndef f(): ...",
    "print('yes')",
    "text += ' and a continuation must be left out.'",
])  # fmt: skip
def test_what_is_no_message_is_left_out(source: str) -> None:
    assert messages.of_python(source, "new") == []


def test_a_comment_and_an_include_are_no_messages() -> None:
    source = '#include "base/status must be.h"\n// "this must be a comment"\n/* "and this must be one too" */ int x;'
    assert messages.of_cpp(source, "new") == []


def test_an_entry_that_nobody_says_is_found() -> None:
    assert differences(["said by all", "said by none"], ["said by all ranks"]) == ([], ["said by none"])
