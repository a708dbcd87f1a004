"""The shares of a constant batch that follow speed, as a transaction carries them: measured, told, decided, dealt.

``balance`` has the measure and the decision. What is decided between two steps holds from the next window on. A world may be
lost when some ranks have decided and others have not: who has drawn by new shares tells them when they meet in the next one.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ringtrain._binding.log import logger
from ringtrain._bootstrap import membership
from ringtrain._runtime import statistics
from ringtrain._runtime.arguments import whole
from ringtrain._runtime.context import current
from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.operations import allgather
from ringtrain.elastic import balance
from ringtrain.elastic.standing import ReleaseStage, Standing, Training
from ringtrain.errors import InvalidArgumentError

_SPEEDS = "ringtrain.elastic.speeds"
_DEALINGS = "ringtrain.elastic.dealings"


def share_rules(
    sampler: str, count: int, most: int | None, multiple_of: int, cost: Sequence[float] | Callable[[int], float] | None
) -> balance.ShareRules:
    """What a sampler of so many samples is told of its shares.

    Raises:
        TypeError: what is no whole number.
        InvalidArgumentError: numbers below 1, or rules that this job's shares cannot follow.
    """
    most = None if most is None else whole(f"{sampler}: most", most)
    multiple_of = whole(f"{sampler}: multiple_of", multiple_of)
    if (most is not None and most < 1) or multiple_of < 1:
        raise InvalidArgumentError(
            f"{sampler}: most and multiple_of must be 1 at least, but are {most} and {multiple_of}. Give numbers of samples."
        )
    is_bounded = most is not None or multiple_of > 1
    if is_bounded and cost is not None:
        raise InvalidArgumentError(
            f"{sampler}: shares by cost= must be of any number of samples, but most or multiple_of was given, too. Leave one out."
        )
    member = membership.current()
    if is_bounded and member is not None and not member.balances:
        raise InvalidArgumentError(
            f"{sampler}: most and multiple_of must come with --batch balanced, where shares may differ, but this elastic job has it not. "
            "Add the flag to ringtrainrun, or leave them out."
        )
    costs = _costs(sampler, count, cost) if cost is not None else balance.ShareRules().costs
    return balance.ShareRules(most or 0, multiple_of, costs)


def _costs(sampler: str, count: int, cost: Sequence[float] | Callable[[int], float]) -> np.ndarray:
    given = [cost(index) for index in range(count)] if callable(cost) else cost
    try:
        found = np.asarray(given, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(_bad_costs(sampler, count, f"are a {type(given).__name__} of others")) from None
    if found.shape != (count,):
        raise InvalidArgumentError(_bad_costs(sampler, count, f"have the shape {found.shape}"))
    bad = np.flatnonzero(~(np.isfinite(found) & (found > 0)))
    if len(bad):
        told = f"are other ones in {len(bad)} places, first {found[bad[0]]:g} of sample {bad[0]}"
        raise InvalidArgumentError(_bad_costs(sampler, count, told))
    return balance.costs_of(found)


def _bad_costs(sampler: str, count: int, found: str) -> str:
    return (
        f"{sampler}: cost must be numbers above 0 for each of {count} samples, but they {found}. Give their lengths, or a function "
        "of an index."
    )


class Shares:
    """One rank's, from world to world; in a job whose shares are equal nothing is measured and nobody asked.

    Args:
        training: whose samples are dealt.
        balances: whether shares follow speed.
    """

    def __init__(self, training: Training, balances: bool):
        self._training = training
        self._pace = balance.Pace() if balances else None
        self._known: dict[int, list[int]] = {}  # by world, of a whole batch, where they are not equal
        self._decides_at = 0  # how much is released when ranks tell their speeds next
        self._has_told = False  # people

    def begin_exchange(self) -> None:
        """This rank may wait for others from here on."""
        if self._pace is not None:
            self._pace.begin_exchange()

    def end_exchange(self) -> None:
        """It computes from here on."""
        if self._pace is not None:
            self._pace.end_exchange()

    def enter_world(self) -> None:
        """Shares are equal again, until ranks have told their speeds before the first step."""
        self._decides_at = 0
        if self._pace is not None:
            self._pace.enter_world()

    def end_window(self) -> None:
        """A window is released; before its samples are counted."""
        if self._pace is not None:
            self._pace.note_window(self._training.work())

    def deal(self, world: int) -> None:
        """The next window is dealt, as ranks of that world share it."""
        if self._pace is not None:
            self._training.share(self._known.get(world, ()))

    def meet(self, own: Standing) -> None:
        """All tell by which shares their open windows were dealt. Where one is, in a world that some have left before they decided.

        Raises:
            RingtrainError: of the world.
        """
        if self._pace is None:
            return
        has_drawn = own.stage != ReleaseStage.IDLE
        told = allgather_object((own.dealt_in, self._known.get(own.dealt_in)) if has_drawn else None, _DEALINGS)
        open_windows = [each for each in told if each is not None]
        for world, counts in open_windows:
            if counts is not None:
                self._known[world] = counts
        needed = {world for world, _ in open_windows} | {current().world}
        self._known = {world: counts for world, counts in self._known.items() if world in needed}

    def is_due(self, released: int) -> bool:
        """Whether ranks tell their speeds between these two steps; the same on all."""
        return self._pace is not None and released >= self._decides_at

    def decide(self, released: int) -> None:
        """All ranks tell their speeds, and how much they have room for, and decide the same for the window that comes next.

        Raises:
            InvalidArgumentError: there is less room than a batch needs.
            RingtrainError: of the world.
        """
        assert self._pace is not None
        rules, batch = self._training.share_rules(), self._training.batch()
        told = allgather(np.array([[self._pace.tell(), rules.most]]), name=_SPEEDS)
        speeds, most = told[:, 0].tolist(), told[:, 1].astype(int).tolist()
        self._decides_at = released + balance.EVERY
        if batch < len(speeds):
            return
        present = self._known.get(current().world) or balance.equal_shares(batch, len(speeds))
        found = balance.better(speeds, batch, present, most, rules.multiple_of)
        statistics.note_shares(current(), found or present, speeds)
        if found is None:
            return
        self._known[current().world] = found
        self._training.share(found)
        self._tell_people(found, speeds)

    def _tell_people(self, counts: Sequence[int], speeds: Sequence[float]) -> None:
        if current().rank == 0 and not self._has_told and any(speeds):
            self._has_told = True
            logger.warning("elastic: %s", balance.described(counts, speeds))
