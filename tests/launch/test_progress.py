"""Progress: one line on a terminal for what lasts, gone before anything else is printed; nothing in a pipe."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from concurrent.futures import Future
from threading import Timer

import pytest
from environments import python_with

from ringtrain.launch import preflight, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def seen(terminal: int) -> str:
    """What has been written to the other end of a terminal so far."""
    os.set_blocking(terminal, False)
    text = b""
    try:
        while part := os.read(terminal, 1 << 16):
            text += part
    except (BlockingIOError, OSError):  # nothing more; nobody has it open any more
        pass
    return text.decode()


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_UNTIL_SHOWN", 0.0)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN", 0.0)


def test_what_is_over_soon_shows_nothing():
    terminal = Terminal()
    shown = progress.Progress(terminal)
    shown.show("turn 1 of 2")
    shown.clear()
    assert terminal.getvalue() == ""


def test_a_line_is_replaced_and_taken_away(at_once):
    terminal = Terminal()
    shown = progress.Progress(terminal)
    for turn in (1, 2):
        shown.show(f"turn {turn} of 2")
    shown.clear()
    shown.clear()
    assert terminal.getvalue() == "\r\x1b[Kturn 1 of 2 (0 s)\r\x1b[Kturn 2 of 2 (0 s)\r\x1b[K"


def test_it_is_not_written_again_and_again(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_UNTIL_SHOWN", 0.0)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN", 60.0)
    terminal = Terminal()
    shown = progress.Progress(terminal)
    shown._written = time.monotonic() - 61
    for turn in range(100):
        shown.show(f"turn {turn}")
    assert terminal.getvalue().count("turn") == 1


def test_a_line_fits_the_terminal(at_once):
    terminal = Terminal()
    progress.Progress(terminal).show("x" * 500)
    assert len(terminal.getvalue()) <= progress.COLUMNS + len(progress.ERASE)


def test_a_terminal_that_has_gone_ends_nothing(at_once):
    terminal = Terminal()
    shown = progress.Progress(terminal)
    terminal.close()
    shown.show("turn 1")
    shown.clear()


def test_nothing_goes_into_a_pipe(at_once, capfd):
    shown = progress.on_stderr()
    shown.show("turn 1")
    shown.clear()
    assert capfd.readouterr() == ("", "") and progress.for_ranks() == {}


def test_a_rank_writes_to_the_terminal_of_its_starter(at_once, monkeypatch):
    here, terminal = pty.openpty()
    with open(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        variables = progress.for_ranks()
        assert list(variables) == [progress.VARIABLE] and variables[progress.VARIABLE].endswith(os.ttyname(terminal))
        progress.of_starter(variables).show("from a rank")
        assert "from a rank" in seen(here)
        for elsewhere in (f"another machine:{os.ttyname(terminal)}", f"{progress._machine()}:/absent",
                          f"{progress._machine()}:{__file__}", ""):  # fmt: skip
            progress.of_starter({progress.VARIABLE: elsewhere}).show("not from here")
        assert seen(here) == ""
    os.close(here)


def test_hosts_that_answer_late_are_counted(at_once, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(preflight, "SECONDS_BETWEEN_NEWS", 0.05)
    asked: list[Future] = [Future() for _ in range(3)]
    asked[0].set_result("facts")
    for later in asked[1:]:
        Timer(0.2, later.set_result, ["facts"]).start()
    preflight._wait_for_all(asked, list)
    assert "hosts: 1 of 3 have answered" in terminal.getvalue() and terminal.getvalue().endswith(progress.ERASE)


@pytest.mark.long
@pytest.mark.tcp
@pytest.mark.parametrize("has_terminal", [True, False])
def test_a_benchmark_shows_how_far_it_is(has_terminal):
    """And its table is as it would be without."""
    here, terminal = pty.openpty()
    command = [python_with("tcp"), "-m", "ringtrain.bench", "allreduce", "--sizes", "16MB", "--repetitions", "300"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=terminal if has_terminal else subprocess.PIPE, text=True, timeout=600,
        env={**os.environ, "RINGTRAIN_TRANSPORT": "tcp"},
    )  # fmt: skip
    os.close(terminal)
    assert done.returncode == 0 and "\x1b" not in done.stdout and "16MB  ringtrain" in done.stdout
    assert bool(re.search(r"turn \d+ of 303: (ringtrain|memcpy) \(\d+ s\)", seen(here))) == has_terminal
    assert has_terminal or "turn" not in done.stderr
