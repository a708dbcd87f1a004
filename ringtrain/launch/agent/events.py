"""The selector of the launcher and of its agents, whose entries have a function as data."""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    import selectors


def call_ready(selector: selectors.BaseSelector, timeout: float | None) -> None:
    """Waits until something happens, and calls what is registered for it.

    One call may do away with the descriptor of another that was ready with it, as when the end of a process is heard in
    two ways. Then the other one is not called.

    Args:
        timeout: seconds to wait at most; None: as long as it takes.
    """
    registered = selector.get_map()
    for key, _ in selector.select(timeout):
        if registered.get(key.fd) is key:
            key.data()
