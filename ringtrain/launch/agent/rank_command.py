"""A rank's command: what its environment has, and how a forked process turns into it.

For the agent, which starts ranks where no MPI does, and for the process that an MPI's engine starts for each (`rank`).
"""

from __future__ import annotations

import ctypes
import os
import signal

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import NoReturn

PLACE = ("RINGTRAIN_RANK", "RINGTRAIN_SIZE", "RINGTRAIN_LOCAL_RANK", "RINGTRAIN_LOCAL_SIZE")
# The same under torchrun's names, for scripts that were written for it.
PLACE_FOR_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# And under Horovod's, in jobs of horovodrun, which sets this variable.
OF_HOROVODRUN = "HOROVOD_CONTROLLER"
PLACE_FOR_HOROVOD = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
LAUNCHER = "RINGTRAIN_LAUNCHER"  # the name of the job's sockets
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SECONDS_TO_END = 3.0  # from a request to end until a command is killed

prctl = ctypes.CDLL(None).prctl


def environment_of(given: Mapping[str, str], place: Sequence[str], launcher: str) -> tuple[dict[str, str], int | None]:
    """The environment of the command of the rank at this place, and OMP_NUM_THREADS if that had to be chosen; pure but for
    the number of cores."""
    environment = {**dict(zip(PLACE_FOR_TORCH, place, strict=True)), **given, LAUNCHER: launcher}
    environment.update(zip(PLACE, place, strict=True))
    environment.pop("RINGTRAIN_RANK_PROCESS", None)  # of a rank that has started this job
    if OF_HOROVODRUN in environment:
        environment.update(zip(PLACE_FOR_HOROVOD, place, strict=True))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    if "OMP_NUM_THREADS" in environment:
        return environment, None
    threads = threads_per_rank(int(environment["RINGTRAIN_LOCAL_SIZE"]))
    environment["OMP_NUM_THREADS"] = str(threads)
    return environment, threads


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


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    streams: Sequence[int],
    ignored: Sequence[int],
) -> int:
    """Starts a command in a session of its own, which ends with this process; returns its id.

    Args:
        streams: descriptors for its stdout and stderr.
        ignored: numbers of the signals that it starts with ignored.
    """
    parent = os.getpid()
    process = os.fork()
    if process == 0:
        _become(command, parent, environment, directory, streams, ignored)
    return process


def _become(
    command: Sequence[str],
    parent: int,
    environment: Mapping[str, str],
    directory: str,
    streams: Iterable[int],
    ignored: Sequence[int],
) -> NoReturn:
    """In the forked child: turns into the command."""
    try:
        os.setsid()
        _start_with_signals(ignored)
        end_with(parent)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, descriptor in enumerate((null, *streams)):
            os.dup2(descriptor, target)
        os.chdir(directory)
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        os.write(2, f"ringtrainrun: cannot run '{command[0]}': {error.strerror}.\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
    finally:
        os._exit(126)


def end_with(parent: int) -> None:
    """From now on this process is killed when its parent ends; at once if that has ended since it forked."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _start_with_signals(ignored: Sequence[int]) -> None:
    """Ignores these signals and no others, and blocks none: Python ignores SIGPIPE itself, and an engine may ignore more."""
    for number in signal.valid_signals():
        is_ignored = signal.getsignal(number) is signal.SIG_IGN
        if is_ignored != (number in ignored):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
