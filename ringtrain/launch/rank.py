"""Runs one rank: the engine starts this file on every rank, with the rank's command behind `--`.

    python -I -S rank.py SOCKET RANK,SIZE,LOCAL_RANK,LOCAL_SIZE -- command ...       (names of the engine's variables)

It connects to the launcher's agent on its host (see `agent`), which sends the environment, the working directory and
the pipes for the rank's output. It runs the command as its child and tells how the child ended. When the agent closes
the socket, or is gone, or the engine that started this process is gone, the child is ended.
Run by its path and with the standard library only, so that it costs a rank a few milliseconds and imports no MPI.
"""

import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
import time

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2,
             signal.SIGCONT)
PLACE = ("RINGTRAIN_RANK", "RINGTRAIN_SIZE", "RINGTRAIN_LOCAL_RANK", "RINGTRAIN_LOCAL_SIZE")
SECONDS_TO_END = 3.0  # from a request to end until the child is killed
PR_SET_PDEATHSIG = 1


def main(arguments):
    """Runs the command and returns its exit code, 128 + n if signal n ended it."""
    name, names, command = arguments[0], arguments[1].split(","), arguments[3:]
    try:
        agent = Agent(name, os.environ.get(names[0]))
        environment = dict(os.environ, **agent.environment, RINGTRAIN_LAUNCHER=name)
        os.chdir(agent.directory)
    except OSError as error:
        return refuse(f"the launcher's agent on {socket.gethostname()} cannot be reached: {error}")
    missing = [name for name in names if name not in environment]
    if missing:
        return refuse(f"the MPI library's engine must set {missing[0]} for each rank, but did not.")
    environment.update(zip(PLACE, [environment[name] for name in names]))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    threads = threads_per_rank(int(environment["RINGTRAIN_LOCAL_SIZE"]))
    if "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = str(threads)
        agent.tell(omp_num_threads=threads)
    child = Child(command, environment, agent.streams)
    agent.tell(group=child.pid)
    status = child.wait(agent)
    agent.tell(ended=status, at=time.monotonic(), was_told_to=child.kill_at is not None)
    return status if status >= 0 else 128 - status


def refuse(why):
    """Says why the command is not run; returns the exit code."""
    print(f"ringtrainrun: {why}", file=sys.stderr)
    return 125


def threads_per_rank(local_size):
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
        directory: where the command runs.
        streams: descriptors for its stdout and stderr.
    """

    def __init__(self, name, rank):
        self.rank = int(rank or 0)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect("\0" + name)
        credentials = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            raise PermissionError("its socket belongs to another user")
        self.tell(starts=True, host=socket.gethostname())
        length, self.streams, _, _ = socket.recv_fds(self.socket, 4, 2, socket.MSG_CMSG_CLOEXEC)
        if len(length) < 4:
            raise ConnectionResetError("it has just ended the job")
        with self.socket.makefile("rb") as reader:
            welcome = json.loads(reader.read(struct.unpack("I", length)[0]))
        self.environment, self.directory = welcome["environment"], welcome["directory"]

    def tell(self, **facts):
        """Sends facts about this rank."""
        try:
            self.socket.sendall(json.dumps(dict(facts, rank=self.rank)).encode() + b"\n")
        except OSError:  # the agent is gone: nobody is left to tell
            pass

    def has_closed(self):
        """Whether the agent is gone, or wants the rank to end. Called when the socket is readable."""
        try:
            return self.socket.recv(4096) == b""
        except OSError:
            return True


class Child:
    """The rank's command, in a process group of its own, so that what it started ends with it."""

    def __init__(self, command, environment, streams):
        self.kill_at = None
        prctl = ctypes.CDLL(None).prctl
        self.pid = os.fork()
        if self.pid == 0:
            become(command, environment, streams, prctl)
        for descriptor in streams:
            os.close(descriptor)
        self.wakeup, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        for number in (*FORWARDED, signal.SIGCHLD):
            signal.signal(number, self._on_signal)

    def wait(self, agent):
        """Waits for the command's end; returns its exit code, -n for signal n. Ends it if agent or engine are gone."""
        sources = select.poll()
        engine = pidfd_of(os.getppid())
        for source in filter(None, (self.wakeup, agent.socket.fileno(), engine)):
            sources.register(source, select.POLLIN)
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.send(signal.SIGKILL)  # what the command left behind in its group
                return os.waitstatus_to_exitcode(status)
            left = None if self.kill_at is None else max(0, self.kill_at - time.monotonic()) * 1000
            ready = [descriptor for descriptor, _ in sources.poll(left)]
            if self.wakeup in ready:
                os.read(self.wakeup, 4096)
            if engine in ready or agent.socket.fileno() in ready and agent.has_closed():
                sources.unregister(engine if engine in ready else agent.socket)
                self.end()
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self.send(signal.SIGKILL)

    def end(self):
        """Asks the command to end, and sets the time at which it is killed."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)  # a stopped process handles no other signal
        self.kill_at = self.kill_at or time.monotonic() + SECONDS_TO_END

    def send(self, number):
        """Sends a signal to the command's whole process group."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # nothing is left of it, or it has changed its user
            pass

    def _on_signal(self, number, _frame):
        if number == signal.SIGTERM:
            self.end()
        elif number != signal.SIGCHLD:  # which only has to wake wait()
            self.send(number)


def pidfd_of(process):
    """A descriptor that is readable once the process has ended; None where the kernel has no such thing."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):
        return None


def become(command, environment, streams, prctl):
    """In the forked child: turns into the command. Does not return."""
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, descriptor in enumerate((null, *streams)):
            os.dup2(descriptor, target)
        os.execvpe(command[0], command, environment)
    except OSError as error:
        os.write(2, f"ringtrainrun: cannot run '{command[0]}': {error.strerror}.\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
