"""The folder in which the ranks of a host find the function that `ringtrain.run` wants called, and leave what came of it."""

from __future__ import annotations

import base64
import os
import shutil
import tempfile

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterator


class FunctionFolder:
    """For this user alone; of a job that runs a command there is none.

    function: in base64; "" if there is none.

    Attributes:
        path: "" if there is none.
    """

    def __init__(self, function: str):
        self.path = _private_folder() if function else ""
        if self.path:
            path = os.path.join(self.path, "function")
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(base64.b64decode(function))

    def results(self) -> Iterator[tuple[int, str, bytes]]:
        """What the ranks have left, a result or a failure each: rank, which of the two, and the bytes."""
        for name in sorted(os.listdir(self.path)) if self.path else ():
            kind, _, rank = name.partition(".")
            if rank.isdigit():
                with open(f"{self.path}/{name}", "rb") as file:
                    yield int(rank), kind, file.read()

    def remove(self) -> None:
        """With all that is in it."""
        if self.path:
            shutil.rmtree(self.path, ignore_errors=True)


def _private_folder() -> str:
    try:
        return tempfile.mkdtemp(prefix="ringtrain-run-")
    except FileNotFoundError:  # none can be written, as in a container with a read-only root
        return tempfile.mkdtemp(prefix="ringtrain-run-", dir="/dev/shm")
