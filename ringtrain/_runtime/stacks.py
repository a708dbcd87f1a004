"""Where the threads of this process are, found out beside them while they run.

``sys._current_frames`` makes an object of each frame, and a collection of garbage in between may let a thread go on and
leave its frame: Python 3.11 has crashed so in a walk over such frames. faulthandler makes no objects and keeps the GIL
from the first thread to the last, so what it writes is read here.
"""

import faulthandler
import os
import re
import tempfile
import traceback
from typing import IO

_HEAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?+) in (.*)')


def of_threads(limit: int) -> dict[int, traceback.StackSummary]:
    """The stacks of all threads that run Python, by the thread's ``ident``, the outermost function first.

    Args:
        limit: of frames in each, the innermost ones; at most 100.
    """
    with _open_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = file.read().decode("ascii", "replace").splitlines()
    found: dict[int, list[tuple[str, int, str, None]]] = {}
    frames: list[tuple[str, int, str, None]] = []  # of the thread whose head came last
    for line in lines:
        if head := _HEAD.match(line):
            frames = found.setdefault(int(head[1], 16), [])
        elif (frame := _FRAME.match(line)) and len(frames) < limit:
            frames.append((frame[1], int(frame[2]) if frame[2].isdecimal() else 0, frame[3], None))
    return {ident: traceback.StackSummary.from_list(frames[::-1]) for ident, frames in found.items()}


def _open_file() -> IO[bytes]:
    """In memory, where this Python can: a disk may be full, and a pipe holds too little."""
    return os.fdopen(os.memfd_create("stacks"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()
