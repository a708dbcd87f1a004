"""A pytest plugin: the last lines of a run say of each failure what failed, what the ranks said, and how to run it alone.

Above them is what pytest prints, whole. Here each text comes once: of a world of threads the first rank's error and where the
others were, of a launched job its lines in the order of time, as ringtrainrun has passed them on, behind the rank's number.
They are taken from the job that the test waited for last, whatever its assertion shows. Of a worker that crashed it is where
its threads were. After a whole run bin/test runs what has failed once more, alone: what passes then is told as flaky, and is
no success.
"""

from __future__ import annotations

import ast
import ctypes
import faulthandler
import os
import re
import shlex
import subprocess
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

LINES = 30  # of a failure
WIDTH = 300
MOST = 10  # failures that are told so
INNERMOST = 5  # lines of the thread that crashed
NATIVE = 10  # frames of it
OF_THE_HANDLER = 2  # those of crash_stack.cc, and of the kernel
OF_AN_OUTPUT = 20_000  # characters, the last ones
# What assertion messages show of subprocess.CompletedProcess and of results made like it.
OUTPUTS = re.compile(r"""\b(stdout|stderr)=(b?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"))""")
RESULT = re.compile(r"CompletedProcess\(args=.*?(\)?(\.\w+)?)$")
OF_LIBRARIES = re.compile(r'^\s*File ".*/(site-packages|lib/python3\.\d+)/')
PLACE = re.compile(r"^(\S+\.py:\d+): ", re.MULTILINE)
RANK = re.compile(r"^(\s*)(?:\[(\d+)\] ?)?(.*)$", re.DOTALL)
WORKER = re.compile(r"\[gw\d+\] ")
CRASHED = re.compile(r"worker '(\w+)' crashed")

Outputs = list[tuple[str, str]]  # names and texts


class Failure(NamedTuple):
    """What pytest says of it, and what its job or its process has written."""

    text: str
    outputs: Outputs


failed: dict[str, Failure] = {}  # by test


def pytest_addoption(parser) -> None:
    parser.addoption("--write-failed", metavar="FILE", help="write the names of the tests that failed to this file")


# ---- what is known where a test runs ----


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call) -> Iterator[None]:
    report = yield
    report.outputs = outputs_of(call.excinfo) if report.failed and call.excinfo else []
    return report


def outputs_of(raised: pytest.ExceptionInfo) -> Outputs:
    """What the job has written that the test waited for, or waits for still: the last one that the innermost function knows."""
    error = raised.value
    if isinstance(error, subprocess.SubprocessError) and (found := texts(vars(error))):
        return found
    for entry in reversed(raised.traceback):
        for value in reversed(list(entry.frame.f_locals.values())):
            if isinstance(value, subprocess.CompletedProcess) and (found := texts(vars(value))):
                return found
            if isinstance(value, subprocess.Popen) and (found := so_far(value)):
                return found
    return []


def texts(known: dict[str, Any]) -> Outputs:
    """What is known of a process that has ended."""
    found = [
        (name, known.get(name) or known.get(other)) for name, other in (("stdout", "output"), ("stderr", "stderr"))
    ]
    decoded = [(name, said if isinstance(said, str) else said.decode(errors="replace")) for name, said in found if said]
    return [(name, said[-OF_AN_OUTPUT:]) for name, said in decoded]


def so_far(process: subprocess.Popen) -> Outputs:
    """What a process has written that is being waited for: in the hands of subprocess, which tells it to nobody yet."""
    pieces = getattr(process, "_fileobj2output", {})
    known = [("stdout", process.stdout), ("stderr", process.stderr)]
    return texts({name: b"".join(pieces.get(pipe, ())) for name, pipe in known})


def stacks_file(worker: str, run: int) -> Path:
    """Where a worker writes where its threads are, if it crashes. run: the process that has started it."""
    return Path(tempfile.gettempdir()) / f"ringtrain-crash-{run}-{worker}"


@pytest.hookimpl(trylast=True)  # pytest has faulthandler write to the terminal
def pytest_configure(config) -> None:
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        config.stacks = stacks_file(worker, os.getppid()).open("w")
        faulthandler.enable(config.stacks)
        library = Path(os.environ.get("RINGTRAIN_TEST_FAKES", "")) / "crash_stack.so"
        if library.exists():
            ctypes.CDLL(str(library)).tell_crashes(config.stacks.fileno())


# ---- what is told of it ----


def pytest_runtest_logreport(report) -> None:
    if report.failed:
        text, outputs = report.longreprtext, getattr(report, "outputs", [])
        if crashed := CRASHED.search(text):
            outputs = stacks_of(crashed[1])
        failed.setdefault(report.nodeid, Failure(text, outputs))


def pytest_collectreport(report) -> None:
    if report.failed:
        failed.setdefault(report.nodeid, Failure(report.longreprtext, []))


def stacks_of(worker: str) -> Outputs:
    """Where the threads of a worker were when it crashed; the innermost native frames of the one that crashed, if they are known."""
    if not (file := stacks_file(worker, os.getpid())).exists():
        return []
    native, fatal, said = file.read_text().partition("Fatal Python error")
    file.unlink()
    what, *threads = said.partition("\n\nExtension modules:")[0].split("\n\n")
    crashed, *others = sorted(threads, key=lambda stack: not stack.startswith("Current thread")) or [""]
    own = crashed.splitlines()  # of a library's frames, those in which it crashed are told
    rest = [*own[INNERMOST:], *(line for stack in others for line in stack.splitlines())]
    stacks = "\n".join([fatal + what, *own[:INNERMOST], *without_libraries(rest)])
    frames = [line.rpartition("/")[2].partition("[")[0] for line in native.splitlines()[OF_THE_HANDLER:]]
    return [("native", "\n".join(frames[:NATIVE])), ("stacks", stacks)]


def pytest_sessionfinish(session) -> None:
    if (file := session.config.getoption("write_failed")) and "PYTEST_XDIST_WORKER" not in os.environ:
        Path(file).write_text("".join(f"{nodeid}\n" for nodeid in failed))


# After all other sections, which are written by plugins that were loaded before.
@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config) -> None:
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        stacks_file(worker, os.getppid()).unlink(missing_ok=True)
        return
    for nodeid, failure in list(failed.items())[:MOST]:
        print("", *brief(nodeid, *failure), sep="\n")
    if len(failed) > MOST:
        print(f"\n{len(failed) - MOST} more failed; see above.")


def brief(nodeid: str, text: str, outputs: Outputs = ()) -> list[str]:
    """At most `LINES` lines of a failure, from what pytest says of it; its command is the last. Pure."""
    head, alone = [f"==== {nodeid}", *place_of(text)], f"alone: bin/test {shlex.quote(nodeid)}"
    written = dict([*shown(text), *outputs])
    *others, error = once_each([*(said.splitlines() for said in written.values()), errors(text)])
    parts = [
        error,
        *([f"{name}:", *(f"  {line}" for line in lines)] for name, lines in zip(written, others, strict=True) if lines),
    ]
    most = room_of_each([len(part) for part in parts], LINES - len(head) - 1)
    said = [line for part in parts for line in shortened(part, most, begin=most // 3 if part is error else 1)]
    return [*head, *(line[:WIDTH] for line in said), alone]


def place_of(text: str) -> list[str]:
    """Where it was raised: in the tests if they are in the traceback; nothing if there is no place."""
    found = PLACE.findall(text)
    ours = [place for place in found if not place.startswith(("/", ".."))]
    tests = [place for place in ours if place.startswith("tests/")]
    return [f"at {place}" for place in (tests or ours)[-1:]]


def room_of_each(sizes: list[int], room: int) -> int:
    """The most lines that each part may have, so that all have room."""
    return max(most for most in range(room + 1) if sum(min(size, most) for size in sizes) <= room)


def shortened(lines: list[str], most: int, begin: int) -> list[str]:
    """Lines with so many of their first, and the last ones, if they have no room: what came of it is in the last."""
    if len(lines) <= most:
        return lines
    end = len(lines) - (most - begin - 1)
    return [*lines[:begin], f"  ... {end - begin} lines", *lines[end:]]


def errors(text: str) -> Iterator[str]:
    """The lines in which pytest says what was raised, without outputs of jobs; the last lines where it says nothing."""
    lines = [line[1:].removeprefix("   ") for line in text.splitlines() if re.match(r"E(   |$)", line)]
    said = "\n".join(lines or [line for line in text.splitlines() if not WORKER.match(line)][-LINES:])
    said = OUTPUTS.sub(lambda found: f"{found[1]}: below", said)
    yield from (RESULT.sub(r"the job\2", line) for line in without_libraries(said.splitlines()))


def shown(text: str) -> Outputs:
    """The outputs of jobs that pytest shows, from their reprs, whose line ends it has written out."""
    lines = [line[1:].removeprefix("   ") for line in text.splitlines() if re.match(r"E(   |$)", line)]
    found = []
    for name, written in OUTPUTS.findall("\n".join(lines)):
        said = ast.literal_eval(written.replace("\n", "\\n"))
        first, _, rest = (said.decode(errors="replace") if isinstance(said, bytes) else said).partition("\n")
        found.append((name, f"{first}\n{textwrap.dedent(rest)}"))  # pytest has put the lines under its own
    return found


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


def once_each(parts: Iterable[Iterable[str]]) -> list[list[str]]:
    """Without empty lines and those that were there before; behind the numbers of all ranks that wrote them alike."""
    ranks: dict[str, set[int]] = {}  # by line
    kept: list[list[str]] = []
    for part in parts:
        kept.append([])
        for line in part:
            _, rank, text = RANK.match(line).groups()
            if text.strip() not in {"", "')", "Use -v to get more diff", *ranks}:
                kept[-1].append(line)
            ranks.setdefault(text.strip(), set()).update(map(int, filter(None, [rank])))
    return [[with_ranks(line, ranks) for line in part] for part in kept]


def with_ranks(line: str, ranks: dict[str, set[int]]) -> str:
    before, rank, text = RANK.match(line).groups()
    return f"{before}[{','.join(map(str, sorted(ranks[text.strip()])))}] {text}" if rank else line
