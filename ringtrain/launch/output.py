"""What ranks and their engine write, cut into lines for the terminal, or into the file of a rank. For `job`.

Nothing here waits for whoever reads: see `writing`. What is kept is bounded in bytes, by `Limits`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ringtrain.launch.rank_files import RankFile
from ringtrain.launch.terminal import Terminal

LOG_LINES = 50
LONGEST_OF_THE_ENGINE = 64 << 10  # bytes after which a line of the engine is cut
LEAST_LINES = 8  # that have room among what is kept: a longer one is cut
CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")


@dataclass(frozen=True)
class Limits:
    """Bytes that the launcher has room for, whatever the ranks write; `of` shares a total out among them.

    Attributes:
        line: of a line that has no end yet; then it is cut.
        kept: of the last lines of a rank's stderr, from which its failure is told.
        window: of a host's output that its agent may send before the launcher has passed some on.
    """

    line: int = 1 << 20
    kept: int = 64 << 10
    window: int = 1 << 20

    @staticmethod
    def of(ranks: int, hosts: int) -> Limits:
        """At most 96 MiB in all, up to some thousand ranks."""
        return Limits(
            line=_share(64 << 20, 2 * ranks, least=8 << 10, most=1 << 20),
            kept=_share(16 << 20, ranks, least=4 << 10, most=64 << 10),
            window=_share(16 << 20, hosts, least=64 << 10, most=1 << 20),
        )


def _share(total: int, parts: int, least: int, most: int) -> int:
    return max(least, min(most, total // parts))


class LastLines:
    """The last lines of a stream, as many as have room in some bytes."""

    def __init__(self, most_bytes: int):
        self.most_bytes = most_bytes
        self._lines: deque[bytes] = deque()
        self._size = 0

    def append(self, line: bytes) -> None:
        """Adds a line; the oldest ones make room for it."""
        longest = self.most_bytes // LEAST_LINES
        if len(line) > longest:
            line = line[:longest] + b" ... (%d bytes)" % len(line)
        self._lines.append(line)
        self._size += len(line) + 1
        while self._size > self.most_bytes and self._lines:
            self._size -= len(self._lines.popleft()) + 1

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)


class RankStream:
    """Stdout (1) or stderr (2) of one rank, cut into lines and tagged with the rank.

    With a file, all bytes go there as they come, but for the time at the beginning of each line if the terminal shows it. The
    last lines of stderr are kept.
    """

    def __init__(
        self,
        terminal: Terminal,
        stream: int,
        rank: int,
        target: RankFile | None = None,
        limits: Limits = Limits(),
    ):
        self.terminal = terminal
        self.stream = stream
        self.rank = rank
        self.target = target
        self._is_within_line = False  # of the file
        self.shows_progress = rank == 0 and target is None
        self.kept = LastLines(limits.kept if stream == 2 else 0)
        self.last_line = -1  # terminal.lines when this stream wrote to it last
        self._longest = limits.line
        self._partial = bytearray()

    def feed(self, data: bytes) -> None:
        """Takes bytes as they come and writes the lines that they complete."""
        if self.target is not None:
            self.target.put(self._stamped(data))
        head, newline, rest = data.rpartition(b"\n")
        if newline:
            for line in (self._partial + head).split(b"\n"):
                self._write(bytes(line))
            self._partial = bytearray(rest)
        else:
            self._partial += rest
        if b"\r" in self._partial:
            state = last_state(bytes(self._partial))
            self._partial = bytearray(b"\r" + state)
            if self.shows_progress:
                self.terminal.show_progress(b"[%d] " % self.rank + state)
        while len(self._partial) > self._longest:
            self._write(bytes(self._partial[: self._longest]))
            del self._partial[: self._longest]

    def close(self) -> None:
        """Writes a last line that had no end."""
        if last_state(bytes(self._partial)):
            self._write(bytes(self._partial))
        self._partial.clear()
        if self.target is not None:
            self.target.end()

    def _stamped(self, data: bytes) -> bytes:
        """Bytes for the file, with the time where a line begins."""
        stamp = self.terminal.stamp()
        if not stamp or not data:
            return data
        begins = b"" if self._is_within_line else stamp
        self._is_within_line = not data.endswith(b"\n")
        return begins + data[:-1].replace(b"\n", b"\n" + stamp) + data[-1:]

    def _write(self, line: bytes) -> None:
        text = last_state(line)
        if self.shows_progress and b"\r" in line:
            self.terminal.show_progress(b"")
        if self.target is None:
            self.terminal.write_of_rank(self.rank, self.stream, text)
            self.last_line = self.terminal.lines
        if self.kept.most_bytes:
            self.kept.append(text)

    def ending(self) -> list[bytes]:
        """The traceback that this stream ended with, or else its last lines."""
        return last_traceback(list(self.kept)) or list(self.kept)[-LOG_LINES:]


class EngineStream:
    """The engine's own stdout (1) or stderr (2), passed on line by line as far as `shows` wants it; `hears` gets each line."""

    def __init__(self, terminal: Terminal, stream: int, shows: Callable[[bytes], bool], hears: Callable[[bytes], None]):
        self.terminal = terminal
        self.stream = stream
        self.shows = shows
        self.hears = hears
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Takes bytes as they come."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._pass_on(line)
        if len(self._partial) > LONGEST_OF_THE_ENGINE:
            self.close()

    def close(self) -> None:
        """Passes on a last line that had no end."""
        if self._partial:
            self._pass_on(self._partial)
        self._partial = b""

    def _pass_on(self, line: bytes) -> None:
        self.hears(line)
        if self.shows(line):
            self.terminal.write_of_engine(self.stream, line)


def last_state(line: bytes) -> bytes:
    """What a terminal would show of a line with carriage returns: the last text between them."""
    if b"\r" not in line:
        return line
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :]


def last_traceback(lines: list[bytes]) -> list[bytes]:
    """The last Python traceback among lines, with those it was chained to, and what follows it; [] if none."""
    starts = [index for index, line in enumerate(lines) if line.startswith(b"Traceback (most recent call last)")]
    if not starts:
        return []
    start = starts.pop()
    while starts and any(line.startswith(CHAINED) for line in lines[starts[-1] : start]):
        start = starts.pop()
    return lines[start:]
