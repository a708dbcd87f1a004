"""Runs scripts of many seeds, and tells those that fail in as few words as they allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringtrain.testing import World
from training.shrinking import Language, shrunk


@dataclass(frozen=True)
class Fuzzer:
    """Runs the scripts of a framework.

    Attributes:
        scripts: which there are.
        verdict: what is wrong with a script; "" if nothing is.
    """

    scripts: Language
    verdict: Callable[[Any], str]

    def failures(self, seeds: Iterable[int], most_shrunk: int = 3) -> Iterator[str]:
        """What fails, with its seed; the first ones made small."""
        for seed in seeds:
            if told := self.judged(self.scripts.drawn(seed)):
                if most_shrunk > 0:
                    small, said = self.shrunk(seed)
                    told = f"{told}\n  shrunk: {said}\n  {small}"
                    most_shrunk -= 1
                yield f"seed {seed}: {told}"

    def shrunk(self, seed: int) -> tuple[Any, str]:
        """The smallest script found that fails as that of a seed does, and how it does."""
        return shrunk(self.scripts.drawn(seed), self.judged, self.scripts.smaller)

    def judged(self, script: Any) -> str:
        """The verdict; of a script that its framework alone refuses, how."""
        try:
            return self.verdict(script)
        except Exception as problem:
            return f"refused in one process: {type(problem).__name__}: {problem}"

    def first_failing_average(self, seeds: Iterable[int]) -> int:
        """The first seed whose script averages, and fails."""
        drawn = self.scripts.drawn
        return next(seed for seed in seeds if drawn(seed).op == "average" and self.verdict(drawn(seed)))

    def finds_something(self, seeds: Iterable[int]) -> bool:
        """Whether a script of these fails, as one must with a planted fault."""
        return any(self.verdict(self.scripts.drawn(seed)) for seed in seeds)

    def require_readable(self, seeds: Iterable[int], names: Mapping[str, Any]) -> None:
        """Each script is read as it is written and drawn again, and what is smaller is legal, and another one.

        Args:
            seeds: whose scripts.
            names: of the module that has their classes.
        """
        for seed in seeds:
            script = self.scripts.drawn(seed)
            assert eval(repr(script), dict(names)) == self.scripts.drawn(seed) and not self.scripts.why_illegal(script)
            assert all(not self.scripts.why_illegal(each) and each != script for each in self.scripts.smaller(script))

    def hold(self, seeds: Iterable[int]) -> None:
        """Fails with the scripts that do."""
        failures = list(self.failures(seeds))
        assert not failures, "\n".join(failures)


def on_ranks(ranks: int, layout: str, stall_seconds: float, run: Callable[[int], Any]) -> list[Any]:
    """What a function returns on each rank of a world of threads."""
    with World(ranks, layout or None, stall_abort_seconds=stall_seconds) as world:
        return world.run(run)


def difference(
    found: Callable[[], Sequence[Sequence[np.ndarray]]],
    expected: Sequence[Sequence[np.ndarray]],
    tolerance: float,
    shared: int | None = None,
    twins: Sequence[int] | None = None,
) -> str:
    """What is wrong with the parameters of ranks; "" if nothing is.

    Args:
        found: runs the ranks; returns each one's parameters after each turn.
        expected: the same, of one process.
        tolerance: of each number.
        shared: how many numbers, from the first on, are the same on all ranks, bit by bit; None: all.
        twins: of each rank the one whose numbers it has; None: rank 0's.
    """
    try:
        seen = found()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    for turn, theirs in enumerate(zip(*expected, strict=True)):
        for rank, wanted in enumerate(theirs):
            own, twin = seen[rank][turn], 0 if twins is None else twins[rank]
            if not np.array_equal(own[:shared], seen[twin][turn][:shared]):
                return f"replicas differ: ranks {twin} and {rank} after turn {turn}"
            error = np.abs(own - wanted).max()
            if not error <= tolerance:
                return f"wrong: rank {rank} is off by {error:.2g} after turn {turn}"
    return ""
