"""Threads take turns where a framework expects one thread: else a test crashes its worker, once in some hundred runs."""

import threading
import time
from collections import Counter


def test_tensorflows_dispatcher_has_one_thread_at_a_time() -> None:
    """One that asks Python for a type, here of what takes its time to tell it, is not called by another thread."""
    import turns
    from tensorflow.python.ops import gen_math_ops

    turns.take_turns_in_tensorflows_dispatcher()
    inside: Counter[int] = Counter()
    together = []

    class Slow:
        @property
        def __class__(self):
            inside[threading.get_ident()] += 1
            together.append(sum(map(bool, inside.values())))
            time.sleep(0.01)
            inside[threading.get_ident()] -= 1
            return Slow

    call = ((Slow(), Slow(), None), None)
    threads = [threading.Thread(target=gen_math_ops._dispatcher_for_less, args=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together and max(together) == 1
