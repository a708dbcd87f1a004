"""Shared memory that the ranks' MPI makes in /dev/shm: found in what a process has mapped, and removed after the job."""

from __future__ import annotations

import ctypes
import os
import re
import sys

from ringtrain.launch.agent.processes import is_waiting, read_file

# What MPI libraries share, and what they are built on; a rank may share other memory, which is its own.
MPI_FILE = rb"/dev/shm/(?:mpich_shm_|Intel_MPI_|sm_segment\.|vader_segment\.|ucx_shm_posix_|psm[23]_shm\.)\S+"
MPI_NAME = re.compile(MPI_FILE.removeprefix(b"/dev/shm/"))
MPI_SEGMENT = re.compile(rb"(\d+) +(" + MPI_FILE + rb")$", re.MULTILINE)  # in /proc/PID/maps


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


def segments_of(process: int) -> set[tuple[str, int]]:
    """(path, inode) of an MPI's shared memory that a process has mapped; none if it has ended or waits in the kernel."""
    try:
        maps = b"" if is_waiting(process) else read_file(f"/proc/{process}/maps")
    except OSError:
        return set()
    return {(path.decode(), int(inode)) for inode, path in MPI_SEGMENT.findall(maps)}


def remove_file(path: str, inode: int) -> None:
    """Removes a file that this user has left, unless its name is another one's by now."""
    try:
        found = os.stat(path, follow_symlinks=False)
        if (found.st_ino, found.st_uid) == (inode, os.getuid()):
            os.unlink(path)
    except OSError:  # it was not left
        pass
