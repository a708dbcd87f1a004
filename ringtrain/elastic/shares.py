"""The shares of a constant batch that follow speed, as a transaction carries them: measured, told, decided, dealt.

``balance`` has the measure and the decision. What is decided between two steps holds once the next window is released, which
all ranks then know: a world may be lost when some have heard of it, who would draw what others deal otherwise.
"""

import numpy as np

from ringtrain._binding.log import logger
from ringtrain._runtime.context import current
from ringtrain._runtime.operations import allgather
from ringtrain.elastic import balance
from ringtrain.elastic.standing import Training

_SPEEDS = "ringtrain.elastic.speeds"


class Shares:
    """One rank's, from world to world; in a job whose shares are equal nothing is measured and nobody asked.

    Args:
        training: whose samples are dealt.
        balances: whether shares follow speed.
    """

    def __init__(self, training: Training, balances: bool):
        self._training = training
        self._pace = balance.Pace() if balances else None
        self._known: dict[int, list[int]] = {}  # by world, of a whole batch; those that all ranks know
        self._decided: tuple[int, list[int]] | None = None  # world, shares
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

    def end_window(self, contributors: set[int] | None) -> None:
        """A window is released; before its samples are counted."""
        if self._pace is not None:
            self._pace.note_window(self._training.weight(contributors) or 0)
        if self._decided is not None:
            world, self._known[world] = self._decided
            self._decided = None

    def deal(self, world: int) -> None:
        """The next window is dealt, as ranks of that world share it."""
        if self._pace is not None:
            self._training.share(self._known.get(world, ()))

    def is_due(self, released: int) -> bool:
        """Whether ranks tell their speeds between these two steps; the same on all."""
        return self._pace is not None and released >= self._decides_at

    def decide(self, released: int) -> None:
        """All ranks tell their speeds, and decide the same.

        Raises:
            RingtrainError: of the world.
        """
        assert self._pace is not None
        speeds = allgather(np.array([self._pace.tell()]), name=_SPEEDS).tolist()
        world, batch = current().world, self._training.batch()
        self._decides_at = released + balance.EVERY
        present = self._known.get(world) or balance.equal_shares(batch, len(speeds))
        found = balance.better(speeds, batch, present) if batch >= len(speeds) else None
        if found is None:
            return
        self._decided = world, found
        if current().rank == 0 and not self._has_told:
            self._has_told = True
            logger.warning("elastic: %s", balance.described(found, speeds))
