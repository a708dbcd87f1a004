"""Processes of a host, as /proc shows them: whose they are, how they are killed, and what is left of them at the end of a job."""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import stat
import struct
import time

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

SECONDS_TO_TIDY = 2.0  # from the death of processes until those that remove what they have shared are killed too
SECONDS_OF_A_MOMENT = 0.02  # in the kernel, of a process that has a page read, say
SECONDS_TO_DIE = 1.0  # of a killed process; after them it waits in the kernel for something that does not come
SECONDS_BETWEEN_LOOKS = 1.0  # at groups that nobody waits for
# Once all who share are gone, these remove the shared memory and the semaphores that these have left in /dev/shm.
TIDIERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
# A socket of Python's multiprocessing, in a folder of its process.
LISTENER = re.compile("/.*/pymp-[^/]+/listener-[^/]+")


class JobMark:
    """What stands in the environment of a job's processes: its launcher's name, and the Slurm job that it is part of, or b""."""

    def __init__(self, launcher: bytes, slurm_job: bytes):
        self.launcher = launcher
        self.slurm_job = b"SLURM_JOB_ID=" + slurm_job if slurm_job else None

    def is_in(self, variables: Sequence[bytes]) -> bool:
        """Whether these are the variables of one of them."""
        slurm_job = next((each for each in variables if each.startswith(b"SLURM_JOB_ID=")), None)
        return self.launcher in variables and slurm_job == self.slurm_job


def kill_all(
    groups: Container[int], mark: JobMark | None, with_descendants: bool = False, apart_from: Container[int] = ()
) -> dict[int, tuple[str, int]]:
    """Kills what is left of ranks: what is in their sessions, or has the job's mark in its environment; or descends from this
    process, which has started them.

    Those that remove what the killed have shared have a moment for it. Returns (name, session) of what could not be
    killed by its id. apart_from: of whom it is known that no signal ends them.
    """
    start = time.monotonic()
    while left := {
        process: each
        for process, each in processes_of(groups, mark, with_descendants).items()
        if process not in apart_from
    }:
        waited = time.monotonic() - start
        if waited > SECONDS_TO_TIDY + SECONDS_TO_DIE:
            break
        kill_once(left, spare=TIDIERS if waited < SECONDS_TO_TIDY else ())
        time.sleep(0.01)
    return left


def kill_once(processes: Iterable[int], spare: Sequence[bytes]) -> None:
    """Kills processes, but those whose command line has one of these words."""
    unknown = [process for process in processes if not _kill(process, spare)]
    if unknown:  # since they wait in the kernel, which each process does for moments, those to be spared too
        time.sleep(SECONDS_OF_A_MOMENT)
        for process in unknown:
            _kill(process, spare, though_unknown=True)


def _kill(process: int, spare: Sequence[bytes], though_unknown: bool = False) -> bool:
    """Kills a process unless it is spared; returns False, and leaves it, if its command line cannot be read now."""
    try:
        line = command_line_of(process) if spare else b""
        if spare and not line and not though_unknown:
            return False
        if not any(word in line for word in spare):
            os.kill(process, signal.SIGKILL)
    except OSError:  # it has ended, or has changed its user
        pass
    return True


def kill_group(group: int) -> None:
    """Kills a process group, if there is something left of it."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def processes_of(
    groups: Container[int], mark: JobMark | None, with_descendants: bool = False
) -> dict[int, tuple[str, int]]:
    """(name, session) by process id of the living processes in these process groups or sessions, or with a mark in their
    environment; or that descend from this process."""
    found: dict[int, tuple[str, int]] = {}
    own = set(descendants_of(os.getpid())) if with_descendants else set()
    for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            status = Status(process)
            if status.state in (b"Z", b"X") or process == os.getpid():
                continue
            is_ours = process in own or status.session in groups or status.group in groups
            # Who waits in the kernel may make wait whoever reads its environment.
            if is_ours or (mark and status.state != b"D" and mark.is_in(variables_of(process))):
                found[process] = status.name, status.session
        except OSError:  # it has ended, or is another user's
            pass
    return found


def descendants_of(*ancestors: int) -> list[int]:
    """Ids of the processes that descend from these, and that have not ended."""
    children: dict[int, list[int]] = {}
    for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            status = Status(process)
        except OSError:
            continue
        if status.state not in (b"Z", b"X"):
            children.setdefault(status.parent, []).append(process)
    found = list(ancestors)
    for process in found:  # which grows
        found += children.get(process, ())
    return found[len(ancestors) :]


def children_of_this() -> list[int]:
    """Ids of this process's children; one may be missing where another ends in the same moment."""
    try:
        return list(map(int, read_file(f"/proc/self/task/{os.getpid()}/children").split()))
    except OSError:  # a kernel without this file
        this = os.getpid()
        return [process for process in descendants_of(this) if parent_of(process) == this]


def parent_of(process: int) -> int:
    """The id of a process's parent; 0 if it has ended."""
    try:
        return Status(process).parent
    except OSError:
        return 0


def end_all_below() -> dict[int, str]:
    """Kills whatever descends from this process, a subreaper, and removes the sockets of these processes.

    Returns the names of those that have not ended, by their ids.
    """
    listeners: set[str] = set()
    left: dict[int, str] = {}
    tidy_until = time.monotonic() + SECONDS_TO_TIDY
    while _has_children():
        now = time.monotonic()
        below = descendants_of(os.getpid())
        listeners |= listeners_of(below)
        kill_once(below, spare=TIDIERS if now < tidy_until else ())
        if now > tidy_until + SECONDS_TO_DIE:  # what does not end now waits in the kernel
            left = {process: name_of(process) for process in descendants_of(os.getpid())}
            break
        time.sleep(0.01)
    remove_listeners(listeners)
    return left


def _has_children() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    except ChildProcessError:
        return False


def is_stopped(processes: Iterable[int]) -> bool:
    """Whether one of these was stopped by a signal and none of them runs; a debugger's are not meant."""
    states = set()
    for process in processes:
        try:
            states.add(Status(process).state)
        except OSError:  # it has ended
            pass
    return b"T" in states and b"R" not in states


class Status:
    """Of a process, as /proc has it. Raises OSError if there is none."""

    def __init__(self, process: int):
        # id (name) state parent group session ...
        name, _, others = read_file(f"/proc/{process}/stat").partition(b"(")[2].rpartition(b")")
        self.state, *numbers = others.split(None, 4)[:4]
        self.name = name.decode(errors="replace")
        self.parent, self.group, self.session = map(int, numbers)


def name_of(process: int) -> str:
    """The name of a process's program; "?" if it has ended."""
    try:
        return Status(process).name
    except OSError:
        return "?"


def variables_of(process: int) -> list[bytes]:
    """The variables that a process was started with."""
    return read_file(f"/proc/{process}/environ").split(b"\0")


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
    return Status(process).state == b"D"


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


def close_all_but(kept: Iterable[int]) -> None:
    """Closes the descriptors of this process but the standard ones and these.

    It asks which there are: a container may allow a thousand million of them.
    """
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
        try:
            os.close(descriptor)
        except OSError:  # that by which the folder was read
            pass


def listeners_of(processes: Iterable[int]) -> set[str]:
    """Paths of the sockets on which multiprocessing listens in these processes."""
    held, found = set(), set()
    for process in processes:
        held |= open_in(process)
    try:
        with open("/proc/self/net/unix", encoding="utf-8", errors="surrogateescape") as table:
            for line in table if held else ():  # number users protocol flags type state inode path
                columns = line.rstrip("\n").split(None, 7)
                if len(columns) == 8 and f"socket:[{columns[6]}]" in held and LISTENER.fullmatch(columns[7]):
                    found.add(columns[7])
    except OSError:
        pass
    return found


def open_in(process: int) -> set[str]:
    """What the descriptors of a process stand for; nothing if it has ended, or has changed its user."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{process}/fd"):
            try:
                found.add(os.readlink(f"/proc/{process}/fd/{name}"))
            except OSError:  # it is closed by now
                continue
    except OSError:
        pass
    return found


def remove_listeners(paths: Iterable[str]) -> None:
    """Removes sockets whose processes were killed, and the folders that are empty then; nothing else."""
    for path in paths:
        try:
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)
            os.rmdir(os.path.dirname(path))
        except OSError:  # it is gone, or there is more in the folder
            pass


class LeftGroups:
    """The groups of ranks whose supervisor is gone while their command had not ended.

    Attributes:
        numbers: of the ranks, by the process group of the command, which is its session's too.
        look_at: when `look` is to be called.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.look_at = float("inf")

    def add(self, group: int, number: int) -> None:
        """Kills a group, and remembers it."""
        self.numbers[group] = number
        kill_once(processes_of({group}, None), spare=TIDIERS)
        self.look_at = time.monotonic() + SECONDS_BETWEEN_LOOKS

    def look(self) -> None:
        """Forgets groups in which nobody is left: their number may be that of a stranger by the end of the job."""
        for group in [group for group in self.numbers if not processes_of({group}, None)]:
            del self.numbers[group]
        self.look_at = time.monotonic() + SECONDS_BETWEEN_LOOKS if self.numbers else float("inf")
