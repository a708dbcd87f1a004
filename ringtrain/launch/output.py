"""Tagged output of many ranks: whole lines, and one progress bar that survives them; or a file for each. For `job`."""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO

LONGEST_LINE = 1 << 20  # bytes after which a line is cut
KEPT_LINES = 200
LOG_LINES = 50
CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")


class Terminal:
    """Where lines end up: the launcher's stdout and stderr.

    A progress bar, that is text between carriage returns, is drawn below the lines if stderr is a terminal. Into a
    file or a pipe only its last state goes, when the program ends the line.
    """

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO):
        self.streams = {1: stdout, 2: stderr}
        self.live = stderr.isatty()
        self.lines = 0  # written so far
        self.is_read = True
        self._progress = b""

    def write_line(self, stream: int, text: bytes) -> None:
        """Writes one line to stdout (1) or stderr (2), above the progress bar if there is one.

        Nothing is written any more once the reader has gone, as `ringtrainrun ... | head` makes it; see `is_read`.
        """
        if not self.is_read:
            return
        try:
            self._erase_progress()
            self.streams[stream].write(text + b"\n")
            self.streams[stream].flush()
            self.lines += 1
            self._draw_progress()
        except BrokenPipeError:
            self.is_read = False

    def say(self, text: str) -> None:
        """Writes what the launcher itself has to say, each of its lines marked so."""
        for line in text.splitlines():
            self.write_line(2, b"ringtrainrun: " + line.encode())

    def show_progress(self, text: bytes) -> None:
        """Replaces the progress bar; b"" removes it."""
        self._erase_progress()
        self._progress = text
        self._draw_progress()

    def _erase_progress(self) -> None:
        if self.live and self._progress:
            self.streams[2].write(b"\r\x1b[K")
            self.streams[2].flush()

    def _draw_progress(self) -> None:
        if self.live and self._progress:
            width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be erased
            self.streams[2].write(b"\r" + self._progress.decode(errors="replace")[:width].encode())
            self.streams[2].flush()


class RankFile:
    """The file that has one stream of a rank: FOLDER/rank.3/stderr, numbers padded, for the user's eyes alone."""

    def __init__(self, folder: str, rank: int, ranks: int, stream: int):
        place = Path(folder) / f"rank.{rank:0{len(str(ranks - 1))}d}"
        private_folder(folder)
        private_folder(place)
        self.path = place / ("stdout" if stream == 1 else "stderr")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        self.file = os.fdopen(os.open(self.path, flags, 0o600), "wb", buffering=0)
        os.fchmod(self.file.fileno(), 0o600)


def private_folder(path: str | Path) -> None:
    """Makes a folder that only this user can look into. Raises PermissionError if it is another's, or a link."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"output folder '{path}': it must be a folder of this user, but is a link or another's. "
                              "Name another one with --output-filename.")
    os.chmod(path, 0o700)


class RankStream:
    """Stdout (1) or stderr (2) of one rank, cut into lines and tagged with the rank, and with the time if asked to.

    With a file, all bytes go there as they come, and only the last lines are kept.
    """

    def __init__(self, terminal: Terminal, stream: int, rank: int, shows_time: bool = False,
                 target: RankFile | None = None):
        self.terminal = terminal
        self.stream = stream
        self.tag = b"[%d] " % rank
        self.shows_time = shows_time
        self.target = target
        self.shows_progress = rank == 0 and target is None
        self.kept: deque[bytes] = deque(maxlen=KEPT_LINES)
        self.last_line = -1  # terminal.lines when this stream wrote to it last
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Takes bytes as they come and writes the lines that they complete."""
        if self.target is not None:
            self.target.file.write(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._write(line)
        if b"\r" in self._partial:
            self._partial = b"\r" + last_state(self._partial)
            if self.shows_progress:
                self.terminal.show_progress(self.tag + self._partial[1:])
        if len(self._partial) > LONGEST_LINE:
            self._write(self._partial)
            self._partial = b""

    def close(self) -> None:
        """Writes a last line that had no end."""
        if last_state(self._partial):
            self._write(self._partial)
        self._partial = b""

    def _write(self, line: bytes) -> None:
        text = last_state(line)
        if self.shows_progress and b"\r" in line:
            self.terminal.show_progress(b"")
        if self.target is None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S ").encode() if self.shows_time else b""
            self.terminal.write_line(self.stream, stamp + self.tag + text)
            self.last_line = self.terminal.lines
        self.kept.append(text)

    def ending(self) -> list[bytes]:
        """The traceback that this stream ended with, or else its last lines; tagged."""
        return [self.tag + line for line in last_traceback(list(self.kept)) or list(self.kept)[-LOG_LINES:]]


def last_state(line: bytes) -> bytes:
    """What a terminal would show of a line with carriage returns: the last text between them."""
    return next((part for part in reversed(re.split(rb"\r+", line)) if part), b"")


def last_traceback(lines: list[bytes]) -> list[bytes]:
    """The last Python traceback among lines, with those it was chained to, and what follows it; [] if none."""
    starts = [index for index, line in enumerate(lines) if line.startswith(b"Traceback (most recent call last)")]
    if not starts:
        return []
    start = starts.pop()
    while starts and any(line.startswith(CHAINED) for line in lines[starts[-1]:start]):
        start = starts.pop()
    return lines[start:]
