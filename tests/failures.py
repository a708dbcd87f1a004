"""A pytest plugin: the last lines of a run say of each failure what failed, what the ranks said, and how to run it alone.

Above them is what pytest prints, whole. Here each text comes once: of a world of threads the first rank's error and where the
others were, of a launched job its lines in the order of time, as ringtrainrun has passed them on, behind the rank's number.
After a whole run bin/test runs what has failed once more, alone: what passes then is told as flaky, and is no success.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

LINES = 30  # of a failure
WIDTH = 200
MOST = 10  # failures that are told so
OF_A_JOB = 18  # lines of a job's output, the last ones
# What assertion messages show of subprocess.CompletedProcess and of results made like it.
OUTPUTS = re.compile(r"""\b(stdout|stderr)=(b?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"))""")
OF_LIBRARIES = re.compile(r'^\s*File ".*/(site-packages|lib/python3\.\d+)/')

failed: dict[str, str] = {}  # by test: what pytest says of it


def pytest_addoption(parser) -> None:
    parser.addoption("--write-failed", metavar="FILE", help="write the names of the tests that failed to this file")


def pytest_runtest_logreport(report) -> None:
    if report.failed:
        failed.setdefault(report.nodeid, report.longreprtext)


def pytest_sessionfinish(session) -> None:
    if (file := session.config.getoption("write_failed")) and "PYTEST_XDIST_WORKER" not in os.environ:
        Path(file).write_text("".join(f"{nodeid}\n" for nodeid in failed))


# After all other sections, which are written by plugins that were loaded before.
def pytest_unconfigure(config) -> None:
    if not failed or "PYTEST_XDIST_WORKER" in os.environ:
        return
    for nodeid, text in list(failed.items())[:MOST]:
        print("", *brief(nodeid, text), sep="\n")
    if len(failed) > MOST:
        print(f"\n{len(failed) - MOST} more failed; see above.")


def brief(nodeid: str, text: str) -> list[str]:
    """At most `LINES` lines of a failure, from what pytest says of it; its command is the last. Pure."""
    head, alone = f"==== {nodeid}", f"alone: bin/test {shlex.quote(nodeid)}"
    said = [line for line in once_each(errors(text)) if line.strip()]
    room = LINES - 2
    if len(said) > room:  # what failed is told first, and what came of it last
        first = room // 3
        said = [*said[:first], f"  ... {len(said) - room + 1} lines", *said[first - room + 1 :]]
    return [head, *(line[:WIDTH] for line in said), alone]


def errors(text: str) -> Iterator[str]:
    """The lines in which pytest says what was raised, with the output of jobs taken apart; the last lines where it says nothing."""
    lines = [line[1:].removeprefix("   ") for line in text.splitlines() if re.match(r"E(   |$)", line)]
    lines = lines or text.splitlines()[-LINES:]
    said = "\n".join(lines)
    yield from without_libraries(OUTPUTS.sub(lambda found: f"{found[1]}: below", said).splitlines())
    for name, shown in OUTPUTS.findall(said):
        yield from of_job(name, shown)


def without_libraries(lines: Iterable[str]) -> Iterator[str]:
    """Leaves out the frames of a traceback that are in libraries."""
    skipped = False
    for line in lines:
        if OF_LIBRARIES.match(line):
            skipped = True  # and the line of code below it
        elif not (skipped and line.startswith("    ")):
            yield line
            skipped = False
        else:
            skipped = False


def of_job(name: str, shown: str) -> Iterator[str]:
    """The last lines of a job's stdout or stderr, from its repr, whose line ends pytest has written out."""
    said = ast.literal_eval(shown.replace("\n", "\\n"))
    lines = (said.decode(errors="replace") if isinstance(said, bytes) else said).splitlines()
    lines[1:] = textwrap.dedent("\n".join(lines[1:])).splitlines()  # pytest has put them under its own
    if lines:
        yield f"{name}:"
        yield from (f"  {line}" for line in lines[-OF_A_JOB:])


def once_each(lines: Iterable[str]) -> list[str]:
    """Without the lines that were there before, but for the number of the rank in front of them."""
    seen: set[str] = set()
    kept = []
    for line in lines:
        text = re.sub(r"^\s*(\[\d+\]\s*)+", "", line).strip()
        if text not in seen:
            kept.append(line)
            seen.add(text)
    return kept
