"""This process's Python stacks, written when other ranks wait for this one.

The native library asks through a pipe, and a thread of ours answers, holding the GIL: nothing else moves while it looks at the
other threads. If it has not answered after a second, some thread keeps the GIL to itself; then no Python runs, so the
library's signal may have faulthandler look without the GIL, which would crash beside running threads.
"""

import faulthandler
import os
import select
import signal
import sys
import threading

_requests: dict[int, int] = {}  # by process, since a fork's child has no thread: where to ask


def answer_requests(signal_number: int) -> int:
    """Starts to answer, once for a process; returns the descriptor to which a byte is to be written, -1 for signal 0.

    Args:
        signal_number: makes faulthandler write the stacks, unless the program uses that signal itself.
    """
    if not signal_number:
        return -1
    if signal.getsignal(signal_number) == signal.SIG_DFL:
        faulthandler.register(signal_number, file=_stderr(), all_threads=True)
    if os.getpid() not in _requests:
        asked, ask = os.pipe()
        os.set_blocking(ask, False)
        threading.Thread(target=_answer, args=(asked,), name="ringtrain-stacks", daemon=True).start()
        _requests[os.getpid()] = ask
    return _requests[os.getpid()]


def _answer(asked: int) -> None:
    requests = select.poll()
    requests.register(asked, select.POLLIN)
    while requests.poll():
        os.read(asked, 1)  # only now, with the GIL held: an unread byte tells that nobody can answer
        faulthandler.dump_traceback(file=_stderr(), all_threads=True)


def _stderr():
    return sys.__stderr__ or 2
