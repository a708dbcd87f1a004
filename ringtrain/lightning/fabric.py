"""The strategy of ``Fabric``: Lightning's own for DDP, but for what becomes of model and optimizers."""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ringtrain.lightning.cluster_environment import Placed
from ringtrain.lightning.optimizers import alike, checked, distributed, silenced

if TYPE_CHECKING:  # Lightning's DDPStrategy comes behind it
    _Strategy: Any
else:
    _Strategy = object

_OF_LIGHTNING = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision", "timeout",
                 "start_method"}  # fmt: skip


class FabricOptimizers(Placed, _Strategy):
    """Makes the optimizers of ``fabric.setup`` those of ``ringtrain.torch``; otherwise as ``RingtrainStrategy``.

    Example:
        >>> fabric = Fabric(strategy=FabricStrategy(compression=hvd.Compression.int8), accelerator="cpu")
        >>> model, optimizer = fabric.setup(model, optimizer)
    """

    def __init__(self, **arguments: object):
        of_lightning = {name: arguments.pop(name) for name in _OF_LIGHTNING & arguments.keys()}
        self._arguments = checked("FabricStrategy", arguments)
        super().__init__(process_group_backend="ringtrain", **of_lightning)
        self._backward_sync_control = _Silence()
        self._names: dict[torch.Tensor, str] = {}

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Nothing is wrapped; all begin alike."""
        alike(module)
        self._names.update({parameter: name for name, parameter in module.named_parameters()})
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Makes it distributed."""
        made = distributed(super().setup_optimizer(optimizer), self._names, self._arguments)
        self._backward_sync_control.optimizers.add(made)
        return made


class _Silence:
    """What ``fabric.no_backward_sync`` asks."""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @contextmanager
    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> Iterator[None]:
        """Backward passes within it only add up."""
        with ExitStack() as stack:
            silenced(stack, self.optimizers if enabled else ())
            yield
