"""Our library of TensorFlow operations: which releases it serves, loading it, and its two links to the core.

``native/tensorflow`` is the source. The library gets the core's functions as a table of pointers, and contexts by
slot: slot 0 is the context that ``init`` opened, whichever that is by now, and each rank of a ``testing.World`` has a
slot of its own. ``operations`` and the modules beside it call ``ops`` with the slot of the current context.
"""

import ctypes
import itertools
import threading
import time
from pathlib import Path

import tensorflow as tf

from ringtrain import context as contexts
from ringtrain import exits, log, options
from ringtrain._native import ffi, lib
from ringtrain.errors import UnsupportedError

TESTED_RELEASES = ("2.20", "2.21")
ANY_RELEASE = "RINGTRAIN_TENSORFLOW_ANY_RELEASE"

_LOG_SECONDS = 1.0  # how late a line of the core's log may appear
_PATH = Path(__file__).with_name("libringtrain_tensorflow.so")
# In the order of CoreFunctions in native/tensorflow/core_link.h.
_CORE_FUNCTIONS = (
    "rt_submit", "rt_handle_free", "rt_free", "rt_received_splits", "rt_result", "rt_world_of", "rt_process_set_ranks",
)  # fmt: skip


def check_release(release: str, any_release: str = "") -> None:
    """Raises UnsupportedError for a release of TensorFlow that this was not tested with, unless the user insists."""
    if ".".join(release.split(".")[:2]) not in TESTED_RELEASES and any_release != "1":
        raise UnsupportedError(
            f"TensorFlow '{release}': expected one of the releases {', '.join(TESTED_RELEASES)}, with whose C API for "
            f"kernels this was tested, but found another. Install one of them, or set {ANY_RELEASE}=1 to try."
        )


def _load() -> tuple[object, ctypes.CDLL]:
    """Loads the library: its operations as Python functions, and its own functions. TensorFlow must load it first."""
    check_release(tf.__version__, options.environment().get(ANY_RELEASE, ""))
    operations = tf.load_op_library(str(_PATH))
    library = ctypes.CDLL(str(_PATH))
    library.rt_tensorflow_missing.restype = ctypes.c_char_p
    missing = library.rt_tensorflow_missing().decode()
    if missing:
        raise UnsupportedError(
            f"TensorFlow '{tf.__version__}': expected its C API for kernels but did not find {missing}. "
            f"Install one of the releases {', '.join(TESTED_RELEASES)}."
        )
    library.rt_tensorflow_connect.argtypes = [ctypes.c_void_p]
    library.rt_tensorflow_connect.restype = None
    library.rt_tensorflow_bind.argtypes = [ctypes.c_int64, ctypes.c_void_p]
    library.rt_tensorflow_bind.restype = None
    addresses = [int(ffi.cast("uintptr_t", ffi.addressof(lib, name))) for name in _CORE_FUNCTIONS]
    library.rt_tensorflow_connect((ctypes.c_void_p * len(addresses))(*addresses))
    exits.count_as_errors_of_peers(tf.errors.AbortedError, tf.errors.FailedPreconditionError)
    return operations, library


class _Slots:
    """Which context has which slot. A context stays alive as long as an operation may look for it here."""

    DEFAULT = 0

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self._lock = threading.Lock()
        self._bound: dict[int, contexts.Context] = {}
        self._numbers = itertools.count(1)

    def of(self, context: contexts.Context) -> int:
        """The slot of a context, which it keeps until it is closed."""
        for slot, bound in self._bound.items():
            if bound is context:
                return slot
        with self._lock:
            self._let_go_of_closed()
            slot = self.DEFAULT if contexts.is_default(context) else next(self._numbers)
            self._library.rt_tensorflow_bind(slot, int(ffi.cast("uintptr_t", context.native)))
            self._bound = {**self._bound, slot: context}
            return slot

    def contexts(self) -> list[contexts.Context]:
        """The contexts that have a slot."""
        return list(self._bound.values())

    def _let_go_of_closed(self) -> None:
        for slot, context in list(self._bound.items()):
            if not context.usable:
                self._library.rt_tensorflow_bind(slot, None)
                self._bound = {other: bound for other, bound in self._bound.items() if other != slot}


def _read_logs(slots: _Slots) -> None:
    """Passes the core's lines on, such as those about stalled operations: nobody in Python waits for TensorFlow's."""
    while True:
        time.sleep(_LOG_SECONDS)
        for context in slots.contexts():
            if context.usable:
                log.drain(context.native)


def current_slot() -> int:
    """The slot of the current context, for the attribute of an operation. Raises NotInitializedError without one."""
    return _slots.of(contexts.current())


ops, _library = _load()
_slots = _Slots(_library)
threading.Thread(target=_read_logs, args=(_slots,), name="ringtrain-log", daemon=True).start()
