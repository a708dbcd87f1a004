"""What a state without gradients of a framework's own goes on with in another world."""

from collections.abc import Iterable, Sequence
from typing import Any

from ringtrain._runtime.objects import broadcast_object
from ringtrain.elastic.adapters import enter_world
from ringtrain.elastic.balance import ShareRules
from ringtrain.elastic.lossless import require_one_sampler
from ringtrain.elastic.sampler import BatchSampler
from ringtrain.elastic.values import StateValues

_OBJECTS = "ringtrain.elastic.objects"


class StateTraining:
    """What the transaction of a state goes on with; it owns nothing.

    sampler: of the state; None without one. given: attributes of the state that ranks take over beside its values.
    """

    def __init__(self, state: object, values: StateValues, sampler: BatchSampler | None, given: Sequence[str]):
        self._state, self._values, self._given = state, values, given
        self._sampler = sampler

    def enter_world(self) -> None:
        """Tells the frameworks."""
        enter_world(self._values.all())

    def outline(self) -> dict[str, str]:
        """What the frameworks' values are; arrays and plain ones may be others on rank 0, and take the place of these."""
        found = dict.fromkeys(self._values.names, "a value")
        for adapter, values in self._values.by_adapter().items():
            found |= adapter.outline(values)
        return found

    def take_state(self) -> None:
        """Takes the values of rank 0."""
        by_adapter = self._values.by_adapter()
        given = {name: getattr(self._state, name) for name in self._given}
        for name, value in broadcast_object(self._values.plain() | given, 0, _OBJECTS).items():
            self._values.take(name, value)
        for adapter, values in by_adapter.items():
            adapter.take_over(values)

    def deal(self, size: int, place: int) -> None:
        """Deals the samples of the next window; without a sampler they are the script's."""
        if self._sampler is not None:
            self._sampler.deal(size, place)

    def batch(self) -> int:
        """Samples of a batch on all ranks together."""
        return 0 if self._sampler is None else self._sampler.batch

    def share_rules(self) -> ShareRules:
        """What the sampler was told."""
        return ShareRules() if self._sampler is None else self._sampler.share_rules

    def work(self) -> float:
        """What this rank does in the open window, in samples; without a sampler nobody knows."""
        return 0.0 if self._sampler is None else self._sampler.work

    def share(self, counts: Sequence[int]) -> None:
        """Deals so many of them to each place; without a sampler they are the script's."""
        if self._sampler is not None:
            self._sampler.share(counts)

    def drawn(self) -> str:
        """What this rank has drawn for the open window."""
        return "" if self._sampler is None else self._sampler.drawn

    def finish_window(self, contributors: set[int] | None) -> None:
        """Counts the samples of a window."""
        if self._sampler is not None:
            self._sampler.finish_window(contributors)

    def weight(self, contributors: set[int] | None) -> int | None:
        """The samples of this rank, where shares differ; without a sampler all count alike, unless the script says otherwise."""
        return None if self._sampler is None else self._sampler.weight(contributors)


def only_sampler(values: Iterable[Any]) -> BatchSampler | None:
    """The one that deals the samples, if there is one. Raises InvalidArgumentError."""
    samplers = [value for value in values if isinstance(value, BatchSampler)]
    require_one_sampler("BatchSampler", len(samplers))
    return samplers[0] if samplers else None
