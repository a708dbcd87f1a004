"""The standard streams of a command: open from the start, and without a traceback where nobody takes what it writes."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import TextIO

NOT_TAKEN = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


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
    stdout = sys.stdout  # click exchanges it where the reader has gone
    try:
        try:
            return command()
        finally:  # also after sys.exit
            stdout.flush()
            if sys.stdout is not stdout:
                raise BrokenPipeError
    except BrokenPipeError:  # as of `... | head`
        _write_nowhere(stdout)
        return 128 + signal.SIGPIPE
    except OSError as error:
        if not is_of_stdout(error):
            raise
        _write_nowhere(stdout)
        sys.stderr.write(f"{name}: stdout: it must take what is written, but: {error.strerror}. Make room there.\n")
        return code_of_a_full_disk


def is_of_stdout(error: BaseException) -> bool:
    """Whether a command failed because nobody takes what it writes: a file that it has opened itself has a name."""
    return isinstance(error, OSError) and error.filename is None and error.errno in NOT_TAKEN


def _write_nowhere(stdout: TextIO) -> None:
    """Python writes what is left when it ends, and would complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stdout.fileno())
    os.close(null)
