"""This process's Python stacks, on a signal that the native library sends to it when other ranks wait for this one.

``context.init`` installs the handler. faulthandler needs none of the interpreter's locks, so the thread that keeps the
others waiting may hold the GIL.
"""

import faulthandler
import signal
import sys


def show_on(number: int) -> None:
    """Makes a signal write the stacks of all threads to stderr, unless the program uses that signal itself; 0 for none."""
    if number and signal.getsignal(number) == signal.SIG_DFL:
        faulthandler.register(number, file=sys.__stderr__ or 2, all_threads=True)
