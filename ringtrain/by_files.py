"""A board for `boards` that is a folder which all ranks see, of this user alone; each note is a small file of JSON."""

import atexit
import contextlib
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from ringtrain import boards
from ringtrain.errors import InvalidArgumentError
from ringtrain.introducing import Call
from ringtrain.meeting import Introduction

LONGEST_FILE = 64 << 20
SECONDS_TO_BE_READ = 2.0  # rank 0's last word, before its end


def meet(path: Path, call: Call, secret: bytes) -> Introduction:
    """`boards.meet` in this folder, the same on all ranks, which is made if it is not there.

    Raises InvalidArgumentError, besides, if the folder cannot be used, or others than this user may read it.
    """
    folder = Folder(path)
    if call["rank"] == 0:
        atexit.register(folder.clear, call["size"])
    return boards.meet(folder, call, secret)


class Folder:
    """A board; see `boards.Board`."""

    def __init__(self, path: Path):
        self.path = path
        self.name = str(path)
        self._last_word: Any = None
        self._make()

    def _make(self) -> None:
        """Makes it if it is not there. Raises InvalidArgumentError if it cannot be used."""
        try:
            self.path.mkdir(0o700, parents=True, exist_ok=True)
            found = self.path.lstat()
        except OSError as error:
            raise InvalidArgumentError(
                f"init: rendezvous '{self.path}' must be a folder that all ranks can make or use, but: {error.strerror}. "
                "Name one on a file system that all hosts share; tasks of srun do without if all have RINGTRAIN_SECRET."
            ) from None
        is_own = found.st_uid == os.getuid() and not found.st_mode & 0o077
        if not self.path.is_dir() or self.path.is_symlink() or not is_own:
            raise InvalidArgumentError(
                f"init: rendezvous '{self.path}' must be a folder that this user alone can read, but is not. Name one that "
                "does not exist yet."
            )

    def write(self, name: str, value: Any) -> None:
        """Whole, or not at all."""
        if name == "go":
            self._last_word = value
        passing = self.path / f".{name}.{secrets.token_hex(8)}"
        try:
            self._put(passing, value)
        except FileNotFoundError:  # a rank 0 that has just ended took the folder away
            self._make()
            self._put(passing, value)
        passing.rename(self.path / name)

    def _put(self, path: Path, value: Any) -> None:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(value, file)

    def read(self, name: str) -> Any:
        """None if it is not there, or not whole."""
        try:
            with os.fdopen(os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW)) as file:
                return json.loads(file.read(LONGEST_FILE))
        except (OSError, ValueError):
            return None

    def remove(self, *names: str) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    def look_anew(self) -> None:
        """NFS believes for up to a minute that a file is not there, unless this host itself changes the folder."""
        passing = self.path / f".look.{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            os.close(os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            passing.unlink()

    def wait(self, names: list[str], seconds: float) -> None:
        """Nothing tells of files."""

    def clear(self, size: int) -> None:
        """Removes what a meeting leaves, once all ranks have read it, and the folder, unless others meet there by now."""
        deadline = time.monotonic() + SECONDS_TO_BE_READ
        while any(map(self.read, boards.agreements(size))) and time.monotonic() < deadline:
            time.sleep(boards.SECONDS_BETWEEN_LOOKS[0])
        if self.read("go") == self._last_word:
            self.remove("go")
        with contextlib.suppress(OSError):
            self.path.rmdir()
