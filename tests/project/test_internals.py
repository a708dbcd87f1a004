"""docs/internals: pages of one form and size, in short sentences, whose names are those of the code."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "internals"
PAGES = sorted(FOLDER.glob("*.md"))
OF_SUBSYSTEMS = [page for page in PAGES if page.stem not in ("README", "changes", "words")]
MOST_WORDS = 18_000
MOST_WORDS_OF_A_SENTENCE, MOST_OF_NINE_IN_TEN = 30, 22
FEWEST_CHOICES, MOST_CHOICES = 100, 130
SOURCES = ("native", "ringtrain", "tests", "bin", "deploy", "docs/_site")  # and the files beside them
TEXTS = (".py", ".h", ".cc", ".cu", ".def", ".js", ".toml", ".yaml", ".md", ".in", "")
ROOMS = (ROOT, ROOT / "native", ROOT / "ringtrain", ROOT / "tests")
PATH = re.compile(r"[\w./*-]*[\w*]\.(py|cc|h|cu|def|ptx|js|css|md|toml|json)|[\w./-]+/")


def by_name(page: Path) -> str:
    return page.stem


# ---- their form ----


@pytest.mark.parametrize("page", OF_SUBSYSTEMS, ids=by_name)
def test_a_page_of_a_subsystem_ends_in_its_choices(page: Path) -> None:
    text = page.read_text()
    assert 80 <= len(text.splitlines()) <= 150
    titles = re.findall(r"^## (.+)$", text, re.M)
    assert titles[0] == "Files" or page.stem == "testing"
    assert titles[-1] == "Why so" and choices(text)


def choices(text: str) -> list[str]:
    """The entries behind "Why so"."""
    return re.findall(r"^- \*\*.*?(?=^- |\Z)", text.partition("\n## Why so\n")[2], re.M | re.S)


def test_the_choices_are_entries_of_the_log() -> None:
    """There is room for those that may still be chosen otherwise: one that may not leaves its page."""
    log = set(re.findall(r"^## (\d+)\.", (ROOT / "docs" / "decisions.md").read_text(), re.M))
    found = [choice for page in OF_SUBSYSTEMS for choice in choices(page.read_text())]
    assert FEWEST_CHOICES <= len(found) <= MOST_CHOICES
    for choice in found:
        numbers = re.search(r"\((\d+(?:,\s+\d+)*)\)\s*$", choice)
        assert numbers and set(re.split(r",\s+", numbers[1])) <= log, choice


def test_the_first_page_leads_to_all_others_and_is_short() -> None:
    first = (FOLDER / "README.md").read_text()
    assert len(first.splitlines()) <= 150
    assert {page.name for page in PAGES} - {"README.md"} <= set(re.findall(r"\]\(([\w-]+\.md)\)", first))


def test_all_pages_together_are_short() -> None:
    assert sum(len(page.read_text().split()) for page in PAGES) <= MOST_WORDS
    tour = (ROOT / "docs" / "architecture.md").read_text()
    assert len(tour.splitlines()) <= 60 and "](internals/README.md)" in tour


# ---- their sentences ----


def sentences(text: str) -> list[str]:
    """Of paragraphs, entries of lists, and cells of tables; what is in code counts as a word."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "x", text))
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=[|#])|\|", text)
    return [each for block in blocks for each in re.split(r"(?<=[.?!])[*)]*\s+", block) if re.search(r"\w", each)]


def lengths(text: str) -> list[int]:
    return sorted(len(re.findall(r"\w[\w’'.-]*", sentence)) for sentence in sentences(text))


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_sentences_are_short(page: Path) -> None:
    text = page.read_text()
    too_long = [each for each in sentences(text) if len(re.findall(r"\w[\w’'.-]*", each)) > MOST_WORDS_OF_A_SENTENCE]
    assert too_long == []
    counts = lengths(text)
    assert counts[len(counts) * 9 // 10] <= MOST_OF_NINE_IN_TEN


def test_a_long_sentence_is_found() -> None:
    assert lengths("One two. " + "word " * 31 + "end.") == [2, 32]
    assert lengths("- one two\n- three `four five`\n\n| a | b c |\n") == [1, 2, 2, 2]


# ---- their names ----


@cache
def words_by_file() -> dict[Path, frozenset[str]]:
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*.*"))
    read = (path for path in files if path.is_file() and path.suffix in TEXTS and path != Path(__file__))
    return {path: frozenset(re.findall(r"\w+", path.read_text(errors="replace"))) for path in read}


@cache
def words_of_the_code() -> frozenset[str]:
    return frozenset().union(*words_by_file().values(), ["NAME", "RANK"])


@cache
def names_of_files() -> frozenset[str]:
    return frozenset(path.name for folder in SOURCES for path in (ROOT / folder).rglob("*.*"))


def absent(text: str) -> list[str]:
    """Files and names in code that the tree does not have; and those that are not in the file that is named with them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    found = [span for span in re.findall(r"`([^`]+)`", text) if not is_there(span)]
    for name, file in re.findall(r"`([\w.:]+)`\s(?:\(|in\s)`([^`]+)`", text):
        path = file_of(file)
        if path is not None and path.is_file() and re.split(r"[.:]+", name)[-1] not in path.read_text():
            found.append(f"{name} in {file}")
    return found


def is_there(span: str) -> bool:
    if PATH.fullmatch(span) and "NAME" not in span and "RANK" not in span:
        return "*" in span or file_of(span) is not None or ("/" not in span and span in names_of_files())
    if re.fullmatch(r"\w+(::\w+)+|[A-Z]\w+\.\w+", span):  # of a class
        return any(set(re.findall(r"\w+", span)) <= words for words in words_by_file().values())
    return set(re.findall(r"[A-Za-z_]\w\w+", span)) <= words_of_the_code()


def file_of(name: str) -> Path | None:
    return next((room / name for room in ROOMS if (room / name).exists()), None) if PATH.fullmatch(name) else None


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs" / "architecture.md"], ids=by_name)
def test_names_are_those_of_the_code(page: Path) -> None:
    assert absent(page.read_text()) == []


@pytest.mark.parametrize("planted", [
    "`agree/no_such_file.cc`", "`native/no_such_folder/`", "`RankLoop::NoSuchStep`", "`RankLoop::Step` (`agree/match.cc`)",
    "`no_such_name` in\n`agree/match.cc`",
])  # fmt: skip
def test_a_name_that_is_not_there_is_found(planted: str) -> None:
    assert absent(planted)
    assert not absent("`agree/match.cc` has `Match`, as does `native/agree/`: `Match` (`agree/match.cc`)")
