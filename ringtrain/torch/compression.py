"""Compression of gradients on their way to the other ranks, in the form that Horovod scripts know.

A compressor is a class with two static methods; users write their own by deriving from ``Compressor``. Those that come
with the package only name what the core does while it packs: it adds in float32 and rounds what travels between hosts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import ringtrain


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
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return (tensor.to(wire), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

        @staticmethod
        def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
            return tensor if context is None else tensor.to(context)

    Cast.__name__ = Cast.__qualname__ = name
    Cast.__doc__ = f"Sends floating-point tensors as {str(wire).removeprefix('torch.')}."
    return Cast


NoneCompressor = Compressor
FP16Compressor = _cast_to(torch.float16, "FP16Compressor")
BF16Compressor = _cast_to(torch.bfloat16, "BF16Compressor")


class Compression:
    """The compressors that come with the package: ``none``, ``fp16`` and ``bf16``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


_IN_THE_CORE = {
    Compression.none: ringtrain.Compression.none,
    Compression.fp16: ringtrain.Compression.fp16,
    Compression.bf16: ringtrain.Compression.bf16,
}


def compression_in_the_core(compressor: Any) -> str | None:
    """The core's name for what a compressor does; None for one that a user wrote, whose methods must be called."""
    return _IN_THE_CORE.get(compressor)


def compressed(
    compressor: Any,
    tensors: Sequence[torch.Tensor],
    operate: Callable[[Sequence[torch.Tensor], str], Sequence[torch.Tensor]],
) -> Sequence[torch.Tensor]:
    """Results of ``operate(tensors, compression)``, of which the core does the compression or a user's class does."""
    by_core = compression_in_the_core(compressor)
    if by_core is not None:
        return operate(tensors, by_core)
    pairs = [compressor.compress(tensor) for tensor in tensors]
    results = operate([sent for sent, _ in pairs], ringtrain.Compression.none)
    return [compressor.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]
