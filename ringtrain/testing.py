"""A world of N ranks as threads of this process: for tests and notebooks, without a launcher and without MPI."""

import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from ringtrain._binding import options
from ringtrain._binding._native import lib
from ringtrain._bootstrap import opening
from ringtrain._runtime import context as contexts
from ringtrain._runtime import stacks

__all__ = ["World"]

_FRAMES = 12  # of a rank that others wait for
# What starts a rank's function, and what looks where the others are.
_STARTING = {threading.__file__, stacks.__file__, __file__}


class World:
    """N ranks in this process. Within ``run`` the functions of ``ringtrain`` act for the rank of their thread.

    Example:
        >>> with World(4) as world:
        ...     sums = world.run(lambda rank: int(rt.allreduce(rank, op=rt.Sum)))
        >>> sums
        [6, 6, 6, 6]

    Args:
        size: number of ranks.
        layout: ranks per simulated host in rank order, such as ``"2+2"``, or ``"2+2|2+2"`` at two sites; None for one host.
        chosen: options by name, as for ``init``.
    """

    def __init__(self, size: int, layout: str | None = None, **chosen: object):
        self.size = size
        self._opened: dict[int, contexts.Context] = {}  # by rank
        self._open(layout, options.resolve({**chosen, "host_layout": layout}))
        self.contexts = [self._opened[rank] for rank in range(size)]

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls ``function(rank, *arguments)`` on every rank at once and returns the results in rank order.

        When it raises on one rank, the world is aborted so that the others end too; the first failure is raised here. An
        interrupt aborts the world as well. From Python 3.11 on the notes of what is raised say where the others were then.
        """

        def as_rank(rank: int) -> Any:
            contexts.make_current(self.contexts[rank])
            result = function(rank, *arguments)
            self.contexts[rank].settle()  # whoever waits for something by its thread
            return result

        return self._on_threads(as_rank)

    def close(self) -> None:
        """Shuts all ranks down together."""
        self._on_threads(lambda rank: self.contexts[rank].close())

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, layout: str | None, chosen: dict[str, str]) -> None:
        hub = opening.open_hub(self.size, layout or "")

        def open_rank(rank: int) -> None:
            self._opened[rank] = opening.open_in_process(hub, rank, chosen)

        try:
            self._on_threads(open_rank)
        finally:
            lib.rt_hub_close(hub)

    def _on_threads(self, function: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size
        failures: list[BaseException] = []  # in the order of time

        def body(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as problem:
                if not failures:
                    _note(problem, [thread for thread in threads if thread.name != f"rank-{rank}"])
                failures.append(problem)
                self._abort(rank, problem)

        threads = [
            threading.Thread(target=body, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as problem:  # an interrupt, or a test's timeout
            _note(problem, threads)
            for context in list(self._opened.values()):
                context.abort(f"the World was interrupted by {type(problem).__name__}")
            raise
        if failures:
            raise failures[0]
        return results

    def _abort(self, rank: int, problem: BaseException) -> None:
        context = self._opened.get(rank)
        if context is not None:
            context.abort(f"rank {rank} raised {type(problem).__name__}: {problem}")

    def __del__(self) -> None:
        # Dropped without close: its contexts are freed one after the other, and must not wait for each other then.
        for context in self._opened.values():
            context.abort("the World was dropped without close()")


def _note(problem: BaseException, threads: Iterable[threading.Thread]) -> None:
    """Adds to an error where threads are."""
    if sys.version_info >= (3, 11):
        problem.add_note(_whereabouts(threads))


def _whereabouts(threads: Iterable[threading.Thread]) -> str:
    """Where threads are: the innermost functions of each, below those that start a rank here. None that has ended is told."""
    found = stacks.of_threads(_FRAMES)
    at: dict[str, list[str]] = {}  # names of threads by their frames
    for thread in threads:
        frames = [frame for frame in found.get(thread.ident or 0, ()) if frame.filename not in _STARTING]
        if frames:
            at.setdefault("".join(traceback.StackSummary.from_list(frames).format()), []).append(thread.name)
    return "\n".join(f"{', '.join(names)} {'were' if names[1:] else 'was'} at:\n{text}" for text, names in at.items())


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
