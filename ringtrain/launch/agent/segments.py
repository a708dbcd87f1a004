"""Shared memory that ranks make in /dev/shm, which is removed after the job.

That of their MPI is found in what a process has mapped. That of ringtrain has a name only while a world forms, and a lock
as long as its creator lives.
"""

from __future__ import annotations

import ctypes
import os
import re
import selectors
import sys
import time

from ringtrain.launch.agent.processes import is_waiting, processes_of, read_file

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# What MPI libraries share, and what they are built on; a rank may share other memory, which is its own.
MPI_FILE = rb"/dev/shm/(?:mpich_shm_|Intel_MPI_|sm_segment\.|vader_segment\.|ucx_shm_posix_|psm[23]_shm\.)\S+"
MPI_NAME = re.compile(MPI_FILE.removeprefix(b"/dev/shm/"))
MPI_SEGMENT = re.compile(rb"(\d+) +(" + MPI_FILE + rb")$", re.MULTILINE)  # in /proc/PID/maps
OWN_NAME = re.compile(r"ringtrain-[0-9a-f]{16}")  # as host_memory.cc makes them
LOOKS, SECONDS_BETWEEN_LOOKS = 5, 0.05  # for whoever has just made shared memory, and is about to map it
IN_CREATE = 0x100
EVENT_HEAD = 16  # bytes of struct inotify_event before its name, whose length is the last of them


class SegmentWatch:
    """Tells when somebody makes shared memory of an MPI, of which only those are known to this host who still map it.

    A rank that is killed within MPI_Init tells nobody of its own, and whoever has ended maps nothing.
    """

    def __init__(self) -> None:
        """Raises OSError where the kernel has no inotify left to give; then there is nothing to watch with."""
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0 or libc.inotify_add_watch(self.descriptor, b"/dev/shm", IN_CREATE) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def fileno(self) -> int:
        return self.descriptor

    def has_seen_one(self) -> bool:
        """Whether an MPI has made shared memory since the last call."""
        try:
            events = os.read(self.descriptor, 65536)
        except BlockingIOError:
            return False
        names = []
        while events:
            end = EVENT_HEAD + int.from_bytes(events[EVENT_HEAD - 4 : EVENT_HEAD], sys.byteorder)
            names.append(events[EVENT_HEAD:end].rstrip(b"\0"))
            events = events[end:]
        return any(map(MPI_NAME.fullmatch, names))


class Segments:
    """The shared memory that the MPI of the ranks of this host has made, which is removed after the job.

    groups: tells the process groups of the ranks that live.

    Attributes:
        look_at: when `look_again` is to be called.
    """

    def __init__(self, selector: selectors.BaseSelector, groups: Callable[[], set[int]]):
        self.look_at = float("inf")
        self._looks = 0  # still to be taken
        self._groups = groups
        self._known: set[tuple[str, int]] = set()  # (path, inode)
        try:
            self._watch = SegmentWatch()
            selector.register(self._watch, selectors.EVENT_READ, self._note_creation)
        except OSError:  # then a rank that is killed within MPI_Init may leave what it shares
            pass

    def note(self, told: Iterable[tuple[str, int]]) -> None:
        """Takes what a rank tells of its own."""
        self._known.update((path, inode) for path, inode in told if re.fullmatch(MPI_FILE, os.fsencode(path)))

    def look(self) -> None:
        """Notes what the ranks' MPI shares: those that end within MPI_Init do not come to tell of it themselves."""
        groups = self._groups()
        for process in processes_of(groups, None) if groups else ():
            self._known |= segments_of(process)

    def look_unless_known(self) -> None:
        """A rank has failed, and the engine ends the others now."""
        if not self._known:
            self.look()

    def look_again(self) -> None:
        """Until those are known who have just made shared memory, or it is clear that they are not of this job."""
        known = len(self._known)
        self.look()
        self._looks = 0 if len(self._known) > known else self._looks - 1
        self.look_at = time.monotonic() + SECONDS_BETWEEN_LOOKS if self._looks else float("inf")

    def remove(self) -> None:
        """Removes all that is left of it, and what ranks have left that were killed while their world formed."""
        for path, inode in self._known:
            remove_file(path, inode)
        try:
            names = os.listdir("/dev/shm")
        except OSError:
            return
        for name in filter(OWN_NAME.fullmatch, names):
            remove_unless_locked(f"/dev/shm/{name}")

    def _note_creation(self) -> None:
        if self._watch.has_seen_one():
            self._looks, self.look_at = LOOKS, 0.0


def segments_of(process: int) -> set[tuple[str, int]]:
    """(path, inode) of an MPI's shared memory that a process has mapped; none if it has ended or waits in the kernel."""
    try:
        maps = b"" if is_waiting(process) else read_file(f"/proc/{process}/maps")
    except OSError:
        return set()
    return {(path.decode(), int(inode)) for inode, path in MPI_SEGMENT.findall(maps)}


def remove_unless_locked(path: str) -> None:
    """Removes a file of ringtrain's whose creator is gone; one without a size has no lock yet."""
    import fcntl

    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_size:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_file(path, found.st_ino)
    except OSError:  # it has a creator, or no name any more, or belongs to another user
        pass


def remove_file(path: str, inode: int) -> None:
    """Removes a file that this user has left, unless its name is another one's by now."""
    try:
        found = os.stat(path, follow_symlinks=False)
        if (found.st_ino, found.st_uid) == (inode, os.getuid()):
            os.unlink(path)
    except OSError:  # it was not left
        pass
