"""Tagged output of many ranks: whole lines, and one progress bar that survives them; or a file for each. For `job`.

Nothing here waits for whoever reads: see `writing`. What is kept is bounded in bytes, by `Limits`.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ringtrain.launch.log import STREAMS, Fact, Form, Text
from ringtrain.launch.writing import PIECE_OF_FILE_BYTES, AtOnce, Loss, ObjectSink, Patience, Sink, Writer

OF_A_RANK = re.compile(r"rank\.\d+")
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


class Terminal:
    """Where lines end up: the launcher's stdout and stderr.

    A progress bar, that is text between carriage returns, is drawn below the lines if stderr is a terminal. Into a
    file or a pipe only its last state goes, when the program ends the line.

    Attributes:
        shows_time: whether date and time are before each line, if it is for people, and in the files of ranks.
    """

    shows_time = False

    def __init__(self, stdout: BinaryIO, stderr: BinaryIO):
        self._form: Form = Text()
        self._is_terminal = stderr.isatty()
        self.lines = 0  # written so far
        self._progress = b""
        self._sinks = {1: _sink("stdout", stdout), 2: _sink("stderr", stderr)}
        if _is_same(self._sinks[1], self._sinks[2]):  # then the order of their lines is kept
            self._sinks[1] = self._sinks[2]
        self._writers: dict[Sink, Writer | AtOnce] = {
            sink: AtOnce() if isinstance(sink, ObjectSink) else Writer(sink.loss.place) for sink in self._sinks.values()
        }

    @property
    def live(self) -> bool:
        """Whether progress bars are drawn."""
        return self._is_terminal and self._form.is_for_people

    def take_form(self, form: Form, shows_time: bool) -> None:
        """Has lines look so from now on."""
        self._form, self.shows_time = form, shows_time

    @property
    def is_read(self) -> bool:
        """False once a reader has gone, as `ringtrainrun ... | head` makes it; then nothing is written to it any more."""
        return all(sink.is_read for sink in self._writers)

    @property
    def has_room(self) -> bool:
        """Whether lines are being read: else the ranks should wait. What is written nevertheless may be lost."""
        return all(writer.has_room for writer in self._writers.values())

    @property
    def losses(self) -> list[Loss]:
        """What could not be written, to each place."""
        return [sink.loss for sink in self._writers]

    def watch(self, on_news: Callable[[], None]) -> None:
        """Has this called, by some thread, when `has_room`, `is_read` or `losses` change."""
        for writer in self._writers.values():
            writer.on_news = on_news

    def finish(self, patience: Callable[[], Patience]) -> None:
        """Waits until all is written, for as long as the patience is, which may change meanwhile; what is left then is lost."""
        for writer in self._writers.values():
            writer.finish(patience)

    def write_line(self, stream: int, text: bytes) -> None:
        """Writes one line to stdout (1) or stderr (2), above the progress bar if there is one."""
        self._erase_progress()
        self._put(stream, (self.stamp() if self._form.is_for_people else b"") + text + b"\n")
        self.lines += 1
        self._draw_progress()

    def stamp(self) -> bytes:
        """What is before a line that is written now."""
        return time.strftime("%Y-%m-%d %H:%M:%S ").encode() if self.shows_time else b""

    def write_of_rank(self, rank: int, stream: int, text: bytes) -> None:
        """Writes one line of a rank."""
        self.write_line(stream, self._form.of_rank(rank, stream, text))

    def write_of_engine(self, stream: int, text: bytes) -> None:
        """Writes one line of mpirun's or srun's."""
        self.write_line(stream, self._form.of_engine(stream, text))

    def say(self, text: str, kind: str = "remark", **facts: Fact) -> None:
        """Writes what the launcher itself has to say, of a kind of `log`; to stderr, or where that takes nothing to stdout."""
        stream = 1 if self._sinks[2].loss.size and not self._sinks[1].loss.size else 2
        for line in self._form.of_event(kind, text, facts):
            self.write_line(stream, line)

    def note(self, kind: str, **facts: Fact) -> None:
        """Writes what only programs want to be told."""
        self.say("", kind, **facts)

    def show_progress(self, text: bytes) -> None:
        """Replaces the progress bar; b"" removes it."""
        self._erase_progress()
        self._progress = text
        self._draw_progress()

    def _erase_progress(self) -> None:
        if self.live and self._progress:
            self._put(2, b"\r\x1b[K")

    def _draw_progress(self) -> None:
        if self.live and self._progress and self.has_room:
            width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be erased
            self._put(2, b"\r" + self._progress.decode(errors="replace")[:width].encode())

    def _put(self, stream: int, data: bytes) -> None:
        sink = self._sinks[stream]
        self._writers[sink].put(sink, data)


def _sink(name: str, stream: BinaryIO) -> Sink:
    """The sink of a standard stream: its descriptor, or itself if it has none."""
    loss = Loss(name)
    try:
        stream.flush()
        sink = Sink(loss, stream.fileno())
        if stat.S_ISREG(os.fstat(sink.descriptor).st_mode):
            sink.piece_bytes = PIECE_OF_FILE_BYTES
        return sink
    except (OSError, ValueError, AttributeError):
        return ObjectSink(loss, stream)


def _is_same(one: Sink, other: Sink) -> bool:
    """Whether two sinks are the same file, pipe or terminal."""
    if isinstance(one, ObjectSink) or isinstance(other, ObjectSink):
        return isinstance(one, ObjectSink) and isinstance(other, ObjectSink) and one.stream is other.stream
    return os.path.samestat(os.fstat(one.descriptor), os.fstat(other.descriptor))


class RankFiles:
    """The folder of --output-filename: a file for each stream of each rank, all written by one thread."""

    def __init__(self, folder: str, ranks: int):
        self.folder = folder
        self.ranks = ranks
        self.loss = Loss(f"output folder '{folder}'")
        self.writer = Writer("files")

    @property
    def has_room(self) -> bool:
        """Whether the files are being written: else the ranks should wait."""
        return self.writer.has_room

    @property
    def losses(self) -> list[Loss]:
        """What could not be written, to all of them."""
        return [self.loss]

    def watch(self, on_news: Callable[[], None]) -> None:
        """Has this called, by some thread, when `has_room` or `losses` change."""
        self.writer.on_news = on_news

    def finish(self, patience: Callable[[], Patience]) -> None:
        """Waits until all is written, for as long as the patience is; what is left then is lost."""
        self.writer.finish(patience)

    def file(self, rank: int, stream: int) -> RankFile:
        """The file of one stream; made if it is not there."""
        place = Path(self.folder) / f"rank.{rank:0{len(str(self.ranks - 1))}d}"
        file = RankFile(self.loss, place / STREAMS[stream - 1], self.writer)
        file.put(b"")
        return file


class RankFile(Sink):
    """The file that has one stream of a rank: FOLDER/rank.3/stderr, numbers padded, for the user's eyes alone."""

    def __init__(self, loss: Loss, path: Path, writer: Writer):
        super().__init__(loss)
        self.path = path
        self.piece_bytes = PIECE_OF_FILE_BYTES
        self._writer = writer

    def put(self, data: bytes) -> None:
        """Has it written soon; never waits."""
        self._writer.put(self, data)

    def end(self) -> None:
        """Has it closed once all is written."""
        self._writer.close(self)

    def open(self) -> int:
        """Makes the file and its folders at the first use. Raises OSError."""
        if self.descriptor < 0:
            for folder in (self.path.parents[1], self.path.parent):
                private_folder(folder)
            # At its end: a job that is taken up goes on in its files, and logrotate may empty them meanwhile.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
            self.descriptor = os.open(self.path, flags, 0o600)
            os.fchmod(self.descriptor, 0o600)
        return self.descriptor

    def close(self) -> None:
        """Raises OSError: some file servers tell of a full disk only now."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)


def keep_earlier(folder: str) -> int:
    """Renames what an earlier job has left of all its ranks to stdout.N and stderr.N; returns N, 0 if there is nothing.

    Of all ranks, so that a job of fewer ones leaves no file that looks like its own. Raises OSError.
    """
    found = [
        path
        for name in STREAMS
        for path in Path(folder).glob(f"rank.*/{name}*")
        if OF_A_RANK.fullmatch(path.parent.name)
    ]
    left = [path for path in found if path.name in STREAMS]
    if not left:
        return 0
    number = 1 + max(int(path.suffix[1:]) if path.suffix[1:].isdecimal() else 0 for path in found)
    for path in left:
        path.rename(path.with_name(f"{path.name}.{number}"))
    return number


def private_folder(path: str | Path) -> None:
    """Makes a folder that only this user can look into; one that is there stays as it is.

    Raises PermissionError if it is another's, or a link.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(
            f"output folder '{path}': it must be a folder of this user, but is a link or another's. "
            "Name another one with --output-filename."
        )


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
