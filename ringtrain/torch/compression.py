"""Compression of gradients on their way to the other ranks, in the form that Horovod scripts know.

A compressor is a class with two static methods; users write their own by deriving from ``Compressor``. Those that come
with the package only name what the core does while it packs: it adds in float32 and rounds what travels between hosts.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

import ringtrain
from ringtrain._runtime.operations import WithFeedback
from ringtrain._training.optimizer_arguments import check_compressor
from ringtrain._training.powersgd import PowerSGD
from ringtrain.errors import InvalidArgumentError


class Compressor:
    """Sends tensors as they are, and is the base of all compressors."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and whatever ``decompress`` needs to undo it."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """The received tensor as the caller knows it."""
        return tensor


def _cast_to(wire: torch.dtype, name: str) -> type[Compressor]:
    """A compressor that sends floating-point tensors as ``wire`` and leaves all others alone."""

    class Cast(Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
            return (tensor.to(wire), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

        @staticmethod
        def decompress(tensor: torch.Tensor, context: torch.dtype | None) -> torch.Tensor:
            return tensor if context is None else tensor.to(context)

    Cast.__name__ = Cast.__qualname__ = name
    Cast.__doc__ = f"Sends floating-point tensors as {str(wire).removeprefix('torch.')}."
    return Cast


def _in_blocks(in_the_core: WithFeedback, name: str, form: str) -> type[Compressor]:
    """A compressor whose form exists on the wire alone: ``compress`` and ``decompress`` leave a tensor as it is."""
    described = f"Sends floating-point tensors of 4,096 elements or more as {form}, where the core reduces"

    def made(name: str, wire: str, words: str, **more: type[Compressor]) -> type[Compressor]:
        compressor = type(name, (Compressor,), {"__module__": __name__, "__doc__": words, **more})
        _IN_THE_CORE[compressor] = wire
        return compressor

    plain = made(f"{name}WithoutFeedback", in_the_core.without_feedback, f"{described}.")
    return made(name, in_the_core, f"{described}, and makes up for what it loses.", without_feedback=plain)


_IN_THE_CORE: dict[type[Compressor], str] = {}  # the core's name for what a compressor does
NoneCompressor = Compressor
FP16Compressor = _cast_to(torch.float16, "FP16Compressor")
BF16Compressor = _cast_to(torch.bfloat16, "BF16Compressor")


class Compression:
    """The compressors that come with the package: ``none``, ``fp16``, ``bf16``, ``int8``, ``int4`` and ``powersgd(rank)``.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(
        ...     optimizer, model.named_parameters(), compression=hvd.Compression.int8
        ... )

    ``int8`` and ``int4`` make up for what they lose of a gradient when it comes again; ``int8.without_feedback`` does
    not. ``powersgd(rank=2)`` does too, and is for a ``DistributedOptimizer`` alone.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = _in_blocks(ringtrain.Compression.int8, "Int8Compressor", "int8 with a scale for each 256")
    int4 = _in_blocks(ringtrain.Compression.int4, "Int4Compressor", "4 bits with a scale for each 128")
    powersgd = PowerSGD


_IN_THE_CORE |= {
    Compression.none: ringtrain.Compression.none,
    Compression.fp16: ringtrain.Compression.fp16,
    Compression.bf16: ringtrain.Compression.bf16,
}


def compression_in_the_core(compressor: type[Compressor]) -> str | None:
    """The core's name for what a compressor does; None for one that a user wrote, whose methods must be called."""
    return _IN_THE_CORE.get(compressor)


def compressed(
    compressor: type[Compressor],
    tensors: Sequence[torch.Tensor],
    operate: Callable[[Sequence[torch.Tensor], str], Sequence[torch.Tensor]],
    before: AbstractContextManager,
) -> Sequence[torch.Tensor]:
    """Results of ``operate(tensors, compression)``, of which the core does the compression or a user's class does.

    ``before`` is around what that class does before the operation (``ringtrain._runtime.submission.preparing``).
    """
    with before:
        if isinstance(compressor, PowerSGD):
            raise InvalidArgumentError(
                f"compression must be one that needs no memory, but is {compressor!r}. Give it to a DistributedOptimizer."
            )
        check_compressor(compressor)
        by_core = compression_in_the_core(compressor)
        pairs = [] if by_core is not None else [compressor.compress(tensor) for tensor in tensors]
    if by_core is not None:
        return operate(tensors, by_core)
    results = operate([sent for sent, _ in pairs], ringtrain.Compression.none)
    return [compressor.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]
