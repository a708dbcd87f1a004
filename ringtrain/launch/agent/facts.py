"""What a host tells of itself before a job: whether ranks can run here, and how many; GPUs, Python, the MPI."""

from __future__ import annotations

import itertools
import json
import os
import platform
import pwd
import resource
import socket
import subprocess
import sys

from ringtrain.launch.agent.link import has_hung_up

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ringtrain._rendezvous.agent_protocol import Describe, HostFacts, VisibleGpus

# Of an agent: its pipes, and for each rank two for its output beside its sockets. In an elastic job each rank has one for the
# authority's frames, and there may be another rank in its slot for a moment.
DESCRIPTORS, DESCRIPTORS_OF_A_RANK, DESCRIPTORS_OF_AN_ELASTIC_RANK = 13, 4, 6
LEAST_PID_MAX = 32768  # that Linux has by default
BYTES_OF_A_RANK = 4 << 20  # that it, or its supervisor where it has one, shares with no other, at the least


def describe(request: Describe) -> HostFacts:
    """Facts about this host, or "problem": what keeps a rank from running here."""
    directory = request["directory"]
    most = most_ranks(request["uses_mpi"])
    if request["ranks"] <= most and (lack := lack_of_descriptors(request["ranks"], request["is_elastic"])):
        return {"problem": lack}  # type: ignore[typeddict-item]  # nothing else is read then
    facts: HostFacts = {
        "name": socket.gethostname(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "most_ranks": most,
        "shell": login_shell(),
        **visible_gpus(dict(os.environ, **request["environment"])),
        "machine": machine(),
    }
    environment = dict(os.environ, **request["environment"])
    problem = obstacle(directory, request["files"], request["uses_mpi"])
    if problem := problem or lack_of_command(request["command"], directory, environment):
        facts["problem"] = problem
        return facts
    if request["probe"] is None:
        return facts
    told = run_probe(request["probe"], has_hung_up, cwd=directory, env=environment)
    if "problem" in told:
        text = f"ringtrain{' and MPI' if request['uses_mpi'] else ''} must load there, but it says: {told['problem']}"
        told["problem"] = ["environment", sys.prefix, text]
    return {**facts, **told}  # type: ignore[typeddict-item]  # what the probe said, see `HostFacts`


def obstacle(directory: str, files: list[str], uses_mpi: bool) -> list[str]:
    """What keeps a rank from running here, as subject, name and text; [] if nothing does."""
    if not os.path.isdir(directory):
        return ["working directory", directory, "it must exist there, but does not"]
    if not os.access(directory, os.X_OK):
        return ["working directory", directory, "the user must have search permission for it there, but has none"]
    if uses_mpi and not os.environ.get("HOME"):
        text = "it must be set there, for MPI, but a start-up file of the shell has removed it"
        return ["variable", "HOME", text]
    for path in files:
        if not os.path.exists(path):
            return ["file", path, "it must exist there as here, but does not"]
    return []


def lack_of_command(command: str, directory: str, environment: Mapping[str, str]) -> list[str]:
    """What is wrong with the command that ranks are to run in this directory; see `obstacle`."""
    folders = [""] if "/" in command else environment.get("PATH", os.defpath).split(os.pathsep)
    paths = [os.path.join(directory, folder, command) for folder in folders]
    if any(os.path.isfile(path) and os.access(path, os.X_OK) for path in paths):
        return []
    text = "it must be a program on PATH, or the path of one, there too, but there is none. Check its spelling, and that host"
    return ["command", command, text]


def run_probe(text: str, is_over: Callable[[], bool] = lambda: False, **options: Any) -> dict[str, Any]:
    """What a program says in its last line, a JSON object; "problem" in it says what was wrong. options: of `subprocess.Popen`.

    It is killed once `is_over` says that nobody waits for its answer any longer.
    """
    probe = subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    while True:
        try:
            said, complained = probe.communicate(timeout=1.0)
            break
        except subprocess.TimeoutExpired:
            if is_over():
                probe.kill()
    try:
        return json.loads(said.strip().splitlines()[-1])
    except (IndexError, ValueError):  # the library has ended it
        return {"problem": (complained.strip().splitlines() or [f"no output, and code {probe.returncode}"])[-1]}


def login_shell() -> str:
    """The name of the program that sshd starts for this user, such as "bash"."""
    try:
        return os.path.basename(pwd.getpwuid(os.getuid()).pw_shell)
    except KeyError:  # a container may not know its user
        return ""


def most_ranks(uses_mpi: bool) -> int:
    """How many ranks can be started here: each takes a process and some memory, and over MPI its supervisor another process."""
    try:
        with open("/proc/sys/kernel/pid_max") as file:
            processes = int(file.read())
    except OSError:  # a container may have processes alone in /proc
        processes = LEAST_PID_MAX
    allowed = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if allowed != resource.RLIM_INFINITY and os.geteuid() != 0:
        processes = min(processes, allowed)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(processes // (2 if uses_mpi else 1), memory // BYTES_OF_A_RANK)


def lack_of_descriptors(ranks: int, is_elastic: bool) -> list[str]:
    """What is wrong with the limit of open files for an agent of so many ranks, which is raised as far as need be; see `obstacle`."""
    needed = DESCRIPTORS + (DESCRIPTORS_OF_AN_ELASTIC_RANK if is_elastic else DESCRIPTORS_OF_A_RANK) * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return []
    if hard == resource.RLIM_INFINITY or hard >= needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return []
    advised = -(-needed // 64) * 64
    text = f"it must be at least {needed} there, for {ranks} ranks, but is less. Raise it with: ulimit -n {advised}"
    return ["limit of open files", str(hard), text]


def machine() -> list[str | int]:
    """What no other machine, or container, has."""
    return [boot_id(), os.stat("/proc/self/ns/net").st_ino]


def boot_id() -> str:
    """What no other running machine has; its name in a container that has processes alone in /proc."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def visible_gpus(environment: Mapping[str, str], devices: str | os.PathLike[str] = "/dev") -> VisibleGpus:
    """Number of GPUs that a rank with this environment sees, and whether CUDA_VISIBLE_DEVICES says so.

    Else they are counted by their device files, which a container has only of the GPUs that were given to it.
    """
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        files = [name for name in os.listdir(devices) if name.startswith("nvidia") and name[6:].isdigit()]
        return {"gpus": len(files), "gpus_are_chosen": False}
    # CUDA ignores what stands behind a name that is none.
    names = itertools.takewhile(lambda name: name.strip() not in ("", "-1", "NoDevFiles"), chosen.split(","))
    return {"gpus": len(list(names)), "gpus_are_chosen": True}
