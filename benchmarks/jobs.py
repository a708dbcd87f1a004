"""A job under watch: whatever is left of it, processes and shared memory, can be found.

Its processes carry a mark in their environment. Its /dev/shm is a folder of its own, so that only it can have left
something there; that takes a mount namespace, which not every machine allows. So is its folder for temporary files:
mpirun, when it is killed, leaves files there that are named after its process id, and no later one with that id can
start beside them. Used by `python -m benchmarks faults` and tests.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

MARK = "RINGTRAIN_WATCHED_JOB"
PAUSE_SECONDS = 0.02
# As root of a user namespace where the user is not root.
NAMESPACES = (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"])
# What runs in the namespace: $0 is the folder that becomes /dev/shm, or else what `mount` needs to make a small one.
IN_OWN_SHARED_MEMORY = 'mount --bind "$0" /dev/shm && exec "$@"'
IN_LIMITED_SHARED_MEMORY = 'mount -t tmpfs -o "size=$0" none /dev/shm && exec "$@"'


class Job:
    """What has been started under one mark: one command, or several that belong together.

    Args:
        shared_memory_bytes: size of its /dev/shm; None for that of this machine.
    """

    def __init__(self, shared_memory_bytes: int | None = None):
        self.mark = f"{MARK}={uuid.uuid4()}"
        self.started: list[subprocess.Popen] = []
        self._bytes = shared_memory_bytes
        self.shared_memory = Path(tempfile.mkdtemp(prefix="ringtrain-watched-", dir="/dev/shm"))
        self.temporary = tempfile.mkdtemp(prefix="watched-")

    def start(self, *command: str | Path, **options: Any) -> subprocess.Popen:
        """`subprocess.Popen` of a command of this job; `env` gets the mark."""
        name, _, value = self.mark.partition("=")
        options["env"] = {**options.get("env", os.environ), name: value, "TMPDIR": self.temporary}
        process = subprocess.Popen([*self._apart(), *map(str, command)], **options)
        self.started.append(process)
        return process

    def run(self, *command: str | Path, seconds: float, **options: Any) -> subprocess.CompletedProcess:
        """`subprocess.run` of a command of this job, text captured. Raises TimeoutExpired if it has not ended then."""
        process = self.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        said, complained = process.communicate(timeout=seconds)
        return subprocess.CompletedProcess(command, process.returncode, said, complained)

    def processes(self) -> dict[int, str]:
        """Command lines of the job's processes, by process id; stopped ones too, zombies not."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()
        return found

    def find(self, *words: str) -> list[int]:
        """Process ids of the job's processes whose command line has all of these words, in order."""
        return sorted(pid for pid, line in self.processes().items() if all(word in line for word in words))

    def segments(self) -> list[str]:
        """Names of what it has in its /dev/shm."""
        return sorted(str(path.relative_to(self.shared_memory)) for path in self.shared_memory.rglob("*"))

    def left(self) -> str:
        """What there is of the job, in words; "" if nothing is."""
        found = [f"process {pid}: {line[:200]}" for pid, line in self.processes().items()]
        return "\n".join(found + [f"/dev/shm/{name}" for name in self.segments()])

    def await_end(self, seconds: float) -> str:
        """Waits until nothing is left, `seconds` at most; returns what is left."""
        deadline = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(PAUSE_SECONDS)
        return left

    def close(self) -> None:
        """Kills what is left, and takes its folders away."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.wait()
            for pipe in filter(None, (process.stdout, process.stderr)):
                pipe.close()
        for folder in (self.shared_memory, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)

    def _apart(self) -> list[str]:
        prefix = namespace_prefix()
        if not prefix:
            return []
        if self._bytes is not None:
            return [*prefix, "sh", "-c", IN_LIMITED_SHARED_MEMORY, str(self._bytes)]
        return [*prefix, "sh", "-c", IN_OWN_SHARED_MEMORY, str(self.shared_memory)]


@functools.cache
def namespace_prefix() -> list[str]:
    """What to put before a command that shall have mounts of its own; [] where this machine allows none."""
    for prefix in NAMESPACES:
        if subprocess.run([*prefix, "mount", "-t", "tmpfs", "none", "/dev/shm"], capture_output=True).returncode == 0:
            return prefix
    return []
