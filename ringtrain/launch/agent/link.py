"""The launcher's end, as the agent sees it: requests on stdin, answers and news on stdout."""

from __future__ import annotations

import json
import os
import select
import zlib

from ringtrain.version import __version__

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from ringtrain._rendezvous.agent_protocol import Answer, RankNews, Request

MARK = b"\x1eringtrain-agent "  # before each line: what has none is of a login shell, or of what it has left running
SECONDS_TO_FINISH = 5.0  # in which the launcher must take something of what is left for it


class LauncherGoneError(OSError):
    """It takes nothing any more."""


class LauncherEnd:
    """The launcher's end, over stdin and stdout.

    Attributes:
        is_outlived: its loss is no error, as another one may take its place.
        is_gone: it is lost; what is told now is told to nobody.
    """

    def __init__(self) -> None:
        self.is_outlived = self.is_gone = False
        self.pending = bytearray()
        self.unsent = bytearray()  # what the launcher has not taken yet
        os.write(1, framed({"edition": edition()}))

    def requests(self) -> list[Request]:
        """The requests that have arrived by now; waits for one before the job. Raises EOFError if the launcher is gone."""
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:  # sshd may give one socket for both directions
            return []
        if not data:
            raise EOFError
        self.pending += data
        if b"\n" not in data:  # a function of `ringtrain.run` may be large
            return []
        *lines, self.pending = self.pending.split(b"\n")
        return [json.loads(line) for line in lines]

    def tell(self, facts: Answer | RankNews, data: bytes | None = None) -> None:
        """Sends facts, and bytes after them, as far as the launcher takes them now."""
        if self.is_gone:
            return
        sized = facts if data is None else {**facts, "bytes": len(data)}
        self.unsent += framed(sized) + (data or b"")
        self.flush()

    def flush(self) -> None:
        """Sends what there is, as far as the launcher takes it now. Raises LauncherGoneError, unless it is outlived."""
        try:
            while self.unsent:
                del self.unsent[: os.write(1, self.unsent[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError as error:
            if not self.is_outlived:
                raise LauncherGoneError(str(error)) from error
            self.lose()

    def lose(self) -> None:
        """It is gone, and with it what was meant for it."""
        self.is_gone = True
        self.pending.clear()
        self.unsent.clear()

    def replace(self, descriptors: list[int]) -> None:
        """Another launcher's stdin, stdout and stderr take the place of its own."""
        self.lose()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.set_blocking(1, False)
        self.is_gone = False

    def finish(self) -> None:
        """Sends the rest, as long as the launcher takes something. Raises LauncherGoneError if it is gone, or takes nothing."""
        waiting = select.poll()
        waiting.register(1, select.POLLOUT)
        while self.unsent:
            if not waiting.poll(SECONDS_TO_FINISH * 1000):
                raise LauncherGoneError("it takes nothing")
            self.flush()


def edition(launch: str = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) -> str:
    """Which launcher's agent is in this folder `launch`: the version, and a checksum of the files that speak with the launcher."""
    folder, checksum = os.path.join(launch, "agent"), 0
    files = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".py")]
    for path in (*files, os.path.join(launch, "rank.py")):
        with open(path, "rb") as file:
            checksum = zlib.crc32(file.read(), checksum)
    return f"{__version__} ({checksum:08x})"


def framed(facts: object) -> bytes:
    """A line for the launcher."""
    return MARK + json.dumps(facts).encode() + b"\n"


def has_hung_up() -> bool:
    """Whether the launcher has closed its end."""
    watched = select.poll()
    watched.register(0, select.POLLRDHUP)  # and POLLHUP, which is always told
    return watched.poll(0) != []
