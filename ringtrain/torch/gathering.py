"""Rows of all ranks for a loss that every rank computes over them, as contrastive losses do: with the exact gradient."""

import torch

from ringtrain._runtime.process_sets import ProcessSet, global_process_set, size_of
from ringtrain.torch.operations import allgather


def gather_with_gradient(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """``allgather`` whose gradient is the sum over the ranks, as that of ``torch.distributed.nn.all_gather``.

    Example:
        >>> images, texts = hvd.gather_with_gradient(images), hvd.gather_with_gradient(texts)
        >>> loss = clip_loss(images @ texts.T)

    The gradient of ``allgather`` is the average, as in Horovod. With a loss of all ranks' rows on every rank, whose parameters'
    gradients ``DistributedOptimizer`` averages, the sum gives what one process has for the mean of the ranks' losses.

    Args:
        tensor: rows of this rank, of any number and one shape; floating point.
        name: identity among the ranks; numbered if it is None.
        process_set: the ranks that take part.

    Returns:
        The rows of all ranks, in rank order.
    """
    if isinstance(tensor, torch.Tensor):  # allgather has the words for what is none
        tensor = _MultipliedGradient.apply(tensor, size_of(process_set))
    return allgather(tensor, name, process_set)


class _MultipliedGradient(torch.autograd.Function):
    """The tensor, with a gradient that is multiplied by a number."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: torch.Tensor, factor: int) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None
