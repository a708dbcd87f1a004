"""Signals of the launcher: those that end the job, those that its starter wants ignored, and what the ranks start with.

A shell lets a program ignore what it ignores itself: `nohup` does so with SIGHUP, and a script with SIGINT for what it
runs in the background. The launcher respects that, and the ranks get the same. Anything else they start with by
default. Used by `cli` and `job`; what `rank` does with the list runs on other hosts and stands there.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Python ignores the first two itself, whatever the starter wants; a process that ignores SIGCHLD cannot wait for its
# children.
NOT_HANDED_DOWN = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)


def prepare() -> None:
    """Undoes what would keep a launcher from hearing: a blocked signal, which is nobody's wish, and an ignored SIGCHLD."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def end_by_them() -> None:
    """Until `watch`: the signals that end a process end this one, also as the first of a container, which none ends by default."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def ignored() -> list[int]:
    """Numbers of the signals that whoever started this process wants ignored."""
    return [
        int(number)
        for number in sorted(signal.valid_signals())
        if signal.getsignal(number) is signal.SIG_IGN and number not in NOT_HANDED_DOWN
    ]


def watch(on_stop: Callable[[int, object], None], keeps_running: bool) -> tuple[socket.socket, socket.socket]:
    """Has this called for each signal that is to end the job, unless it is ignored; with `keeps_running` Ctrl-Z does nothing.

    Returns a pair of sockets: the first can be read whenever a signal has come, or something has been sent to the
    second.
    """
    wakeup, wakeup_write = socket.socketpair()
    for end in (wakeup, wakeup_write):
        end.setblocking(False)
    signal.set_wakeup_fd(wakeup_write.fileno(), warn_on_full_buffer=False)
    passed_over = ignored()
    # Handlers, where ignoring would do: a child starts without them.
    handlers = dict.fromkeys(STOPPING, on_stop) | {signal.SIGCHLD: _do_nothing}
    handlers |= {signal.SIGTSTP: _do_nothing} if keeps_running else {}
    for number, handler in handlers.items():
        if number not in passed_over:
            signal.signal(number, handler)
    return wakeup, wakeup_write


def _do_nothing(_number: int, _frame: object) -> None:
    """It only wakes the selector."""
