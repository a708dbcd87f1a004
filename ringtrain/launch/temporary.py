"""Where a host has room for files that go with the job. Used by `function` and `job_folder`."""

from __future__ import annotations

import tempfile

IN_MEMORY = "/dev/shm"


def temporary_folder() -> str:
    """That of this host; where none can be written, as in a container with a read-only root, the one in memory."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return IN_MEMORY
