"""What compression has lost of one optimizer's gradients, saved and loaded: of all ranks together, or of this one alone.

The core keeps it for ``int8`` and ``int4`` (``ringtrain._training.residuals``), PowerSGD keeps it beside each parameter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringtrain._binding.log import logger
from ringtrain._training import powersgd, residuals
from ringtrain._training.arrays import Arrays
from ringtrain._training.powersgd import Beginning, Memory
from ringtrain._training.session import Session

Parts = Mapping[str, Mapping[str, Any]]  # by gradient, then by what they are


@dataclass(frozen=True)
class Feedback:
    """What is kept of the gradients of one optimizer in its present world.

    Args:
        arrays: of the framework.
        session: the rank, and the process set.
        prefix: of the optimizer's names, with the dot behind it.
        averages: whether results are averages; else sums.
        of_core: whether the core keeps something.
        memories: of PowerSGD.
        beginning: of PowerSGD; None without it.
    """

    arrays: Arrays[Any]
    session: Session
    prefix: str
    averages: bool
    of_core: bool
    memories: Sequence[Memory] = ()
    beginning: Beginning | None = None

    def of_all_ranks(self) -> dict[str, dict[str, Any]]:
        """The same on all ranks; collective. A world of any size goes on with it."""
        if self.beginning is not None:
            return powersgd.state_of_all_ranks(self.session, self.prefix, self.arrays, self.memories, self.beginning)
        if not self.of_core:
            return {}
        return self._from_host(residuals.of_all_ranks(self.session, self.averages, self.prefix))

    def load(self, state: Parts) -> None:
        """Goes on with what ``of_all_ranks`` has returned.

        Raises:
            InvalidArgumentError: it is something else, or of a model with other parameters, or of another rank.
        """
        if self.beginning is not None:
            powersgd.load_state(state, self.memories, self.beginning)
        elif self.of_core:
            residuals.load(self.session, self.averages, self.prefix, self._to_host(state))

    def of_this_rank(self) -> dict[str, Any]:
        """What this rank keeps itself, and which one it is: with it the same ranks go on with the same bits."""
        of = residuals.holder(self.session)
        if self.beginning is not None:
            kept = powersgd.state_of_this_rank(self.arrays, self.memories, self.beginning)
            return {"of": of, "kept": kept, "compresses": self.beginning.is_over}
        kept = self._from_host(residuals.of_this_rank(self.session, self.prefix))
        return {"of": of, "kept": kept} if kept else {}

    def take(self, state: Mapping[str, Any] | None) -> None:
        """Another state was loaded: goes on with what ``of_this_rank`` has returned on this rank, if that is in it."""
        if not state or state["of"] != residuals.holder(self.session):
            self.forget()
            if state:
                self._warn_of_other(state["of"])
        elif self.beginning is not None:
            powersgd.load_state(state["kept"], self.memories, self.beginning)
            self.beginning.go_on(state["compresses"])
        else:
            residuals.load_of_this_rank(self.session, self.prefix, self._to_host(state["kept"]))

    def forget(self) -> None:
        """What compression has lost before belongs to none of the gradients that follow."""
        if self.beginning is not None:
            powersgd.forget(self.memories, self.prefix)
        if self.of_core:
            residuals.forget(self.session, self.prefix)

    def settle(self, used: bool) -> None:
        """The results of a step were used, or were for nothing: so is what compression has lost of them."""
        if self.of_core:
            residuals.settle(self.session, self.prefix, used)
        powersgd.settle(self.memories, used)
        if used and self.beginning is not None:
            self.beginning.note_use()

    def _warn_of_other(self, holder: Mapping[str, int]) -> None:
        logger.warning(
            f"load_state_dict '{self.prefix.rstrip('.')}': what compression has lost was saved by {_described(holder)} and is "
            f"forgotten by {_described(residuals.holder(self.session))}. To go on with the same bits let each rank save and load its "
            "own state_dict(); with one file for all, or on other ranks, load what compression_state() has returned after it"
        )

    def _from_host(self, state: Parts) -> dict[str, dict[str, Any]]:
        return {name: {part: self.arrays.from_host(kept[part]) for part in kept} for name, kept in state.items()}

    def _to_host(self, state: Parts) -> dict[str, dict[str, Any]]:
        return {name: {part: self.arrays.to_host(parts[part]) for part in parts} for name, parts in state.items()}


def _described(holder: Mapping[str, int]) -> str:
    return f"rank {holder['rank']} of {holder['ranks']} on {holder['hosts']} hosts"
