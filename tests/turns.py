"""Where ranks that are threads have to take turns, since a framework expects one thread."""

import functools
import sys
import threading


def take_turns_in_tensorflows_dispatcher() -> None:
    """TensorFlow's dispatcher of an operation keeps a call's arguments in itself while it asks Python for their types.

    Another thread that calls the same operation meanwhile puts its own there, and the process may crash. From the first call
    with TensorFlow imported on, for good: a module of generated operations keeps each one's dispatcher, bound, as its own.
    """
    if "tensorflow" in sys.modules:
        _take_turns_from_now_on()


@functools.cache
def _take_turns_from_now_on() -> None:
    from tensorflow.python.util.dispatch import _api_dispatcher

    turn = threading.RLock()

    def in_turn(dispatch):
        @functools.wraps(dispatch)
        def dispatch_in_turn(*arguments):
            with turn:
                return dispatch(*arguments)

        return dispatch_in_turn

    dispatcher = _api_dispatcher.PythonAPIDispatcher
    dispatcher.Dispatch = in_turn(dispatcher.Dispatch)
    for module in list(sys.modules.values()):  # those that have bound it before
        for name, bound in list(getattr(module, "__dict__", {}).items()):
            if name.startswith("_dispatcher_for_"):
                setattr(module, name, in_turn(bound))
