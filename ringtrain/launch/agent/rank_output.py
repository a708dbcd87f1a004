"""What the ranks of a host write: passed on to the launcher as far as it takes it, and kept while there is none."""

from __future__ import annotations

import os
import selectors

from ringtrain.launch.agent.succession import Backlog

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringtrain.launch.agent.link import LauncherEnd

MAX_UNSENT = 256 << 10  # bytes that wait for the launcher; beyond them the ranks wait
LEAST_READ, MOST_READ = 4096, 1 << 16
LAST_BYTES = 1 << 20  # of each stream of a rank that has ended; whoever goes on writing then is not of the job


class RankOutput:
    """The pipes of the ranks' stdout and stderr.

    window: bytes of output that the launcher has room for.
    """

    def __init__(self, launcher: LauncherEnd, selector: selectors.BaseSelector, window: int):
        self._launcher = launcher
        self._selector = selector
        self._credit = window
        self._pipes: dict[int, tuple[int, int]] = {}  # (rank, stream) by descriptor
        self._listened_to: set[int] = set()  # those of them that the selector watches
        self._backlog = Backlog()

    @property
    def dropped(self) -> int:
        """Bytes that were written while there was no launcher, and had no room."""
        return self._backlog.dropped

    def begin(self, rank: int, streams: Sequence[int]) -> None:
        """A rank has started, whose stdout and stderr can be read there."""
        for stream, descriptor in enumerate(streams, 1):
            os.set_blocking(descriptor, False)
            self._pipes[descriptor] = (rank, stream)

    def go_on(self, size: int) -> None:
        """The launcher has room for so many bytes more."""
        self._credit += size

    def follow(self, window: int) -> None:
        """Another launcher has room for so many bytes, and gets what was kept meanwhile."""
        self._credit = window
        for number, stream, data in self._backlog.take():
            self._credit -= len(data)
            self._launcher.tell({"rank": number, "stream": stream}, data)

    def listen(self) -> None:
        """Listens to what ranks write only while the launcher takes it, so that they wait like any program that nobody reads."""
        has_room = self._credit > 0 and len(self._launcher.unsent) < MAX_UNSENT
        wanted = set(self._pipes) if has_room or self._launcher.is_gone else set()
        for descriptor in wanted - self._listened_to:
            self._selector.register(
                descriptor,
                selectors.EVENT_READ,
                lambda descriptor=descriptor: self._read(
                    descriptor, MOST_READ if self._launcher.is_gone else self._credit
                ),
            )
        for descriptor in self._listened_to - wanted:
            self._selector.unregister(descriptor)
        self._listened_to = wanted
        if bool(self._launcher.unsent) != (1 in self._selector.get_map()):
            if self._launcher.unsent:
                self._selector.register(1, selectors.EVENT_WRITE, self._launcher.flush)
            else:
                self._selector.unregister(1)

    def drain(self) -> None:
        """Passes on what ranks that have ended wrote last. Raises LauncherGoneError."""
        for descriptor in list(self._pipes):
            room = LAST_BYTES
            while room > 0 and (size := self._read(descriptor, LAST_BYTES)):
                self._launcher.finish()
                room -= size

    def close(self) -> None:
        """Reads no more: a rank that writes on gets SIGPIPE."""
        for descriptor in self._pipes:
            os.close(descriptor)
        self._pipes.clear()

    def _read(self, descriptor: int, most: int) -> int:
        """Passes on what a rank wrote, up to so many bytes; returns their number, 0 at the end of the stream or if nothing is there."""
        try:
            data = os.read(descriptor, max(LEAST_READ, min(most, MOST_READ)))
        except BlockingIOError:
            return 0
        rank, stream = self._pipes[descriptor]
        if data and self._launcher.is_gone:
            self._backlog.add(rank, stream, data)
        elif data:
            self._credit -= len(data)
            self._launcher.tell({"rank": rank, "stream": stream}, data)
        if data:
            return len(data)
        if descriptor in self._listened_to:
            self._listened_to.discard(descriptor)
            self._selector.unregister(descriptor)
        os.close(descriptor)
        del self._pipes[descriptor]
        return 0
