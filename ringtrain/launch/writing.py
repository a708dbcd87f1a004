"""Writes without making the launcher wait: a bounded queue and a thread of its own before each place that may block.

A paused pager, a stopped terminal, a full pipe and a hung file server all hold up whoever writes to them, and
O_NONBLOCK would change the descriptor for all processes that share it. So a thread writes; its producer asks `has_room`
and lets the ranks wait meanwhile. What cannot be written at all is counted by a `Loss`, with the reason. Used by
`output`.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

ROOM_BYTES = 256 << 10  # in a queue; beyond them the ranks wait
MOST_BYTES = 16 << 20  # in a queue; what comes beyond them is not written
PIECE_BYTES = 4096  # of one write to a pipe, which is then never mixed with another program's (PIPE_BUF)
PIECE_OF_FILE_BYTES = 64 << 10
SECONDS_BETWEEN_LOOKS = 0.2  # at the patience of whoever waits
UNREAD = "nobody has read it"

Patience = tuple[float, float]  # seconds in which nothing is taken, and seconds in all, until one gives up


@dataclass
class Loss:
    """What could not be written to one place, or to several that are one for people, and the first reason."""

    place: str
    lines: int = 0
    size: int = 0  # in bytes
    reason: str = ""
    is_told: bool = False  # whether a warning has been given

    def add(self, data: bytes, reason: str, within_line: bool = False) -> None:
        """Notes that this was not written; within_line: the line that it begins with is counted already."""
        self.lines += data.count(b"\n") + (not data.endswith(b"\n")) - within_line
        self.size += len(data)
        self.reason = self.reason or reason

    def __str__(self) -> str:
        return f"{self.lines} lines ({self.size} bytes) are missing there: {self.reason}"


class Sink:
    """A descriptor that bytes go to. Only the writer's thread calls it, but for `loss`."""

    def __init__(self, loss: Loss, descriptor: int = -1):
        self.loss = loss
        self.descriptor = descriptor
        self.piece_bytes = PIECE_BYTES
        self.is_read = True  # False once the reader of a pipe has gone
        self._missing = Loss(loss.place)  # since the last byte that was written
        self._is_torn = False  # whether that was within a line
        self._is_losing_line = False  # whether the last bytes were lost, and within a line

    def open(self) -> int:
        """The descriptor; opened at its first use where it is a file's. Raises OSError."""
        return self.descriptor

    def close(self) -> None:
        """Closes what `open` opened. Raises OSError: some file servers tell of a full disk only now."""

    def write(self, data: bytes, moved: Callable[[], None]) -> None:
        """Writes all of it, waits for as long as that takes, and calls `moved` whenever something has been taken."""
        if not self.is_read:
            return
        left = memoryview(data)
        try:
            descriptor = self.open()
            if self._missing.size:
                left = memoryview(self._gap() + data)
            while left:
                try:
                    left = left[os.write(descriptor, left[: self.piece_bytes]) :]
                    moved()
                except BlockingIOError:  # another program has made it so; no reason to do it to that program
                    wait_writable(descriptor)
            self._missing = Loss(self.loss.place)
            self._is_torn = not data.endswith(b"\n")
            self._is_losing_line = False
        except BrokenPipeError:
            self.is_read = False
        except OSError as error:
            self._is_torn = self._is_torn or len(left) < len(data)
            lost, reason = bytes(left[-len(data) :]), error.strerror or str(error)
            self._missing.add(lost, reason, self._is_losing_line)
            self.lose(lost, reason)

    def lose(self, data: bytes, reason: str) -> None:
        """Counts what is not written."""
        self.loss.add(data, reason, self._is_losing_line)
        self._is_losing_line = not data.endswith(b"\n")

    def finish(self) -> None:
        """Closes it; a failure counts as a loss."""
        try:
            self.close()
        except OSError as error:
            self.loss.add(b"", error.strerror or str(error))

    def _gap(self) -> bytes:
        """What stands in place of what is missing."""
        return b"\n" * self._is_torn + f"ringtrainrun: {self._missing}.\n".encode()


class ObjectSink(Sink):
    """A Python object that bytes go to."""

    def __init__(self, loss: Loss, stream: BinaryIO):
        super().__init__(loss)
        self.stream = stream

    def write(self, data: bytes, moved: Callable[[], None]) -> None:
        """Writes all of it."""
        self.stream.write(data)
        self.stream.flush()
        moved()


def wait_writable(descriptor: int) -> None:
    """Waits until a descriptor takes bytes, or is broken."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    waiting.poll()


class AtOnce:
    """Stands in for a `Writer` where there is no descriptor that could block, as in a notebook."""

    has_room = True
    on_news: Callable[[], None] = staticmethod(lambda: None)

    def put(self, sink: Sink, data: bytes) -> None:
        """Writes it."""
        sink.write(data, lambda: None)

    def finish(self, patience: Callable[[], Patience]) -> None:
        """All is written already."""


class Writer:
    """A thread that writes to some sinks, in the order in which it was told to."""

    def __init__(self, name: str):
        self.name = name
        self.on_news: Callable[[], None] = lambda: (
            None
        )  # called by the thread: there is room again, or something went wrong
        self.is_given_up = False
        self._queue: deque[tuple[Sink, bytes | None]] = deque()  # None closes the sink
        self._being_written: tuple[Sink, bytes | None] | None = None
        self._size = 0  # bytes that are not written yet
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._moved_at = time.monotonic()

    @property
    def has_room(self) -> bool:
        """Whether whoever feeds it may go on."""
        return self._size < ROOM_BYTES or self.is_given_up

    def put(self, sink: Sink, data: bytes) -> None:
        """Has it written soon; never waits. b"" makes a file."""
        with self._changed:
            if self.is_given_up or self._size + len(data) > MOST_BYTES:
                sink.lose(data, UNREAD)
                return
            if not self._size:
                self._moved_at = time.monotonic()
            self._queue.append((sink, data))
            self._size += len(data)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"ringtrainrun-{self.name}", daemon=True)
            self._thread.start()

    def close(self, sink: Sink) -> None:
        """Has it closed once all is written."""
        with self._changed:
            self._queue.append((sink, None))
            self._changed.notify_all()

    def finish(self, patience: Callable[[], Patience]) -> None:
        """Waits until all is written, for as long as the patience is, which may change meanwhile; what is left then is lost."""
        began = time.monotonic()
        with self._changed:
            while self._is_busy() and not self.is_given_up:
                until_progress, in_all = patience()
                left = min(max(self._moved_at, began) + until_progress, began + in_all) - time.monotonic()
                if left <= 0:
                    self._give_up()
                else:
                    self._changed.wait(min(left, SECONDS_BETWEEN_LOOKS))

    def _is_busy(self) -> bool:
        return bool(self._queue) or self._being_written is not None

    def _give_up(self) -> None:
        """What is not written yet is lost."""
        self.is_given_up = True
        for sink, data in filter(None, [self._being_written, *self._queue]):
            if data:
                sink.lose(data, UNREAD)
        self._queue.clear()
        self._changed.notify_all()

    def _run(self) -> None:
        # Under `stty tostop` a job in the background is stopped when it writes to its terminal, unless the thread
        # blocks this.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                sink, data = self._being_written = self._next()
            lost, was_read = sink.loss.size, sink.is_read
            if data is None:
                sink.finish()
            else:
                sink.write(data, self._note_progress)
            with self._changed:
                self._being_written = None
                had_room = self.has_room
                self._size -= len(data or b"")
                self._changed.notify_all()
            if (not had_room and self.has_room) or sink.loss.size > lost or sink.is_read != was_read:
                self.on_news()

    def _next(self) -> tuple[Sink, bytes | None]:
        """The oldest entry, and those behind it that go to the same place and into one write."""
        sink, data = self._queue.popleft()
        if data is None:
            return sink, data
        pieces, size = [data], len(data)
        while self._queue and self._queue[0][0] is sink and (more := self._queue[0][1]) is not None:
            size += len(more)
            if size > sink.piece_bytes:
                break
            pieces.append(more)
            self._queue.popleft()
        return sink, b"".join(pieces)

    def _note_progress(self) -> None:
        self._moved_at = time.monotonic()
