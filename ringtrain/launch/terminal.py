"""Where the launcher's lines end up: its stdout and stderr, and one progress bar that survives them."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable
from typing import BinaryIO

from ringtrain.launch.log_lines import Fact, Form, Text
from ringtrain.launch.writing import PIECE_OF_FILE_BYTES, AtOnce, Loss, ObjectSink, Patience, Sink, Writer


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
        """Writes what the launcher itself has to say, of a kind of `log_lines`; to stderr, or where that takes nothing to stdout."""
        stream = 1 if self._sinks[2].loss.size and not self._sinks[1].loss.size else 2
        for line in self._form.of_event(kind, text, facts):
            self.write_line(stream, line)

    def say_waiting(self, text: str) -> None:
        """Writes what is waited for."""
        self.say(text, "waiting")

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
