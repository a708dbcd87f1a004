"""Compression of gradients on their way to the other ranks, in the form that Horovod scripts know.

A compressor is a class with two static methods; users write their own by deriving from ``Compressor``. Those that come
with the package leave the cast to the core, which does it while it packs: see ``wire``.
"""

from typing import Any, ClassVar

import tensorflow as tf

from ringtrain import operations as arrays


class Compressor:
    """Sends tensors as they are, and is the base of all compressors.

    Attributes:
        wire: the core's compression that a reduction uses in place of the two methods; None uses the methods.
    """

    wire: ClassVar[str | None] = None

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """The tensor to send, and whatever ``decompress`` needs to undo it."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """The received tensor as the caller knows it."""
        return tensor


def _cast_to(half: tf.DType, name: str, on_the_wire: str) -> type[Compressor]:
    """A compressor that sends floating-point tensors in 16 bits and leaves all others alone."""

    class Cast(Compressor):
        wire = on_the_wire

        @staticmethod
        def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
            return (tf.cast(tensor, half), tensor.dtype) if tensor.dtype.is_floating else (tensor, None)

        @staticmethod
        def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
            return tensor if context is None else tf.cast(tensor, context)

    Cast.__name__ = Cast.__qualname__ = name
    Cast.__doc__ = f"Sends floating-point tensors as {half.name} between hosts."
    return Cast


class Compression:
    """The compressors that come with the package: ``none``, ``fp16`` and ``bf16``."""

    none = Compressor
    fp16 = _cast_to(tf.float16, "FP16Compressor", arrays.Compression.fp16)
    bf16 = _cast_to(tf.bfloat16, "BF16Compressor", arrays.Compression.bf16)
