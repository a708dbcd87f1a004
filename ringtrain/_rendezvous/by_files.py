"""A board for `by_note` that is a folder which all ranks see, of this user alone; each note is a small file of JSON."""

import contextlib
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from ringtrain._rendezvous.by_note import meet_by_note
from ringtrain._rendezvous.introducing import Call
from ringtrain._rendezvous.meeting import Introduction
from ringtrain.errors import InvalidArgumentError

LONGEST_FILE = 64 << 20
TRIES = 100


def meet(path: Path, call: Call, listens: str, secret: bytes) -> Introduction:
    """`at_rank_zero.meet` by a note in this folder, the same on all ranks, which is made if it is not there.

    Raises InvalidArgumentError, besides, if the folder cannot be used, or others than this user may read it.
    """
    return meet_by_note(FolderBoard(path), call, listens, secret)


class FolderBoard:
    """A board; see `by_note.Board`."""

    def __init__(self, path: Path):
        self.path = path
        self.name = str(path)
        self._make()

    def _make(self) -> None:
        """Makes it if it is not there. Raises InvalidArgumentError if it cannot be used."""
        try:
            found = self._made()
        except OSError as error:
            raise InvalidArgumentError(
                f"init: rendezvous '{self.path}' must be a folder that all ranks can make or use, but: {error.strerror}. "
                "Name one on a file system that all hosts share; tasks of srun do without if all have RINGTRAIN_SECRET."
            ) from None
        is_own = found.st_uid == os.getuid() and not found.st_mode & 0o077
        if not stat.S_ISDIR(found.st_mode) or not is_own:
            raise InvalidArgumentError(
                f"init: rendezvous '{self.path}' must be a folder that this user alone can read, but is not. Name one that "
                "does not exist yet."
            )

    def _made(self) -> os.stat_result:
        """The folder, which a rank 0 that has met others there may take away at any time."""
        for _ in range(TRIES - 1):
            try:
                self.path.mkdir(0o700, parents=True, exist_ok=True)
                return self.path.lstat()
            except (FileNotFoundError, FileExistsError):
                if os.path.lexists(self.path):
                    break
        self.path.mkdir(0o700, parents=True, exist_ok=True)
        return self.path.lstat()

    def write(self, name: str, value: Any) -> None:
        """Whole, or not at all."""
        passing = self.path / f".{name}.{secrets.token_hex(8)}"
        for _ in range(TRIES):
            try:
                self._put(passing, value)
                passing.replace(self.path / name)
                return
            except FileNotFoundError:  # a rank 0 that has met others took the folder away
                self._make()
        raise FileNotFoundError(self.path)

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

    def leave(self) -> None:
        """The folder goes, unless others meet there."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def look_anew(self) -> None:
        """NFS believes for up to a minute that a file is not there, unless this host itself changes the folder."""
        passing = self.path / f".look.{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            os.close(os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            passing.unlink()
