"""``in_thread``, as Horovod's own tests import it."""

import threading
from collections.abc import Callable, Sequence
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts a thread that calls a function, and returns it.

    Args:
        target: the function.
        args: its arguments.
        name: of the thread.
        daemon: whether the process may end before it does.
        silent: whether an exception of the function is kept quiet.
    """

    def quietly(*given: Any) -> None:
        try:
            target(*given)
        except Exception:  # as was asked for
            return

    thread = threading.Thread(target=quietly if silent else target, args=tuple(args), name=name, daemon=daemon)
    thread.start()
    return thread
