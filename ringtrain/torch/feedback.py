"""What compression has lost of one optimizer's gradients, saved and loaded: of all ranks together, or of this one alone.

The core keeps it for ``int8`` and ``int4`` (``ringtrain.gradients.residuals``), PowerSGD keeps it beside each parameter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringtrain.gradients import residuals
from ringtrain.gradients.powersgd import Beginning
from ringtrain.log import logger
from ringtrain.torch import powersgd
from ringtrain.torch.gradients import ReductionSettings
from ringtrain.torch.powersgd import Memory

Parts = Mapping[str, Mapping[str, torch.Tensor]]  # by gradient, then by what they are


@dataclass(frozen=True)
class Feedback:
    """What is kept of the gradients of one optimizer in its present world.

    Args:
        settings: how gradients are combined.
        prefix: of the optimizer's names.
        memories: of PowerSGD.
        beginning: of PowerSGD; None without it.
    """

    settings: ReductionSettings
    prefix: str
    memories: Sequence[Memory] = ()
    beginning: Beginning | None = None

    def of_all_ranks(self) -> dict[str, dict[str, torch.Tensor]]:
        """The same on all ranks; collective. A world of any size goes on with it."""
        session = self.settings.session
        if self.beginning is not None:
            return powersgd.state_of_all_ranks(session, self.prefix, self.memories, self.beginning)
        if not self.settings.keeps_residuals:
            return {}
        return _tensors(residuals.of_all_ranks(session, self.settings.averages, f"{self.prefix}."))

    def load(self, state: Parts) -> None:
        """Goes on with what ``of_all_ranks`` has returned."""
        if self.beginning is not None:
            powersgd.load_state(state, self.memories, self.beginning)
        if self.settings.keeps_residuals:
            residuals.load(self.settings.session, self.settings.averages, f"{self.prefix}.", _arrays(state))

    def of_this_rank(self) -> dict[str, Any]:
        """What this rank keeps itself, and which one it is: with it the same ranks go on with the same bits."""
        of = residuals.holder(self.settings.session)
        if self.beginning is not None:
            kept = powersgd.state_of_this_rank(self.memories, self.beginning)
            return {"of": of, "kept": kept, "compresses": self.beginning.is_over}
        kept = _tensors(residuals.of_this_rank(self.settings.session, f"{self.prefix}."))
        return {"of": of, "kept": kept} if kept else {}

    def take(self, state: Mapping[str, Any] | None) -> None:
        """Another state was loaded: goes on with what ``of_this_rank`` has returned on this rank, if that is in it."""
        session = self.settings.session
        if not state or state["of"] != residuals.holder(session):
            self.forget()
            if state:
                self._warn_of_other(state["of"])
        elif self.beginning is not None:
            powersgd.load_state(state["kept"], self.memories, self.beginning)
            self.beginning.go_on(state["compresses"])
        else:
            residuals.load_of_this_rank(session, f"{self.prefix}.", _arrays(state["kept"]))

    def forget(self) -> None:
        """What compression has lost before belongs to none of the gradients that follow."""
        if self.beginning is not None:
            powersgd.forget(self.memories, self.prefix)
        if self.settings.keeps_residuals:
            residuals.forget(self.settings.session, f"{self.prefix}.")

    def _warn_of_other(self, holder: Mapping[str, int]) -> None:
        logger.warning(
            f"load_state_dict '{self.prefix}': what compression has lost was saved by {_described(holder)} and is forgotten by "
            f"{_described(residuals.holder(self.settings.session))}. To go on with the same bits let each rank save and load its "
            "own state_dict(); with one file for all, or on other ranks, load what compression_state() has returned after it"
        )


def _described(holder: Mapping[str, int]) -> str:
    return f"rank {holder['rank']} of {holder['ranks']} on {holder['hosts']} hosts"


def _tensors(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {part: torch.from_numpy(kept[part]) for part in kept} for name, kept in state.items()}


def _arrays(state: Parts) -> dict[str, dict[str, Any]]:
    return {name: {part: parts[part].cpu().numpy() for part in parts} for name, parts in state.items()}
