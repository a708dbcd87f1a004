"""What outlives an authority that runs alone: a file from which another one goes on, and a lock beside it."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field

from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.job_folder import locked, replace_durably
from ringtrain.version import __version__


@dataclass
class Record:
    """What has become of a job.

    Attributes:
        job: what no other one has.
        world: what the authority wrote before it granted the newest world, in hexadecimal; "" before the first.
        seats: host and slot of each process that was of the job then, by uid.
        finished: some program has come to its end.
    """

    job: str
    world: str = ""
    seats: dict[str, tuple[str, int]] = field(default_factory=dict)
    finished: bool = False


class RecordFile:
    """The file of one job, held by this process. path: "" for none, so that nothing outlives it. Raises LaunchError."""

    def __init__(self, path: str):
        self._path = path
        self.keeps = bool(path)  # another authority may go on
        if not path:
            return
        try:
            locked(f"{path}.lock")
        except BlockingIOError:
            raise LaunchError(
                f"--state {path}: one authority must have it at a time, but another one that runs has. End that one, or name another "
                "file."
            ) from None
        except OSError as error:
            raise self._unusable(error) from None

    def read(self) -> Record | None:
        """None for a job that begins. Raises LaunchError."""
        if not self._path or not os.path.exists(self._path):
            return None
        try:
            with open(self._path, "rb") as file:
                told = json.load(file)
            if told.pop("version", "") != __version__:
                raise ValueError("another version of ringtrain has written it")
            told["seats"] = {uid: (str(host), int(slot)) for uid, (host, slot) in told["seats"].items()}
            return Record(**told)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise LaunchError(
                f"--state {self._path}: it must be readable, but: {error}. Remove it to begin another job; the ranks of this one end "
                "by themselves."
            ) from None

    def write(self, record: Record) -> None:
        """Returns when it is on the disk. Raises LaunchError."""
        if not self._path:
            return
        try:
            replace_durably(self._path, json.dumps({"version": __version__, **asdict(record)}).encode())
        except OSError as error:
            raise self._unusable(error) from None

    def remove(self) -> None:
        """The job is over."""
        if self._path:
            for path in (self._path, f"{self._path}.lock"):
                with contextlib.suppress(OSError):
                    os.remove(path)

    def _unusable(self, error: OSError) -> LaunchError:
        return LaunchError(
            f"--state {self._path}: the authority must be able to write there before it grants a world, but: "
            f"{error.strerror or error}. Make room, or name another file."
        )
