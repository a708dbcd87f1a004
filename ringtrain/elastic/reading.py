"""Batches made ready ahead of the step that uses them, in threads, and dropped where the samples are dealt anew."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from ringtrain._runtime.context import Context, acting_for, make_current, own

_AHEAD = 2  # batches for each worker


class Source(Protocol):
    """What is drawn from: a sampler."""

    dealing: int

    @property
    def is_looked_at(self) -> bool:
        """Whether draws count nothing."""

    def look(self) -> np.ndarray:
        """Indices of a first batch, which stays where it is."""

    def before_draw(self) -> None:
        """To be called before a batch is taken for the step that comes next."""

    def begin_ahead(self) -> int:
        """Begins to draw for later steps; what was drawn so before is given up. Returns the number of this dealing."""

    def draw_ahead(self) -> np.ndarray | None:
        """Indices of the next batch; None if none is left."""

    def take(self) -> None:
        """The earliest draw that was made ahead is used in the step that comes next."""

    def note_end(self) -> None:
        """Nothing is left."""


class Reader(Iterator[Any]):
    """What a function makes of each batch of a source.

    Args:
        source: drawn from.
        load: takes the indices of a batch.
        workers: threads that call it ahead; 0: it is called when a batch is asked for.
    """

    def __init__(self, source: Source, load: Callable[[np.ndarray], Any], workers: int):
        self._source = source
        self._load = load
        self._most = _AHEAD * workers
        self._pool = ThreadPoolExecutor(workers, "ringtrain.load", make_current, (own(),)) if workers else None
        self._ahead: deque[Future[Any]] = deque()
        self._dealing = -1  # in which these were drawn

    def __next__(self) -> Any:
        if self._source.is_looked_at:
            return self._load(self._source.look())
        self._source.before_draw()
        if self._source.dealing != self._dealing:
            self._give_up()
            self._dealing = self._source.begin_ahead()
        if self._pool is None:
            indices = self._source.draw_ahead()
            if indices is None:
                return self._end()
            self._source.take()
            return self._load(indices)
        self._fill(self._pool)
        if not self._ahead:
            return self._end()
        self._source.take()
        loaded = self._ahead.popleft()
        self._fill(self._pool)
        return loaded.result()

    def _fill(self, pool: ThreadPoolExecutor) -> None:
        while len(self._ahead) < self._most and (indices := self._source.draw_ahead()) is not None:
            self._ahead.append(pool.submit(self._load, indices))

    def _give_up(self) -> None:
        for loaded in self._ahead:
            loaded.cancel()
        self._ahead.clear()

    def _end(self) -> None:
        self._source.note_end()
        raise StopIteration

    def close(self) -> None:
        """Ends the threads; what they make at the moment is dropped."""
        self._give_up()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def __del__(self) -> None:
        self.close()


class ReadElsewhere(Iterator[Any]):
    """An iterator that acts for one rank, in whatever thread of a framework it is read.

    Args:
        make: makes the iterator that is read.
        context: of the rank, as ``context.own`` has it.
    """

    def __init__(self, make: Callable[[], Iterator[Any]], context: Context | None):
        self._context = context
        with acting_for(context):
            self._read = make()

    def __next__(self) -> Any:
        with acting_for(self._context):
            return next(self._read)
