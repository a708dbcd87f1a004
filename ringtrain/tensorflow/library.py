"""Our library of TensorFlow operations: which releases it serves, loading it, and its two links to the core.

``native/tensorflow`` is the source. The library gets the core's functions as a table (``rt_functions`` in
``ringtrain.h``), and contexts by slot: slot 0 is the context that ``init`` opened, whichever that is by now, and each
rank of a ``testing.World`` has a slot of its own. ``operations`` and the modules beside it call ``ops`` with the slot of
the current context.
"""

import ctypes
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import tensorflow as tf

from ringtrain import context as contexts
from ringtrain import exits, log, options
from ringtrain._native import ffi, lib
from ringtrain.errors import UnsupportedError

TESTED_RELEASES = ("2.20", "2.21")
ANY_RELEASE = "RINGTRAIN_TENSORFLOW_ANY_RELEASE"

_LOG_SECONDS = 1.0  # how late a line of the core's log may appear
_PATH = Path(__file__).with_name("libringtrain_tensorflow.so")


def check_release(release: str, any_release: str = "") -> None:
    """Raises UnsupportedError for a release of TensorFlow that this was not tested with, unless the user insists."""
    if ".".join(release.split(".")[:2]) not in TESTED_RELEASES and any_release != "1":
        raise UnsupportedError(
            f"TensorFlow '{release}': expected one of the releases {', '.join(TESTED_RELEASES)}, with whose C API for "
            f"kernels this was tested, but found another. Install one of them, or set {ANY_RELEASE}=1 to try."
        )


def core_functions(library: ctypes.CDLL) -> int:
    """Address of the table of the core's functions that a library was built to use.

    Raises:
        UnsupportedError: it was built with another ringtrain.h than the core.
    """
    wanted = library.rt_tensorflow_abi_version()
    functions = lib.rt_functions_for(wanted)
    if functions == ffi.NULL:
        raise UnsupportedError(
            f"ringtrain's library for TensorFlow: its ABI version must be {lib.rt_abi_version()}, that of the core, but is "
            f"{wanted}. The two were built from different sources: install ringtrain again."
        )
    return int(ffi.cast("uintptr_t", functions))


def _load() -> tuple[Any, ctypes.CDLL]:
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
    library.rt_tensorflow_next_name.argtypes = [
        ctypes.c_int64, ctypes.c_char_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    library.rt_tensorflow_next_name.restype = None
    library.rt_tensorflow_connect(core_functions(library))
    exits.count_as_errors_of_peers(tf.errors.UnknownError)  # lost ranks and ended worlds: see kCodes in collective.cc
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


def next_name(operation: str, process_set_id: int) -> str:
    """The name of this rank's next unnamed eager operation of a kind; counts it, as running the operation does."""
    name = ctypes.create_string_buffer(256)
    _library.rt_tensorflow_next_name(current_slot(), operation.encode(), process_set_id, name, len(name))
    return name.value.decode()


ops, _library = _load()
_slots = _Slots(_library)
threading.Thread(target=_read_logs, args=(_slots,), name="ringtrain-log", daemon=True).start()
