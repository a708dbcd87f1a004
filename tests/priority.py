"""Makes a process of the tests give way to others: the native build, and tests beside those whose times matter."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def give_way(niceness: int) -> None:
    """Lowers the priority of this process and of what it starts, by as much as `nice` counts.

    The kernel may weigh sessions alike, however nice their processes are: so it gets a session of its own, if it leads
    none, and the session is as nice.
    """
    os.nice(niceness)
    with contextlib.suppress(OSError):
        os.setsid()
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # a kernel without such groups
            Path("/proc/self/autogroup").write_text(str(niceness))
