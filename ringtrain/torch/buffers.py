"""Buffers of a model, such as BatchNorm's running statistics, made equal on all ranks: once, or in each forward pass.

Gradients keep the parameters equal, but nothing does so for buffers: each rank's follow its own batches.
"""

from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from ringtrain._runtime.arguments import check_kind
from ringtrain._runtime.context import current, is_initialized
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, id_of, size_of
from ringtrain._runtime.submission import preparing
from ringtrain._training.adapter.checks import require_same_names
from ringtrain._training.adapter.numbering import next_number
from ringtrain.torch.eager import eager
from ringtrain.torch.functions import broadcast_in_place
from ringtrain.torch.no_sync import is_accumulating


def broadcast_buffers(
    model: torch.nn.Module,
    root_rank: int = 0,
    every_forward: bool = False,
    process_set: ProcessSet = global_process_set,
) -> RemovableHandle | None:
    """Puts the root's buffers into the model of all ranks, at once and, if asked for, before every forward pass too.

    Example:
        >>> hvd.broadcast_buffers(model)  # before evaluation on all ranks

    Args:
        model: of the same structure on all ranks; buffers of its submodules count.
        root_rank: global rank of the root.
        every_forward: whether to repeat it before each forward pass in training mode with gradients enabled, as
            ``DistributedDataParallel`` does. All ranks must then make the same number of such passes. Within an
            optimizer's ``no_sync()`` nothing is sent, but in every pass of a step of several
            (``backward_passes_per_step``) it is; in evaluation a rank may call the model alone.
        process_set: the ranks that take part.

    Returns:
        With ``every_forward`` the hook, whose ``remove()`` ends it; else None.

    Raises:
        InvalidArgumentError: something else than a model.
        MismatchError: ranks disagree about which buffers there are, or about the shape or dtype of one.
    """
    identity = id_of(process_set)
    name = f"broadcast_buffers.{next_number(current(), identity, 'broadcast_buffers')}"
    with preparing("allreduce", "broadcast_buffers.names", process_set):
        check_kind("broadcast_buffers: model must be a torch.nn.Module", model, torch.nn.Module)
        names = [buffer_name for buffer_name, _ in model.named_buffers()]
    if process_set.included():
        require_same_names("broadcast_buffers", names, process_set)
    _broadcast(model, name, root_rank, process_set)
    if not every_forward:
        return None
    return model.register_forward_pre_hook(partial(_before_forward, name, root_rank, process_set))


@eager
def _before_forward(name: str, root: int, process_set: ProcessSet, model: torch.nn.Module, inputs: tuple) -> None:
    """The hook: a partial of a plain function, so that the model can still be copied and pickled."""
    if model.training and torch.is_grad_enabled() and not is_accumulating() and is_initialized():
        _broadcast(model, name, root, process_set)


def _broadcast(model: torch.nn.Module, name: str, root: int, process_set: ProcessSet) -> None:
    buffers = {f"{name}.{buffer_name}": buffer for buffer_name, buffer in model.named_buffers()}
    if size_of(process_set) > 1 and process_set.included():
        broadcast_in_place(buffers, root, process_set)
