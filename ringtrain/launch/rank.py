"""Runs one rank: the engine starts this file on every rank, with the rank's command behind `--`.

    python -I -S rank.py RANK,SIZE,LOCAL_RANK,LOCAL_SIZE -- command ...        (names of the engine's variables)

It puts the rank's place into the environment, runs the command as its child, and tells the launcher how the child
ended. On the launcher's host the two speak over a Unix socket, on which the rank also gets the pipes for its output;
when the socket closes, the launcher is gone and the child is ended. On other hosts output goes through the engine.
Run by its path and with the standard library only, so that it costs a rank a few milliseconds and imports no MPI.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2,
             signal.SIGCONT)
PLACE = ("RINGTRAIN_RANK", "RINGTRAIN_SIZE", "RINGTRAIN_LOCAL_RANK", "RINGTRAIN_LOCAL_SIZE")
REPORT_MARK = "\x1eringtrain-rank "  # begins a report that has to travel through the engine's stderr
SECONDS_TO_END = 3.0  # from a request to end until the child is killed
PR_SET_PDEATHSIG = 1


def main(arguments):
    """Runs the command and returns its exit code, 128 + n if signal n ended it."""
    names, command = arguments[0].split(","), arguments[2:]
    missing = [name for name in names if name not in os.environ]
    if missing:
        print(f"ringtrainrun: the MPI library's engine must set {missing[0]} for each rank, but did not.",
              file=sys.stderr)
        return 125
    place = dict(zip(PLACE, (os.environ[name] for name in names)))
    launcher = Launcher(int(place["RINGTRAIN_RANK"]))
    environment = dict(os.environ, **place)
    environment.setdefault("PYTHONUNBUFFERED", "1")
    threads = threads_per_rank(int(place["RINGTRAIN_LOCAL_SIZE"]))
    chosen = "OMP_NUM_THREADS" not in environment
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    streams = launcher.announce(omp_num_threads=threads if chosen else None)
    child = Child(command, environment, streams)
    launcher.tell(group=child.pid)
    status = child.wait(launcher)
    launcher.tell(ended=status, at=time.monotonic(), was_told_to=child.kill_at is not None)
    return status if status >= 0 else 128 - status


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


class Launcher:
    """The way to the launcher: its socket if it is on this host, else the engine's stderr."""

    def __init__(self, rank):
        self.rank = rank
        self.socket = None
        path = os.environ.get("RINGTRAIN_LAUNCHER")
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(path or "")
            self.socket = connection
        except OSError:  # the launcher is on another host
            connection.close()

    def announce(self, omp_num_threads):
        """Says that this rank starts; returns descriptors for its stdout and stderr, () to keep the engine's."""
        self.tell(host=socket.gethostname(), omp_num_threads=omp_num_threads)
        if self.socket is None:
            return ()
        _, streams, _, _ = socket.recv_fds(self.socket, 1, 2, socket.MSG_CMSG_CLOEXEC)
        return streams

    def tell(self, **facts):
        """Sends facts about this rank. Through the engine only a failure is worth a line."""
        line = json.dumps(dict(facts, rank=self.rank)) + "\n"
        try:
            if self.socket is not None:
                self.socket.sendall(line.encode())
            elif facts.get("ended"):
                print(REPORT_MARK + json.dumps(dict(facts, rank=self.rank, host=socket.gethostname())),
                      file=sys.stderr, flush=True)
        except OSError:  # the launcher is gone: nobody is left to tell
            pass

    def has_closed(self):
        """Whether the launcher is gone, or wants the rank to end. Called when the socket is readable."""
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

    def wait(self, launcher):
        """Waits for the command's end; returns its exit code, -n for signal n. Ends it if the launcher closes."""
        sources = select.poll()
        sources.register(self.wakeup, select.POLLIN)
        if launcher.socket is not None:
            sources.register(launcher.socket, select.POLLIN)
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.send(signal.SIGKILL)  # what the command left behind in its group
                return os.waitstatus_to_exitcode(status)
            left = None if self.kill_at is None else max(0, self.kill_at - time.monotonic()) * 1000
            ready = [descriptor for descriptor, _ in sources.poll(left)]
            if self.wakeup in ready:
                os.read(self.wakeup, 4096)
            if launcher.socket is not None and launcher.socket.fileno() in ready and launcher.has_closed():
                sources.unregister(launcher.socket)
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
