"""What must be there before a job is started: descriptors, a command that this host can run. Used by `cli`."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping

from ringtrain._bootstrap import descriptors
from ringtrain.launch import signals
from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.plan import Plan

DESCRIPTORS, DESCRIPTORS_OF_A_HOST = 12, 4  # of the launcher


def check_surroundings(environment: Mapping[str, str]) -> None:
    """Refuses what nothing could be started in. Raises LaunchError."""
    make_room_for(hosts=1, files=0)
    try:
        os.getcwd()
    except OSError as error:
        raise LaunchError(
            f"working directory: it must exist, but: {error.strerror}. It has been removed, perhaps made anew; "
            "change to another one, or into it once more."
        ) from None
    job = environment.get("RINGTRAIN_LAUNCHER", "")
    if is_running(job):
        raise LaunchError(
            f"RINGTRAIN_LAUNCHER: ringtrainrun must be started outside of a job, but rank "
            f"{environment.get('RINGTRAIN_RANK', '?')} of one has started it. Call it once, and let all ranks "
            "run the script."
        )


def make_ready(hosts: int, files: int) -> None:
    """Has this process lead a job on so many hosts, which writes so many files. Raises LaunchError."""
    signals.prepare()
    make_room_for(hosts, files)
    if not os.environ.get("HOME"):  # without it MPI does not start
        home = os.path.expanduser("~")
        os.environ["HOME"] = home if os.path.isabs(home) else "/"  # a container may not know its user


def make_room_for(hosts: int, files: int) -> None:
    """For the descriptors of a launcher. Raises LaunchError if it may not open as many."""
    if lack := descriptors.lack(DESCRIPTORS + DESCRIPTORS_OF_A_HOST * hosts + files):
        raise LaunchError(lack)


def is_running(job: str) -> bool:
    """Whether a launcher's agent listens under this name; an environment may have it from a job that has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect("\0" + job)
            return bool(job)
        except (OSError, ValueError):  # nobody; no name
            return False


def check_command(plan: Plan) -> None:
    """Refuses a command that this host cannot run; other hosts say so themselves. Raises LaunchError."""
    program = plan.command[0]
    path = os.pathsep.join([os.path.join(sys.prefix, "bin"), os.environ.get("PATH", os.defpath)])
    if shutil.which(program, path=path):
        return
    if program.endswith(".py") and os.path.isfile(program):
        raise LaunchError(
            f"command '{program}': it must be executable, but is a file without that permission. "
            f"Put python before it: ringtrainrun -np {plan.ranks} python {shlex.join(plan.command)}"
        )
    if os.path.isdir(program):
        raise LaunchError(f"command '{program}': it must be a program, but is a folder. Put the program before it.")
    if not plan.has_remote_hosts:
        raise LaunchError(
            f"command '{program}': it must be a program on PATH or the path of one, but there is none. "
            "Check its spelling."
        )
