"""What a stall shows of this process: the library's report, and where its Python is if others wait for it.

The native library asks through a pipe, and a thread of ours answers, whatever the program does meanwhile: a rank that
coordinates may itself be the one that saves a checkpoint, or be within TensorFlow. If it has not read that after five
seconds, some thread keeps the GIL to itself; then no Python runs, so the library's signal may have faulthandler look at
the stacks without the GIL, which would crash beside running threads.
"""

import contextlib
import faulthandler
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable

from ringtrain._runtime import stacks
from ringtrain.errors import InvalidArgumentError

OUR_THREADS = "ringtrain-"  # their names begin so, and nobody looks for a fault in them
OUR_POOLS = "ringtrain."  # likewise: they run what a program gives them, or wait for other ranks
_POOLS_OWN_LOOP = os.path.join("concurrent", "futures", "thread.py")
_GATHER_SECONDS = 0.05  # in which the operations of a step ask for the same
_MOST_AT_ONCE = 4096
_STDERR = 2
_FRAMES = 50  # of a stack, the most recent ones
_requests: dict[int, int] = {}  # by process, since a fork's child has no thread: where to ask


def answer_requests(signal_number: int, show_lines: Callable[[], None]) -> int:
    """Starts to answer, once for a process; returns the descriptor to which the library writes what it wants.

    Args:
        signal_number: makes faulthandler write the stacks, unless the program uses that signal itself. 0: none does.
        show_lines: logs the lines that the library keeps; called on another thread.
    """
    if signal_number and signal.getsignal(signal_number) == signal.SIG_DFL:
        try:
            faulthandler.register(signal_number, file=_STDERR, all_threads=True)
        except (OSError, RuntimeError):  # of the kernel; of faulthandler, which has SIGSEGV and its like
            raise InvalidArgumentError(
                f"init: stack_signal must be a signal that a program may handle, but is {signal_number}. Take another one, or 0 for none."
            ) from None
    if os.getpid() not in _requests:
        asked, ask = os.pipe()
        os.set_blocking(ask, False)
        answers = {ord("s"): write_stacks, ord("l"): show_lines}
        thread = threading.Thread(target=_answer, args=(asked, answers), name=f"{OUR_THREADS}reports", daemon=True)
        thread.start()
        _requests[os.getpid()] = ask
    return _requests[os.getpid()]


def write_stacks() -> None:
    """Writes the stacks of the program's threads to stderr, the main thread's last, and those of ours that have work of its.

    The caller holds the GIL.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = sorted(stacks.of_threads(_FRAMES).items(), key=lambda stack: stack[0] == main)
    named = [(names.get(thread, "unnamed"), stack) for thread, stack in found]
    text = "".join(
        f"Thread '{name}', most recent call last:\n{''.join(stack.format())}"
        for name, stack in named
        if not name.startswith(OUR_THREADS) and not (name.startswith(OUR_POOLS) and _waits_for_work(stack))
    )
    with open(_STDERR, "w", closefd=False) as stderr:  # where the library writes; a program may replace sys.stderr
        stderr.write(text)


def _waits_for_work(stack: traceback.StackSummary) -> bool:
    """Whether a thread of a pool is in its own loop, and in nothing that it was given."""
    return bool(stack) and stack[-1].filename.endswith(_POOLS_OWN_LOOP)


def _answer(asked: int, answers: dict[int, Callable[[], None]]) -> None:
    """Until nobody can ask any more. What is asked for several times, as by each operation of a step, is answered once."""
    requests = select.poll()
    requests.register(asked, select.POLLIN)
    while requests.poll():
        time.sleep(_GATHER_SECONDS)
        wanted = os.read(asked, _MOST_AT_ONCE)  # an unread byte tells that nobody has the GIL to answer
        if not wanted:
            return
        for each in dict.fromkeys(wanted):
            with contextlib.suppress(OSError):  # nobody reads: let the next one be answered
                answers[each]()
