"""The standard streams of a command: open from the start, and without a traceback where nobody takes what it writes."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import TextIO


class StdoutError(OSError):
    """Nobody takes what this process writes to its stdout; another file, or a socket, raises another error."""


class _Stdout(io.FileIO):
    """The descriptor of stdout, whose errors say so."""

    def write(self, data):  # type: ignore[no-untyped-def]  # as that of its base
        try:
            return super().write(data)
        except OSError as error:
            raise StdoutError(error.errno, error.strerror) from None


def open_standard_streams() -> None:
    """Opens those that the command was started without: else a file or a pipe of ours would take their numbers."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115


def with_its_output(name: str, command: Callable[[], int], code_of_a_full_disk: int = 1) -> int:
    """Runs a command to the last byte of its output; returns its exit code, 128 + SIGPIPE where the reader has gone.

    Where stdout takes nothing, as on a full disk, it says so in a line, and the exit code is the one that is given.
    """
    open_standard_streams()
    before = sys.stdout
    sys.stdout = stdout = _telling(before)
    try:
        try:
            return command()
        finally:  # also after sys.exit
            stdout.flush()
            if sys.stdout is not stdout:  # click exchanges it where the reader has gone
                raise StdoutError(errno.EPIPE, os.strerror(errno.EPIPE))
    except StdoutError as error:
        _write_nowhere(stdout)
        if error.errno == errno.EPIPE:  # as of `... | head`
            return 128 + signal.SIGPIPE
        sys.stderr.write(f"{name}: stdout: it must take what is written, but: {error.strerror}. Make room there.\n")
        return code_of_a_full_disk
    finally:
        sys.stdout = before


def _telling(stdout: TextIO) -> TextIO:
    """The same stream, whose errors are `StdoutError`; as it is where something else stands in for stdout."""
    if stdout is not sys.__stdout__ or not isinstance(stdout, io.TextIOWrapper):
        return stdout
    raw = _Stdout(stdout.fileno(), "wb", closefd=False)
    buffer = raw if isinstance(stdout.buffer, io.RawIOBase) else io.BufferedWriter(raw)  # as `python -u` has it
    return io.TextIOWrapper(
        buffer,
        stdout.encoding,
        stdout.errors,
        line_buffering=stdout.line_buffering,
        write_through=stdout.write_through,
    )


def _write_nowhere(stdout: TextIO) -> None:
    """Python writes what is left when it ends, and would complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stdout.fileno())
    os.close(null)
