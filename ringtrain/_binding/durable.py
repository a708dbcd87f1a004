"""Files that are whole or as before, and that stay when the machine stops."""

import contextlib
import os
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def replaced(
    path: str | os.PathLike[str], unfinished: str | os.PathLike[str], mode: int = 0o666
) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of that at ``path`` at the end of the block. It is on the disk then, and so is its name.

    Args:
        path: of the file.
        unfinished: where it is while it is written, in the same folder; it is removed if the block raises.
        mode: its permissions, less the process's umask.

    Raises:
        OSError: the folder takes no file.
    """
    try:
        with contextlib.suppress(
            FileNotFoundError
        ):  # of a process that was killed; in a folder of others a link of theirs
            os.unlink(unfinished)
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
