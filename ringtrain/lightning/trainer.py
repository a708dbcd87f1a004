"""The strategy of ``Trainer``: Lightning's own for DDP, but for what becomes of model and optimizers."""

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

_OF_LIGHTNING = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "timeout",
                 "start_method"}  # fmt: skip


class TrainerOptimizers(Placed, _Strategy):
    """Trains with ``ringtrain.torch.DistributedOptimizer`` around the optimizers of the module.

    Example:
        >>> strategy = RingtrainStrategy(compression=hvd.Compression.int8)
        >>> Trainer(strategy=strategy, accelerator="cpu", accumulate_grad_batches=4)

    The module is not wrapped: parameters without a gradient on some ranks need no flag. Metrics, samplers and barriers use
    torch.distributed over the backend "ringtrain".

    Args:
        arguments: those of ``DistributedOptimizer``: ``compression``, ``groups``, ``op`` and others. Of Lightning's
            strategies: ``accelerator``, ``parallel_devices``, ``cluster_environment``, ``checkpoint_io``,
            ``precision_plugin``, ``timeout`` and ``start_method``.

    Raises:
        InvalidArgumentError: an argument that must be given elsewhere.
    """

    optimizers: list[torch.optim.Optimizer]

    def __init__(self, **arguments: object):
        of_lightning = {name: arguments.pop(name) for name in _OF_LIGHTNING & arguments.keys()}
        self._arguments = checked("RingtrainStrategy", arguments)
        super().__init__(process_group_backend="ringtrain", **of_lightning)

    def configure_ddp(self) -> None:
        """Nothing is wrapped; all begin alike."""
        alike(self.model)

    def setup_optimizers(self, trainer: object) -> None:
        """Makes those of the module distributed."""
        super().setup_optimizers(trainer)
        names = {parameter: name for name, parameter in self.lightning_module.named_parameters()}
        self.optimizers = [distributed(optimizer, names, self._arguments) for optimizer in self.optimizers]

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While batches are accumulated."""
        with ExitStack() as stack:
            silenced(stack, self.optimizers)
            yield
