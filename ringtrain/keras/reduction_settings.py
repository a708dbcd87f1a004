"""How the gradients of one Keras optimizer are combined: the arguments of ``DistributedOptimizer``, and what follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass

from ringtrain._runtime.operations import Average
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, is_alone
from ringtrain._training.grouping import Groups
from ringtrain._training.mode import SYNCHRONOUS, LocalSteps, Mode, OneStepLate
from ringtrain._training.on_host import HostSettings
from ringtrain._training.powersgd import PowerSGD
from ringtrain.keras.backends import backend
from ringtrain.keras.types import Compression, Layer


@dataclass(frozen=True)
class Settings:
    """The arguments of ``DistributedOptimizer`` that say how gradients are combined."""

    compression: Compression = None
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    op: int = Average
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    groups: Groups = None
    process_set: ProcessSet = global_process_set
    local_layers: Sequence[Layer] = ()
    scale_local_gradients: bool = True
    mode: Mode = SYNCHRONOUS

    @property
    def local(self) -> LocalSteps | None:
        """How workers average, where that is the mode."""
        return self.mode if isinstance(self.mode, LocalSteps) else None

    @property
    def late(self) -> bool:
        """Whether an update applies the gradients of the one before."""
        return isinstance(self.mode, OneStepLate)

    @property
    def alone(self) -> bool:
        """Whether there is nobody to combine with: a world of one, or a set that this rank is no member of."""
        return is_alone(self.process_set) or not self.process_set.included()

    @property
    def travels(self) -> bool:
        """Whether gradients go through the core: to others, or in a world of one to come back one step late."""
        return not self.alone or (self.late and bool(self.process_set.included()))

    @property
    def powersgd(self) -> PowerSGD | None:
        """How gradients are approximated; None if they are not."""
        return self.compression if isinstance(self.compression, PowerSGD) else None

    @property
    def on_host(self) -> HostSettings | None:
        """How they are reduced on the host; None where the backend does it."""
        if self.powersgd is None and not self.late:
            return None
        return HostSettings(
            averages=self.op == Average,
            prescale=1.0 / self.gradient_predivide_factor,
            postscale=self.gradient_predivide_factor,
            compression="none" if self.powersgd is not None else backend.wire_of(self.compression) or "none",
            powersgd=self.powersgd,
            late=self.late,
        )

    def terms(self) -> dict[str, object]:
        """What ranks compare before ``fit``."""
        powersgd = None if self.powersgd is None else repr(self.powersgd)
        wire = None if self.powersgd is not None else backend.wire_of(self.compression)
        return {"mode": self.mode.name, **self.mode.terms(), "powersgd": powersgd, "compression": wire, **self.passes()}

    def passes(self) -> dict[str, bool | int]:
        """What becomes of the gradients of several passes, which ranks compare in steps too."""
        return {
            "backward_passes_per_step": self.backward_passes_per_step,
            "average_aggregated_gradients": self.average_aggregated_gradients and self.backward_passes_per_step > 1,
        }
