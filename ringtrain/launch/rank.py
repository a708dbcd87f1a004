"""Runs one rank of a job over MPI: the engine starts this file on every rank, with the rank's command behind `--`.

    python -I -S rank.py SOCKET RANK,SIZE,LOCAL_RANK,LOCAL_SIZE -- command ...       (names of the engine's variables)

It connects to the launcher's agent on its host (see `agent`), which sends the environment, the working directory and
the pipes for the rank's output. It runs the command as its child and tells how the child ended. When the agent closes
the socket, or is gone, or the engine that started this process is gone, the child is ended.
Run by its path and with the standard library and the agent's modules only, so that it costs a rank a few milliseconds
and imports no MPI. In a job without MPI the agent does all this itself (see `agent.children`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import time

if __name__ == "__main__":  # run by its path: the package is found from this file, behind all modules of Python's own
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from ringtrain.launch.agent import rank_command as commands
from ringtrain.launch.agent.processes import (
    TIDIERS,
    descendants_of,
    end_all_below,
    kill_once,
    listeners_of,
    remove_listeners,
)

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

    from ringtrain._rendezvous.agent_protocol import RankNews, Welcome

FORWARDED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
SECONDS_BETWEEN_KILLS = 0.05


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code, 128 + n if signal n ended it."""
    name, names, command = arguments[0], arguments[1].split(","), arguments[3:]
    try:
        agent = LocalAgent(name, os.environ.get(names[0]))
    except OSError as error:
        return refuse(f"the launcher's agent on {socket.gethostname()} cannot be reached: {error}")
    given = {**os.environ, **agent.environment}
    missing = [name for name in names if name not in given]
    if missing:
        return refuse(f"the MPI library's engine must set {missing[0]} for each rank, but did not.")
    environment, threads = commands.environment_of(given, [given[name] for name in names], name)
    if threads is not None:
        agent.tell({"omp_num_threads": threads})
    child = CommandSession(command, environment, agent)
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
    left = end_all_below()
    remove_listeners(child.listeners)
    for process, name in left.items():
        agent.tell({"remains": process, "name": name})
    return status if status >= 0 else 128 - status


def refuse(why: str) -> int:
    """Says why the command is not run; returns the exit code."""
    print(f"ringtrainrun: {why}", file=sys.stderr)
    return 125


class LocalAgent:
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


class CommandSession:
    """The rank's command, in a session of its own. What it started ends with it, and becomes this process's if its parent ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], agent: LocalAgent):
        self.kill_at: float | None = None
        self.listeners: set[str] = set()  # of processes that are to be killed, and will remove nothing
        self.engine = pidfd_of(os.getppid())
        # When the engine was found to have ended, if nobody had asked for the command's end by then.
        self.lost_at: float | None = None
        commands.prctl(commands.PR_SET_CHILD_SUBREAPER, 1)
        self.pid = commands.start(command, environment, agent.directory, agent.streams, agent.ignored)
        for descriptor in agent.streams:
            os.close(descriptor)
        self.wakeup, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        for number in (*FORWARDED, signal.SIGCHLD):
            signal.signal(number, self._on_signal)

    def wait(self, agent: LocalAgent) -> int:
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
            if engine in ready and self.kill_at is None:
                self.lost_at = time.monotonic()
            if engine in ready or (agent.socket.fileno() in ready and agent.has_closed()):
                sources.unregister(engine if engine in ready else agent.socket)
                self.end()
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self._kill_all()
                time.sleep(
                    SECONDS_BETWEEN_KILLS
                )  # a large process takes a while to end, one that waits in the kernel for ever

    def engine_lost_at(self) -> float | None:
        """When the engine was gone, if that was before the command ended and before anybody had asked for its end; else None."""
        if self.kill_at is None and self.engine is not None and select.select([self.engine], [], [], 0)[0]:
            return time.monotonic()
        return self.lost_at

    def _kill_all(self) -> None:
        below = descendants_of(os.getpid())
        self.listeners |= listeners_of(below)
        kill_once(below, spare=TIDIERS)

    def _reap(self) -> int | None:
        """Takes children that have ended; returns the command's status, None while it runs."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in (0, self.pid):
                return status if pid else None

    def end(self) -> None:
        """Asks the command to end, and sets the time at which it is killed."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)  # a stopped process handles no other signal
        self.kill_at = self.kill_at or time.monotonic() + commands.SECONDS_TO_END

    def send(self, number: int) -> None:
        """Sends a signal to the command's whole process group."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # nothing is left of it, or it has changed its user
            pass

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self.end()
        elif number != signal.SIGCHLD:  # which only has to wake wait()
            self.send(number)


def pidfd_of(process: int) -> int | None:
    """A descriptor that is readable once the process has ended; None where the kernel has no such thing."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
