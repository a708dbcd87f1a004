"""Operations that leave one after another, few at a time, so that the first ones arrive first.

Operations that are ready together the core fuses into one batch, which arrives as a whole. What is needed in an order
(``ahead``) is therefore submitted in that order while those before are on their way.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ringtrain.errors import RingtrainError
from ringtrain.pending import Operation

UNDER_WAY = 2  # one travels, the next one is agreed on meanwhile

_Send = Callable[[], Operation]


class Outbox:
    """What one owner has to send; the same on all ranks."""

    def __init__(self) -> None:
        self._waiting: deque[_Send] = deque()
        self._under_way: deque[Operation] = deque()
        self._lock = threading.Lock()
        self._works = False  # whether there is a thread that sends what waits

    def offer(self, send: _Send) -> None:
        """Calls ``send`` now, or when those before have arrived."""
        with self._lock:
            self._waiting.append(send)
            while self._under_way and self._under_way[0].finished():
                self._under_way.popleft()
            if len(self._under_way) < UNDER_WAY:
                self._send_next()
            elif not self._works:
                self._works = True
                threading.Thread(target=self._work, name="ringtrain.outbox", daemon=True).start()

    def send_until(self, send: _Send) -> None:
        """Somebody waits for this one: it leaves now, with those before it."""
        with self._lock:
            while send in self._waiting:
                self._send_next()

    def clear(self) -> None:
        """Nothing of what waits is to leave any more."""
        with self._lock:
            self._waiting.clear()
            self._under_way.clear()

    def _send_next(self) -> None:
        send = self._waiting[0]
        try:
            self._under_way.append(send())
        finally:
            self._waiting.popleft()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or not self._under_way:
                    self._works = False
                    return
                oldest = self._under_way[0]
            with suppress(RingtrainError):  # who takes the result hears it
                oldest.wait()
            with self._lock, suppress(RingtrainError):
                if self._under_way and self._under_way[0] is oldest:
                    self._under_way.popleft()
                if self._waiting and len(self._under_way) < UNDER_WAY:
                    self._send_next()
