"""Threads that complete torch's futures when their operations are done.

A callback of a future may start a collective and wait for its future (torch's PowerSGD hook does), so the thread that
runs callbacks never is the one that the next future needs: whoever has waited for an operation gives its turn away
before it completes the future.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

_IDLE_THREADS = 2  # one that waits for an operation, one that takes over

Wait = Callable[[], None]
Complete = Callable[[], None]


class Completions:
    """Waits for operations in the order in which they were added. Threads start with the first one.

    Every function may be called from any thread.
    """

    def __init__(self) -> None:
        self._added: SimpleQueue[tuple[Wait, Complete] | None] = SimpleQueue()
        self._turn = threading.Lock()  # of the thread that waits for the next operation
        self._guard = threading.Lock()  # of the count
        self._idle = 0

    def add(self, wait: Wait, complete: Complete) -> None:
        """Has a thread call ``wait``, which blocks and raises nothing, and then ``complete``, which may do anything."""
        self._added.put((wait, complete))
        with self._guard:
            first = self._idle == 0
            self._idle += first
        if first:
            self._start()

    def close(self) -> None:
        """Lets the threads end, once all that was added has been completed."""
        self._added.put(None)

    def _start(self) -> None:
        threading.Thread(target=self._serve, name="ringtrain-futures", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._turn:
                job = self._added.get()
                if job is None:
                    self._added.put(None)  # for the next thread
                    return
                self._leave_a_successor()
                job[0]()
            job[1]()
            del job  # its tensors, before the next one comes
            with self._guard:
                if self._idle >= _IDLE_THREADS:
                    return
                self._idle += 1

    def _leave_a_successor(self) -> None:
        with self._guard:
            alone = self._idle == 1
            self._idle -= not alone
        if alone:
            self._start()
