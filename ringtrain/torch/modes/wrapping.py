"""What ``DistributedOptimizer`` was called with, of which a mode makes itself."""

from dataclasses import dataclass
from typing import Any

import torch

from ringtrain._runtime.process_sets import ProcessSet
from ringtrain._training.grouping import Groups
from ringtrain._training.powersgd import PowerSGD
from ringtrain._training.session import Session
from ringtrain.torch.compression import Compressor, compression_in_the_core
from ringtrain.torch.drift import replicas_of
from ringtrain.torch.gradients import ReductionSettings


@dataclass(frozen=True)
class Wrapping:
    """The arguments, checked.

    Attributes:
        mode: as given, of the class that the way of training goes by.
        process_set, op, powersgd, sparse_as_dense, groups: as given.
        compressor: as given; that without compression where PowerSGD is.
        predivide: gradient_predivide_factor.
        averages_passes: average_aggregated_gradients.
        known: named_parameters by parameter; None without.
        names: the optimizer's parameters in its order, with their names.
        user_class: the optimizer's class as the user made it.
    """

    mode: Any
    process_set: ProcessSet
    op: int
    compressor: type[Compressor]
    powersgd: PowerSGD | None
    predivide: float
    sparse_as_dense: bool
    averages_passes: bool
    groups: Groups
    known: dict[torch.Tensor, str] | None
    names: dict[torch.Tensor, str]
    user_class: type

    @property
    def by_core(self) -> str | None:
        """The compression, if it is the core's; None for a class of the user's."""
        return compression_in_the_core(self.compressor)

    def settings(
        self, optimizer: torch.optim.Optimizer, members: ProcessSet, is_plain: bool = False
    ) -> ReductionSettings:
        """How gradients are combined over these ranks; plainly, without compression."""
        return ReductionSettings(
            session=Session(members),
            mode=" with ".join(self.mode.columns),
            op=self.op,
            prescale=1.0 / self.predivide,
            postscale=self.predivide,
            compression="none" if is_plain else self.by_core or "none",
            compressor=None if is_plain or self.by_core else self.compressor,
            sparse_as_dense=self.sparse_as_dense,
            powersgd=self.powersgd,
            make_replica=replicas_of(optimizer) if self.mode.compares else None,
        )
