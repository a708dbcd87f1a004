"""Numbers of the optimizers of an elastic job: the same on ranks that join as on those that have seen other worlds."""

from collections.abc import Sequence
from typing import Any

from ringtrain._runtime.context import current
from ringtrain._runtime.process_sets import global_process_set, id_of
from ringtrain._training.adapter import numbering
from ringtrain._training.session import NewWorld
from ringtrain.torch.hooks import owners


def number_anew(modes: Sequence[Any]) -> None:
    """Numbers optimizers in their order from 0, as in each world that follows: this process may have wrapped others, now gone.

    Others that still live come behind them: no two of a world share a number.
    """
    known = {id(part) for mode in modes for part in mode.parts()}
    left = [owner for owner in owners(current()) if id(owner) not in known]
    numbering.number_anew(current(), id_of(global_process_set), "optimizer")
    for mode in [*sorted(modes, key=lambda mode: mode.order()), *left]:
        mode.enter_world(NewWorld.NUMBERED)
