"""What is seen of a drawn job from outside, and what its ranks have noted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

MOST_PRINTED = 3000  # characters of each stream


@dataclass(frozen=True)
class Heard:
    """The error that a rank's program ended with: its class, its text, and the seconds from the fault."""

    kind: str
    text: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """How a job went.

    Attributes:
        code: exit code of ringtrainrun, as a shell tells it; None if it had not ended in time and was killed.
        seconds: from the fault, or from the moment for it, until the launcher's end.
        struck: whether the fault happened; a job may end before, when its output is not read for instance.
        stdout, stderr: what the launcher wrote; of a terminal all is in stderr.
        heard: by rank, what it was told; a rank that was ended first has nothing here.
        files: what is in the files of --output-filename, by rank.
        left: processes, sockets, shared memory and temporary files that were still there afterwards, a line each.
        load: how much longer than on a quiet machine things may take.
    """

    code: int | None = 0
    seconds: float = 1.0
    struck: bool = True
    stdout: str = ""
    stderr: str = ""
    heard: Mapping[int, Heard] = field(default_factory=dict)
    files: Mapping[int, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    load: float = 1.0

    def brief(self) -> Outcome:
        """The same with the last words alone, to be printed."""
        return replace(self, stdout=self.stdout[-MOST_PRINTED:], stderr=self.stderr[-MOST_PRINTED:], files={})

    def lines(self) -> Iterator[str]:
        """All lines that the launcher wrote, those of stderr last."""
        yield from self.stdout.splitlines()
        yield from self.stderr.splitlines()
