"""Accelerate's Accelerator, but for what becomes of model and optimizers."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import accelerate
import torch
from accelerate.utils import DistributedType
from torch.utils.weak import WeakTensorKeyDictionary

from ringtrain._training.adapter.basics import is_initialized, size
from ringtrain._training.optimizer_arguments import check_trainers_arguments
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.torch import DistributedOptimizer, broadcast_parameters

_SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
_REFUSED = {
    "backward_passes_per_step": "Let Accelerate accumulate: gradient_accumulation_steps.",
    "named_parameters": "The model that is prepared has them.",
}


class Accelerator(accelerate.Accelerator):
    """An ``accelerate.Accelerator`` that averages gradients by ``ringtrain.torch.DistributedOptimizer``.

    Example:
        >>> torch.distributed.init_process_group("ringtrain")
        >>> accelerator = Accelerator(cpu=True, distributed_optimizer={"compression": hvd.Compression.int8})
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    ``prepare`` gives all ranks the parameters of rank 0, wraps no model, and makes optimizers distributed. Parameters
    without a gradient on some ranks need no flag. Hand it the model before the optimizer, so that errors have the
    parameters' names.

    Args:
        arguments: those of ``accelerate.Accelerator``.
        distributed_optimizer: arguments for ``DistributedOptimizer``: ``compression``, ``groups``, ``op`` and others.

    Raises:
        InvalidArgumentError: an argument that must be given elsewhere; no world of ringtrain's is open; or Accelerate does
            not see its ranks.
        UnsupportedError: Accelerate is to shard the model, as by FSDP.
    """

    def __init__(self, *arguments: object, distributed_optimizer: Mapping[str, object] | None = None, **named: object):
        super().__init__(*arguments, **named)
        adopt(self, distributed_optimizer)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Places it as Accelerate does, and gives all ranks the parameters and buffers of rank 0."""
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)  # nothing is wrapped
        if not evaluation_mode:
            broadcast_parameters(model, root_rank=0)
            self._names.update({parameter: name for name, parameter in model.named_parameters()})
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> accelerate.optimizer.AcceleratedOptimizer:
        """Makes it distributed, unless it is."""
        is_ours = hasattr(optimizer, "skip_synchronize") or getattr(optimizer, "_is_accelerate_prepared", False)
        ours = optimizer if is_ours else self._distributed(optimizer)
        return super().prepare_optimizer(ours, device_placement)

    def _distributed(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        named = [(self._names[parameter], parameter) for parameter in parameters if parameter in self._names]
        all_named = named if len(named) == len(parameters) else None
        return DistributedOptimizer(optimizer, all_named, **self._distributed_arguments)

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Backward passes within it only add up; ``accumulate`` asks for it."""
        with ExitStack() as stack:
            for prepared in self._optimizers:
                stack.enter_context(prepared.optimizer.no_sync())
            yield


def adopt(accelerator: accelerate.Accelerator, distributed_optimizer: Mapping[str, object] | None) -> None:
    """Makes an Accelerator one of this class, which has prepared nothing yet; arguments and errors are the class's."""
    arguments = dict(distributed_optimizer or {})
    check_trainers_arguments("Accelerator", arguments, _REFUSED, "accelerate")
    if not is_initialized():
        raise InvalidArgumentError(
            "Accelerator: ringtrain's world must be open, but is not. Call "
            "torch.distributed.init_process_group('ringtrain') before anything of Accelerate's."
        )
    if accelerator.distributed_type in _SHARDING:
        raise UnsupportedError(
            f"Accelerator: Accelerate must leave the model whole, but is to use {accelerator.distributed_type.value}. "
            "Take accelerate.Accelerator for that; the backend 'ringtrain' serves FSDP."
        )
    if accelerator.num_processes != size():
        raise InvalidArgumentError(
            f"Accelerator: Accelerate must see all {size()} ranks, but sees {accelerator.num_processes}. "
            "On CPUs say so: Accelerator(cpu=True), TrainingArguments(use_cpu=True)."
        )
    accelerator.__class__ = Accelerator
    accelerator._names = WeakTensorKeyDictionary()
    accelerator._distributed_arguments = arguments
