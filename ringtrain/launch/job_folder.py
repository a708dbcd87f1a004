"""What outlives the launcher of an elastic job: a folder for this user alone, from which another launcher takes the job up.

Its name is the job's. `job` says what runs where, `world` is the authority's record; both are replaced at once, and on the
disk before anything follows from them. `lock` is held by the launcher that leads the job, and by nobody once it is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ringtrain._binding.durable import replaced
from ringtrain.launch.authority import Rules
from ringtrain.launch.discovery import HostScript
from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.hosts import Host
from ringtrain.launch.networks import Chosen
from ringtrain.launch.plan import Plan
from ringtrain.launch.shells import Ssh
from ringtrain.version import __version__

NAME = re.compile("[0-9a-f]{8}")
IN_MEMORY = "/dev/shm"


@dataclass
class Outline:
    """A job as its next launcher must know it.

    Attributes:
        environment: of the launcher itself. directory: where it runs.
        socket: name of the agents' sockets. key: of the job, in hexadecimal.
        hosts: those that have an agent, and the number of their first slot in the job.
    """

    plan: Plan
    environment: dict[str, str]
    directory: str
    socket: str
    key: str
    networks: Chosen | None
    hosts: list[tuple[Host, int]]

    def text(self) -> str:
        """As JSON, with the version of ringtrain."""
        return json.dumps({"version": __version__, **asdict(self)})

    @staticmethod
    def read(text: str) -> Outline:
        """Raises ValueError for what another version has written, or is none."""
        told = json.loads(text)
        if told.pop("version", "") != __version__:
            raise ValueError("another version of ringtrain has written it")
        told["plan"] = plan_of(told["plan"])
        if told["networks"] is not None:
            told["networks"] = Chosen(**with_tuples(told["networks"]))
        told["hosts"] = [(Host(**host), first) for host, first in told["hosts"]]
        return Outline(**told)


def plan_of(told: Mapping[str, Any]) -> Plan:
    """A plan that JSON has carried."""
    given = with_tuples(told)
    given["command"] = list(told["command"])
    given["hosts"] = [Host(**host) for host in told["hosts"]]
    given["spare"] = tuple(Host(**host) for host in told["spare"])
    given["ssh"] = Ssh(**told["ssh"])
    rules: list[Any] = [tuple(each) if isinstance(each, list) else each for each in told["elastic"]]
    given["elastic"] = Rules(*rules)  # a named tuple, which is a list in JSON
    given["script"] = HostScript(**told["script"]) if told["script"] else None
    return Plan(**{field.name: given[field.name] for field in fields(Plan)})


def with_tuples(told: Mapping[str, Any]) -> dict[str, Any]:
    """Its lists as tuples, one level into its objects too."""

    def converted(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: converted(each) for name, each in value.items()}
        return tuple(value) if isinstance(value, list) else value

    return {name: converted(value) for name, value in told.items()}


class JobFolder:
    """The folder of one job, held by this launcher until it ends."""

    def __init__(self, name: str, lock: int):
        self.name = name
        self.path = os.path.join(folder_of_jobs(), name)
        self._lock = lock
        self._kept: dict[str, bytes] = {}  # what this launcher has written, by the file's name

    @staticmethod
    def make() -> JobFolder:
        """For a job that begins. Raises LaunchError if there can be none."""
        name = secrets.token_hex(4)
        parent = folder_of_jobs()
        try:
            os.makedirs(parent, mode=0o700, exist_ok=True)
            refuse_others(parent)
            path = os.path.join(parent, name)
            os.mkdir(path, 0o700)
            return JobFolder(name, held(path))
        except OSError as error:
            raise LaunchError(
                f"folder '{parent}': an elastic job must be able to keep its record there, but: "
                f"{error.strerror or error}. Make room, or name another place with TMPDIR."
            ) from None

    @staticmethod
    def find(name: str) -> JobFolder:
        """Of a job whose launcher was lost. Raises LaunchError if there is none, or if it is led."""
        parent = folder_of_jobs()
        path = os.path.join(parent, name)
        if not NAME.fullmatch(name) or not os.path.isdir(path):
            raise LaunchError(
                f"--resume {name}: it must name a job of this user's that was started on this host, but in "
                f"'{parent}' there is none of that name. {listing(parent)}"
            )
        try:
            refuse_others(parent)
            return JobFolder(name, held(path))
        except BlockingIOError:
            raise LaunchError(
                f"--resume {name}: the job must have lost its launcher, but is led by one that runs. "
                "End that one first, with SIGKILL if the job is to go on."
            ) from None
        except OSError as error:
            raise LaunchError(f"--resume {name}: {error.strerror or error}. Start the job anew.") from None

    def read(self) -> Outline:
        """What its last launcher has left. Raises LaunchError."""
        try:
            return Outline.read(self._read("job").decode())
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LaunchError(
                f"--resume {self.name}: the record '{self.path}/job' must be readable, but: {error}. "
                "The job ends by itself, without a launcher; start it anew."
            ) from None

    def write(self, outline: Outline) -> None:
        """Puts it in the place of what was there."""
        self._write("job", outline.text().encode())

    @property
    def world(self) -> bytes:
        """The authority's record; empty before the first world."""
        try:
            return self._read("world")
        except FileNotFoundError:
            return b""

    @world.setter
    def world(self, record: bytes) -> None:
        self._write("world", record)

    def remove(self) -> None:
        """The job is over."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # other jobs have theirs there
            os.rmdir(os.path.dirname(self.path))
        self.close()

    def close(self) -> None:
        """Leaves it to another launcher."""
        os.close(self._lock)

    def _read(self, name: str) -> bytes:
        with open(os.path.join(self.path, name), "rb") as file:
            return file.read()

    def touch(self) -> None:
        """Keeps the files from those who remove what is old in a folder for temporary ones."""
        for name in (*self._kept, "lock", ""):
            with contextlib.suppress(OSError):
                os.utime(os.path.join(self.path, name))

    def _write(self, name: str, data: bytes) -> None:
        """Raises OSError, and writes all again with the next one if somebody has removed the folder."""
        self._kept[name] = data
        if os.path.exists(os.path.join(self.path, "lock")):
            replace_durably(os.path.join(self.path, name), data)
            return
        parent = os.path.dirname(self.path)
        os.makedirs(parent, mode=0o700, exist_ok=True)
        refuse_others(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, 0o700)
        lock = held(self.path)
        self.close()
        self._lock = lock
        for each, kept in self._kept.items():
            replace_durably(os.path.join(self.path, each), kept)


def replace_durably(path: str, data: bytes) -> None:
    """Puts data in the place of a file, whole or not at all; they are on the disk when this returns."""
    with replaced(path, f"{path}.new", 0o600) as file:
        file.write(data)


def folder_of_jobs() -> str:
    """Where this user's jobs have theirs, on this host."""
    return os.path.join(temporary_folder(), f"ringtrainrun-{os.getuid()}")


def refuse_others(path: str) -> None:
    """Raises PermissionError if others could have written there."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"'{path}' must be a folder for this user alone, but is another's, or open to others")


def held(path: str) -> int:
    """A descriptor of the lock of a folder, which ends with the process. Raises BlockingIOError if another one has it."""
    return locked(os.path.join(path, "lock"))


def locked(path: str) -> int:
    """A descriptor of this lock, made if it is not there, which ends with the process. Raises BlockingIOError if another one has it."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.lstat(path)):
                return lock
        except FileNotFoundError:  # who had it has just removed it, and the next one makes another
            pass
        except OSError:
            os.close(lock)
            raise
        os.close(lock)


def listing(parent: str) -> str:
    """Which jobs there are, for people."""
    with contextlib.suppress(OSError):
        if names := sorted(filter(NAME.fullmatch, os.listdir(parent))):
            return f"There are: {', '.join(names)}."
    return "If TMPDIR was another one where the job was started, set that one here."


def describe_hosts(hosts: Iterable[Host]) -> str:
    """For people."""
    return ", ".join(f"'{host.name}'" for host in hosts)


def temporary_folder() -> str:
    """That of this host; where none can be written, as in a container with a read-only root, the one in memory."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return IN_MEMORY
