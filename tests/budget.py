"""A pytest plugin: sorts the tests into groups and prints the minutes that each has taken beside its budget.

bin/test loads it and passes the seconds of its own steps in RINGTRAIN_TEST_STEPS ("install=40.1,build=55.0").
The budgets are for two cores. Groups run beside each other, so that a whole run takes less than they do together; the first
test of a sanitizer may wait until it is built.
"""

from __future__ import annotations

import os
import time
from collections import Counter

WHOLE_RUN = 25.0  # minutes
# Minutes of each group, in the order of the run.
BUDGETS = {"install": 1.5, "build": 0.8, "python": 7.5, "torch": 5.5, "TensorFlow": 5.2, "launcher": 1.0, "Open MPI": 10.0, "MPICH": 4.0,
           "native": 0.8, "simulation": 1.5, "sanitizers": 3.0, "tools": 3.5, "packaging": 1.5}
GROUP_OF_MARKER = {"packaging": "packaging", "openmpi": "Open MPI", "mpich": "MPICH", "plain": "native",
                   "tsan": "sanitizers", "asan": "sanitizers"}
GROUP_OF_FILE = {"test_native": "native", "test_launch": "launcher", "test_hosts": "launcher",
                 "test_torch": "torch", "test_training": "torch", "test_quickstart": "torch",
                 "test_examples": "torch", "test_docs": "torch",
                 "test_tensorflow": "TensorFlow", "test_keras": "TensorFlow",
                 "test_simulation": "simulation", "test_spin": "simulation",
                 "test_lint": "tools", "test_soak": "tools", "test_fuzz": "tools", "test_packaging": "packaging"}

begun = time.monotonic()
seconds: Counter[str] = Counter()
tests: Counter[str] = Counter()


def group_of(path: str, markers: set[str]) -> str:
    """The group of a test: by its marker if it has one of ours, else by its file's name."""
    for marker, group in GROUP_OF_MARKER.items():
        if marker in markers:
            return group
    name = os.path.basename(path)
    return next((group for prefix, group in GROUP_OF_FILE.items() if name.startswith(prefix)), "python")


def pytest_collection_modifyitems(items) -> None:
    """Notes each test's group, and brings the tests into the order of the groups."""
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        item.user_properties.append(("group", group_of(str(item.path), markers)))
    place = {group: number for number, group in enumerate(BUDGETS)}
    items.sort(key=lambda item: place[dict(item.user_properties)["group"]])


def pytest_runtest_logreport(report) -> None:
    group = dict(report.user_properties).get("group", "python")
    seconds[group] += report.duration
    tests[group] += report.when == "call"


def pytest_terminal_summary(terminalreporter) -> None:
    whole = time.monotonic() - begun
    for step in filter(None, os.environ.get("RINGTRAIN_TEST_STEPS", "").split(",")):
        name, _, taken = step.partition("=")
        seconds[name] += float(taken)
        whole += float(taken)
    terminalreporter.section("minutes spent, on this machine, beside the budget on two cores")
    for group, budget in BUDGETS.items():
        terminalreporter.write_line(line(group, seconds[group], budget, tests[group]))
    terminalreporter.write_line(line("whole run", whole, WHOLE_RUN, sum(tests.values())))


def line(name: str, taken: float, budget: float, count: int) -> str:
    """One line of the table, from seconds and a budget in minutes."""
    return f"{name:12} {taken / 60:6.1f} of {budget:4.1f}  {count:5d} tests{'   over' if taken > 60 * budget else ''}"
