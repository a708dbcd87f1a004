"""Runs one rank: the engine starts this file on every rank, with the rank's command behind `--`.

    python -I -S rank.py SOCKET RANK,SIZE,LOCAL_RANK,LOCAL_SIZE -- command ...       (names of the engine's variables)

It connects to the launcher's agent on its host (see `agent`), which sends the environment, the working directory and
the pipes for the rank's output. It runs the command as its child and tells how the child ended. When the agent closes
the socket, or is gone, or the engine that started this process is gone, the child is ended.
Run by its path and with the standard library only, so that it costs a rank a few milliseconds and imports no MPI.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import signal
import socket
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import; and the package is not imported here
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import FrameType
    from typing import NoReturn

    from ringtrain.agent_protocol import RankNews, Welcome

FORWARDED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
PLACE = ("RINGTRAIN_RANK", "RINGTRAIN_SIZE", "RINGTRAIN_LOCAL_RANK", "RINGTRAIN_LOCAL_SIZE")
# The same under torchrun's names, for scripts that were written for it.
PLACE_FOR_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# And under Horovod's, in jobs of horovodrun, which sets this variable.
OF_HOROVODRUN = "HOROVOD_CONTROLLER"
PLACE_FOR_HOROVOD = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
NOTICES = "RINGTRAIN_ELASTIC_NOTICE"  # see ringtrain.leading
SECONDS_TO_END = 3.0  # from a request to end until the child is killed
SECONDS_BETWEEN_KILLS = 0.05
SECONDS_TO_TIDY = 2.0  # for those that remove what a killed process has shared
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Once all who share are gone, these remove the shared memory and the semaphores that these have left in /dev/shm.
TIDIERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
LISTENER = re.compile(
    "/.*/pymp-[^/]+/listener-[^/]+"
)  # a socket of Python's multiprocessing, in a folder of its process


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code, 128 + n if signal n ended it."""
    name, names, command = arguments[0], arguments[1].split(","), arguments[3:]
    try:
        agent = Agent(name, os.environ.get(names[0]))
        environment = {**os.environ, **agent.environment, "RINGTRAIN_LAUNCHER": name}
        environment.pop("RINGTRAIN_RANK_PROCESS", None)  # of a rank that has started this job
        os.chdir(agent.directory)
    except OSError as error:
        return refuse(f"the launcher's agent on {socket.gethostname()} cannot be reached: {error}")
    missing = [name for name in names if name not in environment]
    if missing:
        return refuse(f"the MPI library's engine must set {missing[0]} for each rank, but did not.")
    place = [environment[name] for name in names]
    environment.update(zip(PLACE, place, strict=True))
    environment = {**dict(zip(PLACE_FOR_TORCH, place, strict=True)), **environment}
    if OF_HOROVODRUN in environment:
        environment.update(zip(PLACE_FOR_HOROVOD, place, strict=True))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    threads = threads_per_rank(int(environment["RINGTRAIN_LOCAL_SIZE"]))
    if "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = str(threads)
        agent.tell({"omp_num_threads": threads})
    child = Child(command, environment, agent.streams, agent.ignored)
    agent.tell({"group": child.pid})
    status = child.wait(agent)
    agent.tell(
        {
            "ended": status,
            "at": time.monotonic(),
            "was_told_to": child.kill_at is not None,
            "engine_lost_at": child.engine_lost_at(),
        }
    )
    for process, name in child.clear().items():
        agent.tell({"remains": process, "name": name})
    return status if status >= 0 else 128 - status


def refuse(why: str) -> int:
    """Says why the command is not run; returns the exit code."""
    print(f"ringtrainrun: {why}", file=sys.stderr)
    return 125


def threads_per_rank(local_size: int) -> int:
    """Cores of this machine, or of this container, for each of its ranks; at least one."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as limit:
            quota, period = limit.read().split()
        cores = min(cores, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max": no limit
        pass
    return max(1, cores // local_size)


class Agent:
    """The launcher's agent on this host.

    Attributes:
        environment: what the launcher wants in the command's environment.
        ignored: numbers of the signals that the command starts with ignored.
        directory: where the command runs.
        streams: descriptors for its stdout and stderr.
    """

    def __init__(self, name: str, rank: str | None):
        self.rank = int(rank or 0)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect("\0" + name)
        credentials = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            raise PermissionError("its socket belongs to another user")
        self.tell({"starts": True, "host": socket.gethostname()})
        length, self.streams, _, _ = socket.recv_fds(self.socket, 4, 2, socket.MSG_CMSG_CLOEXEC)
        if len(length) < 4:
            raise ConnectionResetError("it has just ended the job")
        with self.socket.makefile("rb") as reader:
            welcome: Welcome = json.loads(reader.read(struct.unpack("I", length)[0]))
        self.environment, self.directory = welcome["environment"], welcome["directory"]
        self.ignored = welcome["ignored"]

    def tell(self, facts: RankNews) -> None:
        """Sends facts about this rank."""
        try:
            self.socket.sendall(json.dumps({**facts, "rank": self.rank}).encode() + b"\n")
        except OSError:  # the agent is gone: nobody is left to tell
            pass

    def has_closed(self) -> bool:
        """Whether the agent is gone, or wants the rank to end. Called when the socket is readable."""
        try:
            return self.socket.recv(4096) == b""
        except OSError:
            return True


class Child:
    """The rank's command, in a session of its own. What it started ends with it, and becomes this process's if its parent ends."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], streams: Sequence[int], ignored: Sequence[int]
    ):
        self.kill_at: float | None = None
        self.listeners: set[str] = set()  # of processes that are to be killed, and will remove nothing
        # Signals that ask a rank of an elastic job to leave between two steps; the one that has come and is not told of.
        self.notices = [signal.Signals[name] for name in environment.get(NOTICES, "").split(",") if name]
        self.untold = self.noticed = 0
        self.engine = pidfd_of(os.getppid())
        # When the engine was found to have ended, if nobody had asked for the command's end by then.
        self.lost_at: float | None = None
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.pid = os.fork()
        if self.pid == 0:
            become(command, environment, streams, ignored, prctl)
        for descriptor in streams:
            os.close(descriptor)
        self.wakeup, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        for number in (*FORWARDED, *self.notices, signal.SIGCHLD):
            signal.signal(number, self._on_signal)

    def wait(self, agent: Agent) -> int:
        """Waits for the command's end; returns its exit code, -n for signal n. Ends it if agent or engine are gone."""
        sources, engine = select.poll(), self.engine
        for source in filter(None, (self.wakeup, agent.socket.fileno(), engine)):
            sources.register(source, select.POLLIN)
        while True:
            status = self._reap()
            if status is not None:
                return os.waitstatus_to_exitcode(status)
            left = None if self.kill_at is None else max(0, self.kill_at - time.monotonic()) * 1000
            ready = [descriptor for descriptor, _ in sources.poll(left)]
            if self.wakeup in ready:
                os.read(self.wakeup, 4096)
            if self.untold:
                agent.tell({"noticed": self.untold})
                self.untold = 0
            if engine in ready and self.kill_at is None:
                self.lost_at = time.monotonic()
            if engine in ready or (agent.socket.fileno() in ready and agent.has_closed()):
                sources.unregister(engine if engine in ready else agent.socket)
                self.end()
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self._kill_all(spare=TIDIERS)
                time.sleep(
                    SECONDS_BETWEEN_KILLS
                )  # a large process takes a while to end, one that waits in the kernel for ever

    def engine_lost_at(self) -> float | None:
        """When the engine was gone, if that was before the command ended and before anybody had asked for its end; else None."""
        if self.kill_at is None and self.engine is not None and select.select([self.engine], [], [], 0)[0]:
            return time.monotonic()
        return self.lost_at

    def clear(self) -> dict[int, str]:
        """Kills what the command has left behind, wherever it hides, and removes the sockets of these processes.

        Returns the names of those that have not ended, by their ids.
        """
        left: dict[int, str] = {}
        tidy_until = time.monotonic() + SECONDS_TO_TIDY
        while self._has_children():
            now = time.monotonic()
            self._kill_all(spare=TIDIERS if now < tidy_until else ())
            if now > tidy_until + 1:  # what does not end now waits in the kernel
                left = {process: name_of(process) for process in descendants_of(os.getpid())}
                break
            time.sleep(0.01)
        remove_listeners(self.listeners)
        return left

    def _kill_all(self, spare: Sequence[bytes]) -> None:
        self.listeners |= listeners_of(descendants_of(os.getpid()))
        kill_descendants(spare)

    def _reap(self) -> int | None:
        """Takes children that have ended; returns the command's status, None while it runs."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in (0, self.pid):
                return status if pid else None

    def _has_children(self) -> bool:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            return True
        except ChildProcessError:
            return False

    def end(self) -> None:
        """Asks the command to end, and sets the time at which it is killed."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)  # a stopped process handles no other signal
        self.kill_at = self.kill_at or time.monotonic() + SECONDS_TO_END

    def send(self, number: int) -> None:
        """Sends a signal to the command's whole process group."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # nothing is left of it, or it has changed its user
            pass

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number in self.notices and not self.noticed and self.kill_at is None:
            self.noticed = self.untold = number
        elif number == signal.SIGTERM:
            self.end()
        elif number in self.notices:  # it has been told
            pass
        elif number != signal.SIGCHLD:  # which only has to wake wait()
            self.send(number)


def pidfd_of(process: int) -> int | None:
    """A descriptor that is readable once the process has ended; None where the kernel has no such thing."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return None


def kill_descendants(spare: Sequence[bytes] = ()) -> None:
    """Kills every process that descends from this one, but those whose command line has one of these words."""
    for process in descendants_of(os.getpid()):
        try:
            line = b""
            if not is_waiting(process):  # else it may make wait whoever reads of its memory
                with open(f"/proc/{process}/cmdline", "rb") as file:
                    line = file.read()
            if not any(word in line for word in spare):
                os.kill(process, signal.SIGKILL)
        except OSError:  # it has ended, or has changed its user
            pass


def descendants_of(ancestor: int) -> list[int]:
    """Ids of the processes that descend from a process; ended ones not."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # id (name) state parent ...
                state, parent = file.read().rpartition(b")")[2].split(None, 2)[:2]
        except OSError:
            continue
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(name))
    found = [ancestor]
    for process in found:  # which grows
        found += children.get(process, ())
    return found[1:]


def is_waiting(process: int) -> bool:
    """Whether a process waits in the kernel, where no signal reaches it."""
    return status_of(process).rpartition(b")")[2].split(None, 1)[0] == b"D"


def name_of(process: int) -> str:
    """The name of a process's program; "?" if it has ended."""
    try:
        return status_of(process).partition(b"(")[2].rpartition(b")")[0].decode(errors="replace")
    except OSError:
        return "?"


def status_of(process: int) -> bytes:
    """Id, name in brackets, state and so on."""
    with open(f"/proc/{process}/stat", "rb") as file:
        return file.read()


def listeners_of(processes: Iterable[int]) -> set[str]:
    """Paths of the sockets on which multiprocessing listens in these processes."""
    held, found = set(), set()
    for process in processes:
        held |= open_in(process)
    try:
        with open("/proc/self/net/unix", encoding="utf-8", errors="surrogateescape") as table:
            for line in table:  # number users protocol flags type state inode path
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


def become(
    command: Sequence[str],
    environment: Mapping[str, str],
    streams: Iterable[int],
    ignored: Sequence[int],
    prctl: Callable[[int, int], int],
) -> NoReturn:
    """In the forked child: turns into the command. Does not return."""
    try:
        os.setsid()
        start_with_signals(ignored)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, descriptor in enumerate((null, *streams)):
            os.dup2(descriptor, target)
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        os.write(2, f"ringtrainrun: cannot run '{command[0]}': {error.strerror}.\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def start_with_signals(ignored: Sequence[int]) -> None:
    """Ignores these signals and no others, and blocks none: Python ignores SIGPIPE itself, and an engine may ignore more."""
    for number in signal.valid_signals():
        is_ignored = signal.getsignal(number) is signal.SIG_IGN
        if is_ignored != (number in ignored):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
