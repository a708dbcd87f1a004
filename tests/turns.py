"""Where ranks that are threads have to take turns, since a framework expects one thread."""

import sys
import threading

from pytest import MonkeyPatch


def take_turns_in_tensorflows_dispatcher(patch: MonkeyPatch) -> None:
    """TensorFlow's dispatcher of eager operations keeps a call's arguments in itself while it asks Python for their types.

    Another thread that calls the same operation meanwhile puts its own there, and the process may crash.
    """
    if "tensorflow" not in sys.modules:
        return
    from tensorflow.python.util.dispatch import _api_dispatcher

    dispatch, turn = _api_dispatcher.PythonAPIDispatcher.Dispatch, threading.RLock()

    def dispatch_in_turn(self, *arguments):
        with turn:
            return dispatch(self, *arguments)

    patch.setattr(_api_dispatcher.PythonAPIDispatcher, "Dispatch", dispatch_in_turn)
