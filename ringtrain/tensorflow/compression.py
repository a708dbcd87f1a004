"""Compression of gradients on their way to the other ranks, in the form that Horovod scripts know.

A compressor is a class with two static methods; users write their own by deriving from ``Compressor``.
"""

from typing import Any

import tensorflow as tf


class Compressor:
    """Sends tensors as they are, and is the base of all compressors."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """The tensor to send, and whatever ``decompress`` needs to undo it."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        """The received tensor as the caller knows it."""
        return tensor


def _cast_to(wire: tf.DType, name: str) -> type[Compressor]:
    """A compressor that sends floating-point tensors as ``wire`` and leaves all others alone."""

    class Cast(Compressor):
        @staticmethod
        def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
            return (tf.cast(tensor, wire), tensor.dtype) if tensor.dtype.is_floating else (tensor, None)

        @staticmethod
        def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
            return tensor if context is None else tf.cast(tensor, context)

    Cast.__name__ = Cast.__qualname__ = name
    Cast.__doc__ = f"Sends floating-point tensors as {wire.name}."
    return Cast


class Compression:
    """The compressors that come with the package: ``none``, ``fp16`` and ``bf16``."""

    none = Compressor
    fp16 = _cast_to(tf.float16, "FP16Compressor")
    bf16 = _cast_to(tf.bfloat16, "BF16Compressor")
