"""Which context has which slot: for libraries whose operations run on threads that belong to no rank.

The frameworks of ``tensorflow`` and ``jax`` run operations on threads of their own, and a graph or a program lives
longer than a world. So each operation carries the number of a slot, and the library finds the context in it: slot 0 is
the context that ``init`` opened, whichever that is by now; each rank of a ``testing.World`` has a slot of its own.
"""

import itertools
import threading
import time
from collections.abc import Callable

from ringtrain._binding import log
from ringtrain._binding._native import ffi, lib
from ringtrain._runtime import context as contexts
from ringtrain.errors import UnsupportedError

_LOG_SECONDS = 1.0  # how late a line of the core's log may appear


def core_functions(framework: str, wanted: int) -> int:
    """Address of the table of the core's functions that a library was built to use.

    Args:
        framework: whose operations the library has.
        wanted: ``RT_ABI_VERSION`` of the ``ringtrain.h`` that it was built with.

    Raises:
        UnsupportedError: it was built with another ringtrain.h than the core.
    """
    functions = lib.rt_functions_for(wanted)
    if functions == ffi.NULL:
        raise UnsupportedError(
            f"ringtrain's library for {framework}: its ABI version must be {lib.rt_abi_version()}, that of the core, but is "
            f"{wanted}. The two were built from different sources: install ringtrain again."
        )
    return int(ffi.cast("uintptr_t", functions))


class Slots:
    """The slots of one library. A context stays alive as long as an operation may look for it here.

    Args:
        bind: takes a slot and the address of a context, or None to empty it.
    """

    DEFAULT = 0

    def __init__(self, bind: Callable[[int, int | None], None]):
        self._bind = bind
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
            self._bind(slot, int(ffi.cast("uintptr_t", context.native)))
            self._bound = {**self._bound, slot: context}
            return slot

    def current(self) -> int:
        """The slot of the current context, for the attribute of an operation. Raises NotInitializedError without one."""
        return self.of(contexts.current())

    def read_logs(self) -> None:
        """Starts to pass the core's lines on, such as those about stalled operations: nobody in Python waits for these."""
        threading.Thread(target=self._read_logs, name="ringtrain-log", daemon=True).start()

    def _read_logs(self) -> None:
        while True:
            time.sleep(_LOG_SECONDS)
            for context in list(self._bound.values()):
                if context.usable:
                    log.drain(context.native)

    def _let_go_of_closed(self) -> None:
        for slot, context in list(self._bound.items()):
            if not context.usable:
                self._bind(slot, None)
                self._bound = {other: bound for other, bound in self._bound.items() if other != slot}
