"""Processes of a host, as /proc shows them: whose they are, how they are killed, and waiting for their end."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import struct
import time

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

SECONDS_TO_TIDY = 2.0  # from the death of processes until those that remove what they have shared are killed too
SECONDS_TO_DIE = 1.0  # of a killed process; after them it waits in the kernel for something that does not come
TIDIERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")  # see `rank`


class JobMark:
    """What stands in the environment of a job's processes: its launcher's name, and the Slurm job that it is part of, or b""."""

    def __init__(self, launcher: bytes, slurm_job: bytes):
        self.launcher = launcher
        self.slurm_job = b"SLURM_JOB_ID=" + slurm_job if slurm_job else None

    def is_in(self, variables: Sequence[bytes]) -> bool:
        """Whether these are the variables of one of them."""
        slurm_job = next((each for each in variables if each.startswith(b"SLURM_JOB_ID=")), None)
        return self.launcher in variables and slurm_job == self.slurm_job


def kill_all(groups: Container[int], mark: JobMark | None) -> dict[int, tuple[str, int]]:
    """Kills what is left of ranks: what is in their sessions, or has the job's mark in its environment.

    Those that remove what the killed have shared have a moment for it. Returns (name, session) of what could not be
    killed by its id.
    """
    start = time.monotonic()
    while left := processes_of(groups, mark):
        waited = time.monotonic() - start
        if waited > SECONDS_TO_TIDY + SECONDS_TO_DIE:
            break
        kill_once(left, spare=TIDIERS if waited < SECONDS_TO_TIDY else ())
        time.sleep(0.01)
    return left


def kill_once(processes: Iterable[int], spare: Sequence[bytes]) -> None:
    """Kills processes, but those whose command line has one of these words."""
    for process in processes:
        try:
            if not any(word in command_line_of(process) for word in spare):
                os.kill(process, signal.SIGKILL)
        except OSError:  # it has ended, or has changed its user
            pass


def kill_group(group: int) -> None:
    """Kills a process group, if there is something left of it."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def processes_of(groups: Container[int], mark: JobMark | None) -> dict[int, tuple[str, int]]:
    """(name, session) by process id of the living processes in these process groups or sessions, or with a mark in their environment."""
    found: dict[int, tuple[str, int]] = {}
    for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            with open(f"/proc/{process}/stat", "rb") as file:  # id (name) state parent group session ...
                name, _, others = file.read().partition(b"(")[2].rpartition(b")")
            state, _, group, session = others.split(None, 4)[:4]
            if state in (b"Z", b"X") or process == os.getpid():
                continue
            is_ours = int(session) in groups or int(group) in groups
            # Who waits in the kernel may make wait whoever reads its environment.
            if is_ours or (mark and state != b"D" and mark.is_in(read_file(f"/proc/{process}/environ").split(b"\0"))):
                found[process] = name.decode(errors="replace"), int(session)
        except OSError:  # it has ended, or is another user's
            pass
    return found


def is_stopped(processes: Iterable[int]) -> bool:
    """Whether one of these was stopped by a signal and none of them runs; a debugger's are not meant."""
    states = set()
    for process in processes:
        try:
            states.add(read_file(f"/proc/{process}/stat").rpartition(b")")[2].split(None, 1)[0])
        except OSError:  # it has ended
            pass
    return b"T" in states and b"R" not in states


def name_and_parent_of(process: int) -> tuple[str, int]:
    """The name of a process's program and the id of its parent process."""
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:  # id (name) state parent ...
        name, _, others = file.read().partition("(")[2].rpartition(")")
    return name, int(others.split()[1])


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", credentials)
    return process, user


def command_line_of(process: int) -> bytes:
    """The command line of a process; empty if it waits in the kernel."""
    return b"" if is_waiting(process) else read_file(f"/proc/{process}/cmdline")


def is_waiting(process: int) -> bool:
    """Whether a process waits in the kernel, where it may make wait whoever reads of its memory."""
    return read_file(f"/proc/{process}/stat").rpartition(b")")[2].split(None, 1)[0] == b"D"


def await_ends(descriptors: Iterable[int], seconds: float) -> None:
    """Waits until the processes of these descriptors have ended, at most so many seconds."""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(deadline - time.monotonic()):
                selector.unregister(key.fd)


def read_file(path: str) -> bytes:
    """All bytes of a file."""
    with open(path, "rb") as file:
        return file.read()


def close_quietly(descriptor: int) -> None:
    """Closes a descriptor that may be closed already."""
    try:
        os.close(descriptor)
    except OSError:
        pass
