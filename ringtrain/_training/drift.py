"""Drift: ranks that train apart, because they step with other settings or have other parameters, are told so.

Each rank has a ``ComparedReplica`` for an optimizer in a world, and the rounds carry what it tells: always a digest of
the settings that it is going to step with and one of those of its last update, now and then one of the parameters as
that has left them. These are compared after the first update in a world, and then once a second, or so seldom that it
takes a thousandth of the time. Any rank asks for that, and all ranks tell in the round after the next update.
"""

import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringtrain._training.adapter.checks import hashed

Settings = Mapping[str, Any]
Named = Sequence[tuple[str, Any]]

PERIOD = 1.0  # seconds between two comparisons of parameters; 0, of tests: in each step
SHARE = 1e-3  # of the time, which they take at most


class Told(NamedTuple):
    """What a rank tells of its replica in a round; None where it does not.

    Attributes:
        settings: digest of what it steps with next.
        last_settings: digest of what it made its last update with.
        parameters: digest of all parameters.
        asks: whether parameters are to be compared after the next update.
    """

    settings: int | None = None
    last_settings: int | None = None
    parameters: int | None = None
    asks: bool = False


NOTHING = Told()


class Shown(NamedTuple):
    """What ``Told`` has the digests of: settings, and a digest of each parameter, int64."""

    settings: Settings | None = None
    last_settings: Settings | None = None
    digests: np.ndarray | None = None


class Words(NamedTuple):
    """What things are called in a framework.

    Attributes:
        broadcast: what gives all ranks one state.
        wrapper: what has the argument ``replicas``.
    """

    broadcast: str
    wrapper: str = "DistributedOptimizer"


def kind_of_processor() -> str:
    """What the kernel calls it, such as ``AMD EPYC 9R14``; the architecture where it has no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # a container may have processes alone in /proc
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def kind_with_cores(library: str, gpu: str | None) -> str:
    """What the bits of a library depend on that divides sums among cores: processor or GPU, its release, and how many cores."""
    return f"{gpu or kind_of_processor()}, {library}, {len(os.sched_getaffinity(0))} cores"


class Forms(NamedTuple):
    """How a framework's parameters are read.

    Attributes:
        digest: of one of them; any two that differ in a bit have others.
        on_host: copies one of them into an array of float32 or float64.
        processor: of which kind that is, on which updates are computed.
    """

    digest: Callable[[Any], int]
    on_host: Callable[[Any], np.ndarray]
    processor: Callable[[], str] = kind_of_processor


class ComparedReplica:
    """What one rank's optimizer has, in one world, that must be the same on all ranks.

    Args:
        read_settings: reads what it steps with, as ``flat_settings`` returns it.
        read_parameters: lists the parameters with their names, in one order on all ranks.
        forms: how they are read.
        called: what things are called in the framework.
        clock: in seconds.
        beside: seconds that a look at these parameters takes more than is seen here.

    Attributes:
        called: as given.
        processor: that of the forms.
        compares: whether parameters are compared.
        shown: what was told last; the round may be over after a further update.
    """

    def __init__(
        self, read_settings: Callable[[], Settings], read_parameters: Callable[[], Named],
        forms: Forms, called: Words, clock: Callable[[], float] = time.monotonic,
        beside: Callable[[Named], float] = lambda _: 0.0,
    ):  # fmt: skip
        self.called, self.processor = called, forms.processor
        self.compares = True
        self.shown = Shown()
        self._last_settings: Settings | None = None  # of the last update, if that was every rank's
        self._digests: np.ndarray | None = None  # of the parameters as it has left them, if they are compared now
        self._read_settings, self._read_parameters = read_settings, read_parameters
        self._forms, self._clock = forms, clock
        self._beside = beside
        self._digested: tuple[Settings, int] = {}, digest_of({})  # most steps have the settings of the one before
        self._wanted = True  # after the first update
        self._compared_at, self._cost = clock(), 0.0

    def tell(self, comes_alike: bool) -> Told:
        """For a round that begins.

        Args:
            comes_alike: whether it begins between the same two lines of the program as on the other ranks that tell: only
                then the settings of now are told.
        """
        self.shown = Shown(self._read_settings() if comes_alike else None, self._last_settings, self._digests)
        settings, last, digests = self.shown
        return Told(
            None if settings is None else self._digest_of(settings),
            None if last is None else self._digest_of(last),
            None if digests is None else hashed(digests.tobytes()),
            self._is_due(),
        )

    def hear(self, any_asks: bool) -> None:
        """The round is over; ``any_asks``: whether any rank asks for a comparison of what the next update leaves."""
        self._wanted |= any_asks

    def note_step(self) -> None:
        """An update was made.

        Here the parameters are what training makes of them; at other places a program may have changed them for a while, as
        sharpness-aware minimisation does.
        """
        self._last_settings = self._read_settings()
        self._digests = self._measured_digests() if self._wanted and self.compares else None
        self._wanted = False

    def forget_step(self) -> None:
        """The others may have made updates since the last one of this rank."""
        self._last_settings = self._digests = None

    def names(self) -> list[str]:
        """Of the parameters."""
        return [name for name, _ in self._read_parameters()]

    def values(self, place: int) -> np.ndarray:
        """Those of one parameter, float32 or float64."""
        return self._forms.on_host(self._read_parameters()[place][1])

    def _digest_of(self, settings: Settings) -> int:
        if settings is not self._digested[0] and settings != self._digested[0]:
            self._digested = settings, digest_of(settings)
        return self._digested[1]

    @property
    def costs_little(self) -> bool:
        """Whether a look at the parameters takes less than its share of the time since the last one."""
        return self._clock() - self._compared_at >= self._cost / SHARE

    @property
    def seconds_left(self) -> float:
        """Until the parameters are to be compared again; none are left when they are."""
        if not self.compares:
            return math.inf
        return max(PERIOD, self._cost / SHARE) - (self._clock() - self._compared_at)

    def _is_due(self) -> bool:
        return self.seconds_left <= 0

    def _measured_digests(self) -> np.ndarray:
        began = self._clock()
        parameters = self._read_parameters()
        digests = np.array([self._forms.digest(tensor) for _, tensor in parameters], np.int64)
        self._compared_at = self._clock()
        self._cost = self._compared_at - began + self._beside(parameters)
        return digests


def digest_of(settings: Settings) -> int:
    """63 bits of settings, in whatever order they come."""
    return hashed(repr(sorted(settings.items())).encode())


def flat_settings(groups: Sequence[Mapping[str, Any]]) -> Settings:
    """Settings of groups of parameters under the names that errors call them by.

    Args:
        groups: values by name, as JSON has them; None for one that is not compared.
    """
    flat = {}
    for place, group in enumerate(groups):
        behind = f" of group {place}" if len(groups) > 1 else ""
        for name, value in group.items():
            if value is not None:
                flat[name + behind] = float(value) if type(value) is int else value  # 1 is 1.0
    return flat
