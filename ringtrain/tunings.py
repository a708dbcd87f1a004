"""Which settings hold now, and when they have changed: ``ringtrain.tuning``."""

from collections.abc import Sequence
from typing import NamedTuple

from ringtrain.context import current


class Change(NamedTuple):
    """Settings that all ranks have taken up together.

    Attributes:
        operations: of the world that had been agreed on before, with tensors; the same number on all ranks.
        settings: options by name, from there on.
    """

    operations: int
    settings: dict[str, int]


class Tuning(NamedTuple):
    """What ``tuning`` returns, since ``init``.

    Attributes:
        state: of rank 0, which decides: ``learning`` what a step is, ``searching``, ``tuned``, ``remembered`` from a job before,
            ``stopped`` because no step came any more; ``off`` without option ``autotune``, and on the other ranks.
        settings: options by name, as they are now.
        changes: the earliest first.
    """

    state: str
    settings: dict[str, int]
    changes: list[Change]


def tuning() -> Tuning:
    """The settings that option ``autotune`` may change while a world is open.

    Example:
        >>> rt.init(autotune=1)
        >>> train()
        >>> if rt.rank() == 0:
        ...     print(rt.tuning().state, rt.tuning().settings)
    """
    return from_lines(current().tuned())


def from_lines(lines: Sequence[str]) -> Tuning:
    """``tuning()`` of what the core has said; pure.

    Example:
        >>> from_lines(["searching|burst_bytes=5", "24|burst_bytes=5"]).changes
        [Change(operations=24, settings={'burst_bytes': 5})]
    """
    rows = [line.split("|") for line in lines]
    changes = [Change(int(operations), _settings(text)) for operations, text in rows[1:]]
    return Tuning(rows[0][0], _settings(rows[0][1]), changes)


def _settings(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in (part.split("=") for part in text.split(","))}
