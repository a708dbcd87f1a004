"""docs/promises.md has every promise with tests that exist, docs/reliability.md every fault that `python -m benchmarks faults` does."""

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import ELASTIC_PARTS
from benchmarks.faults import FAULTS

ROOT = Path(__file__).parents[2]
PAGE, OF_ELASTIC_JOBS, OF_PROMISES = (
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("reliability", "reliability-of-elastic-jobs", "promises")
)
PROMISES = [f"P{number}" for number in range(1, 26)]


def rows_of(page: str) -> dict[str, str]:
    """The rows of the table of promises, by promise."""
    return {row.split("|")[1].strip(): row for row in page.splitlines() if re.match(r"\| P\d+ \|", row)}


def absent_tests(text: str) -> list[str]:
    """The tests that a text names, by file and function, and that are not there."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    return [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).exists() or f"def {name}" not in (ROOT / file).read_text()
    ]


def test_every_promise_is_there_with_what_shows_it() -> None:
    rows = rows_of(OF_PROMISES)
    assert list(rows) == PROMISES
    assert [promise for promise, row in rows.items() if "`tests/" not in row and "*Later*" not in row] == []


def test_the_tests_that_it_names_exist() -> None:
    assert not absent_tests(PAGE + OF_PROMISES)


@pytest.mark.parametrize(
    "planted", ["`tests/core/test_order.py::test_that_nobody_wrote`", "`tests/test_no.py::test_it`"]
)
def test_a_test_that_is_gone_is_found(planted: str) -> None:
    assert absent_tests(planted) and not absent_tests("`tests/project/test_reliability.py::rows_of`")


def test_its_figures_are_those_that_are_measured() -> None:
    silent = 15
    for fault in FAULTS:
        bound = fault.seconds + (silent if fault.after_silence else 0)
        row = re.escape(f"| {fault.name} | {fault.promised} | {bound:g} s | ") + r"[\d.]+ s \| [\d.]+ s \|"
        assert re.search(row, PAGE), fault.name


def test_what_the_bench_of_elastic_jobs_measures_is_explained() -> None:
    """Each part of it is on the page, with a command."""
    for part in ELASTIC_PARTS:
        assert f"--elastic {part}" in OF_ELASTIC_JOBS, part
