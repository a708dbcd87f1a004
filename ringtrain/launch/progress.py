"""How far something is that lasts longer than two seconds: one line on a terminal, replaced as it goes; in a pipe nothing.

Ranks write into pipes. Whoever starts them for a measurement tells them the terminal's file, and rank 0 writes there itself if
it runs on the same machine, so that its line is gone before it prints what it has found.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TextIO

SECONDS_UNTIL_SHOWN = 2.0
SECONDS_BETWEEN = 0.1
VARIABLE = "RINGTRAIN_PROGRESS"  # machine:file
COLUMNS = 79
ERASE = "\r\x1b[K"


class Progress:
    """A line on a terminal; without one it does nothing."""

    def __init__(self, terminal: TextIO | None):
        self._terminal = terminal
        self._begun = time.monotonic()
        self._written = 0.0
        self._is_shown = False

    def show(self, text: str) -> None:
        """What is being done; shown if it has lasted long enough, with the seconds so far."""
        now = time.monotonic()
        if self._terminal is None or now - self._begun < SECONDS_UNTIL_SHOWN or now - self._written < SECONDS_BETWEEN:
            return
        self._written = now
        self._is_shown = True
        self._write(ERASE + f"{text} ({now - self._begun:.0f} s)"[:COLUMNS])

    def clear(self) -> None:
        """Takes the line away, for what is printed next."""
        if self._is_shown:
            self._is_shown = False
            self._write(ERASE)

    def _write(self, text: str) -> None:
        if self._terminal is None:
            return
        try:
            self._terminal.write(text)
            self._terminal.flush()
        except (OSError, ValueError):  # it was closed: whatever is measured goes on
            self._terminal = None


def on_stderr() -> Progress:
    """Of this process, if its stderr is a terminal."""
    return Progress(sys.stderr if _is_terminal(sys.stderr) else None)


def for_ranks() -> dict[str, str]:
    """Variables by which rank 0 finds this process's terminal; none without one."""
    if not _is_terminal(sys.stderr):
        return {}
    try:
        return {VARIABLE: f"{_machine()}:{os.ttyname(sys.stderr.fileno())}"}
    except OSError:  # of another namespace
        return {}


def of_starter(environment: Mapping[str, str]) -> Progress:
    """On the terminal of whoever started this rank, if that is on this machine and this user's."""
    machine, _, path = environment.get(VARIABLE, "").partition(":")
    if not path or machine != _machine():
        return Progress(None)
    try:
        terminal = os.open(
            path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK
        )  # a stopped one costs no time
    except OSError:
        return Progress(None)
    if not os.isatty(terminal):
        os.close(terminal)
        return Progress(None)
    return Progress(os.fdopen(terminal, "w"))


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return boot.read().strip()
    except OSError:
        return ""


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False
