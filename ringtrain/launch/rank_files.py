"""The folder of --output-filename: a file for each stream of each rank, for the user's eyes alone."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.log_lines import STREAMS
from ringtrain.launch.writing import PIECE_OF_FILE_BYTES, Loss, Patience, Sink, Writer

OF_A_RANK = re.compile(r"rank\.\d+")


class RankFiles:
    """The folder of --output-filename: a file for each stream of each rank, all written by one thread."""

    def __init__(self, folder: str, ranks: int):
        self.folder = folder
        self.ranks = ranks
        self.loss = Loss(f"output folder '{folder}'")
        self.writer = Writer("files")

    @property
    def has_room(self) -> bool:
        """Whether the files are being written: else the ranks should wait."""
        return self.writer.has_room

    @property
    def losses(self) -> list[Loss]:
        """What could not be written, to all of them."""
        return [self.loss]

    def watch(self, on_news: Callable[[], None]) -> None:
        """Has this called, by some thread, when `has_room` or `losses` change."""
        self.writer.on_news = on_news

    def finish(self, patience: Callable[[], Patience]) -> None:
        """Waits until all is written, for as long as the patience is; what is left then is lost."""
        self.writer.finish(patience)

    def file(self, rank: int, stream: int) -> RankFile:
        """The file of one stream; made if it is not there."""
        place = Path(self.folder) / f"rank.{rank:0{len(str(self.ranks - 1))}d}"
        file = RankFile(self.loss, place / STREAMS[stream - 1], self.writer)
        file.put(b"")
        return file


class RankFile(Sink):
    """The file that has one stream of a rank: FOLDER/rank.3/stderr, numbers padded, for the user's eyes alone."""

    def __init__(self, loss: Loss, path: Path, writer: Writer):
        super().__init__(loss)
        self.path = path
        self.piece_bytes = PIECE_OF_FILE_BYTES
        self._writer = writer

    def put(self, data: bytes) -> None:
        """Has it written soon; never waits."""
        self._writer.put(self, data)

    def end(self) -> None:
        """Has it closed once all is written."""
        self._writer.close(self)

    def open(self) -> int:
        """Makes the file and its folders at the first use. Raises OSError."""
        if self.descriptor < 0:
            for folder in (self.path.parents[1], self.path.parent):
                private_folder(folder)
            # At its end: a job that is taken up goes on in its files, and logrotate may empty them meanwhile.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
            self.descriptor = os.open(self.path, flags, 0o600)
            os.fchmod(self.descriptor, 0o600)
        return self.descriptor

    def close(self) -> None:
        """Raises OSError: some file servers tell of a full disk only now."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)


def make_folder(path: str) -> None:
    """Makes the folder of --output-filename. Raises LaunchError."""
    try:
        private_folder(path)
    except OSError as error:
        raise LaunchError(unusable_folder(path, error) if error.strerror else str(error)) from None


def unusable_folder(path: str, error: OSError) -> str:
    """Why a folder cannot be used for output."""
    return (
        f"output folder '{path}': it must be a folder that can be made and written, but: {error.strerror}. "
        "Name another one with --output-filename."
    )


def earlier_output(path: str) -> str:
    """Keeps what an earlier job has left in the folder of --output-filename; says where, or why not; "" if there is nothing."""
    try:
        number = keep_earlier(path)
    except OSError as error:
        return (
            f"output folder '{path}': what an earlier job has written cannot be renamed: {error.strerror}. New lines are "
            "written behind it."
        )
    if not number:
        return ""
    return f"output folder '{path}': what an earlier job has written is kept as stdout.{number} and stderr.{number}."


def keep_earlier(folder: str) -> int:
    """Renames what an earlier job has left of all its ranks to stdout.N and stderr.N; returns N, 0 if there is nothing.

    Of all ranks, so that a job of fewer ones leaves no file that looks like its own. Raises OSError.
    """
    found = [
        path
        for name in STREAMS
        for path in Path(folder).glob(f"rank.*/{name}*")
        if OF_A_RANK.fullmatch(path.parent.name)
    ]
    left = [path for path in found if path.name in STREAMS]
    if not left:
        return 0
    number = 1 + max(int(path.suffix[1:]) if path.suffix[1:].isdecimal() else 0 for path in found)
    for path in left:
        path.rename(path.with_name(f"{path.name}.{number}"))
    return number


def private_folder(path: str | Path) -> None:
    """Makes a folder that only this user can look into; one that is there stays as it is.

    Raises PermissionError if it is another's, or a link.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(
            f"output folder '{path}': it must be a folder of this user, but is a link or another's. "
            "Name another one with --output-filename."
        )
