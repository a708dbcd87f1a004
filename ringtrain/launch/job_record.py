"""Keeps what the next launcher of an elastic job must know, should this one be lost. Used by `elastic_job`."""

from __future__ import annotations

import time
from collections.abc import Callable

from ringtrain.launch.job_folder import JobFolder, Outline
from ringtrain.launch.terminal import Terminal

SECONDS_BETWEEN_TOUCHES = 3600.0  # of the record, which a cleaner of /tmp would take for forgotten


class JobRecord:
    """The record of a job in its folder. Training does not need it, so it goes on where that cannot be written.

    folder: of the job, which this launcher holds.

    Attributes:
        is_left: the job goes on without this launcher, so its folder stays.
    """

    def __init__(self, folder: JobFolder, terminal: Terminal):
        self.is_left = False
        self._folder = folder
        self._terminal = terminal
        self._is_lacking = False
        self._touch_at = time.monotonic() + SECONDS_BETWEEN_TOUCHES

    @property
    def job(self) -> str:
        """The job's name."""
        return self._folder.name

    @property
    def world(self) -> bytes:
        """The authority's record; empty before the first world."""
        return self._folder.world

    def note_world(self, record: bytes) -> None:
        """Keeps the authority's record."""

        def write() -> None:
            self._folder.world = record

        self._write(write)

    def note(self, outline: Outline) -> None:
        """Keeps which hosts there are, and all else that the next launcher must know."""
        self._write(lambda: self._folder.write(outline))

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
            self._is_lacking = False
        except OSError as error:
            if not self._is_lacking:
                self._terminal.say(
                    f"record '{self._folder.path}': it must be written anew when hosts or ranks change, but: {error.strerror or error}. "
                    "The job goes on; should this launcher be lost meanwhile, no other one can take the job up.",
                    "record-lost",
                    place=str(self._folder.path),
                )
            self._is_lacking = True

    def touch(self, now: float) -> None:
        """Keeps the files from those who remove what is old, now and then."""
        if now >= self._touch_at:
            self._folder.touch()
            self._touch_at = now + SECONDS_BETWEEN_TOUCHES

    def finish(self) -> None:
        """Removes what was written, unless the job is left to the next launcher."""
        if not self.is_left:
            self._folder.remove()
