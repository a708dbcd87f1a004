"""A pytest plugin: sorts the tests into groups and prints the minutes that each has taken beside its budget.

Beside them stand the minutes of a core that the tests and the processes that they awaited have used: whatever else the
machine does, these hardly change, so they tell what a change of the tests has gained.

bin/test loads it and passes the seconds of its own steps in RINGTRAIN_TEST_STEPS ("install=40.1,build=55.0"). The
budgets are for two cores. Groups run beside each other, so that a whole run takes less than they do together; the first
test of a sanitizer may wait until it is built.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

WHOLE_RUN = 17.0  # minutes
# Minutes of each group, in the order of the run: what is long and cannot be shared out comes before the last ones.
BUDGETS = {
    "install": 1.5,
    "build": 0.8,
    "python": 7.5,
    "torch": 5.5,
    "TensorFlow": 5.2,
    "launcher": 1.0,
    "faults": 2.5,
    "Open MPI": 10.0,
    "TCP": 1.5,
    "packaging": 1.5,
    "tools": 3.5,
    "MPICH": 4.0,
    "simulation": 1.5,
    "native": 0.8,
    "sanitizers": 3.0,
}
GROUP_OF_MARKER = {
    "packaging": "packaging",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "tcp": "TCP",
    "plain": "native",
    "tsan": "sanitizers",
    "asan": "sanitizers",
}
GROUP_OF_FOLDER = {
    "with_torch": "torch",
    "with_keras": "TensorFlow",
    "with_tensorflow": "TensorFlow",
    "launch": "launcher",
    "faults": "faults",
    "native": "native",
    "simulation": "simulation",
    "spin": "simulation",
    "soak": "tools",
    "fuzz": "tools",
}
GROUP_OF_FILE = {  # where a folder has tests of several groups
    "test_quickstart": "torch",
    "test_examples": "torch",
    "test_docs": "torch",
    "test_lint": "tools",
    "test_packaging": "packaging",
}

begun = time.monotonic()
seconds: Counter[str] = Counter()
core_seconds: Counter[str] = Counter()
tests: Counter[str] = Counter()


def group_of(path: str, markers: set[str]) -> str:
    """The group of a test: by its marker if it has one of ours, else by its file's name or folder."""
    for marker, group in GROUP_OF_MARKER.items():
        if marker in markers:
            return group
    file = Path(path)
    return GROUP_OF_FILE.get(file.stem) or GROUP_OF_FOLDER.get(file.parent.name, "python")


def pytest_collection_modifyitems(items) -> None:
    """Notes each test's group, and brings the tests into the order of the groups."""
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        item.user_properties.append(("group", group_of(str(item.path), markers)))
    place = {group: number for number, group in enumerate(BUDGETS)}
    items.sort(key=lambda item: place[dict(item.user_properties)["group"]])


def used() -> float:
    """Seconds of a core that this process and those that it has awaited have used."""
    return sum(os.times()[:4])


class Used:
    """Where the last report of this process ended."""

    until = used()


# The report of each phase of a test carries what has been used since the one before, from a worker too.
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call) -> Iterator[None]:
    report = yield
    report.core_seconds, Used.until = used() - Used.until, used()
    return report


def pytest_runtest_logreport(report) -> None:
    group = dict(report.user_properties).get("group", "python")
    seconds[group] += report.duration
    core_seconds[group] += getattr(report, "core_seconds", 0.0)
    tests[group] += report.when == "call"


def pytest_terminal_summary(terminalreporter) -> None:
    whole = time.monotonic() - begun
    for step in filter(None, os.environ.get("RINGTRAIN_TEST_STEPS", "").split(",")):
        name, _, taken = step.partition("=")
        seconds[name] += float(taken)
        whole += float(taken)
    terminalreporter.section("minutes spent, on this machine, beside the budget on two cores; those of a core")
    for group, budget in BUDGETS.items():
        terminalreporter.write_line(line(group, seconds[group], budget, core_seconds[group], tests[group]))
    terminalreporter.write_line(line("whole run", whole, WHOLE_RUN, sum(core_seconds.values()), sum(tests.values())))


def line(name: str, taken: float, budget: float, of_a_core: float, count: int) -> str:
    """One line of the table, from seconds and a budget in minutes."""
    over = "   over" if taken > 60 * budget else ""
    return f"{name:12} {taken / 60:6.1f} of {budget:4.1f}  {of_a_core / 60:6.1f}  {count:5d} tests{over}"
