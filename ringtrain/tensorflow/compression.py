"""Compression of gradients on their way to the other ranks, in the form that Horovod scripts know.

A compressor is a class with two static methods; users write their own by deriving from ``Compressor``. Those that come
with the package leave the cast to the core, which does it while it packs: see ``wire``.
"""

from typing import Any, ClassVar

import tensorflow as tf

from ringtrain._runtime import operations as arrays
from ringtrain._training.powersgd import PowerSGD


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
        def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType | None]:
            return (tf.cast(tensor, half), tensor.dtype) if tensor.dtype.is_floating else (tensor, None)

        @staticmethod
        def decompress(tensor: tf.Tensor, context: tf.DType | None) -> tf.Tensor:
            return tensor if context is None else tf.cast(tensor, context)

    Cast.__name__ = Cast.__qualname__ = name
    Cast.__doc__ = f"Sends floating-point tensors as {half.name} between hosts."
    return Cast


def _in_blocks(on_the_wire: arrays.WithFeedback, name: str, form: str) -> type[Compressor]:
    """A compressor whose form exists on the wire alone: ``compress`` and ``decompress`` leave a tensor as it is."""
    described = f"Sends floating-point tensors of 4,096 elements or more as {form}, where the core reduces"

    def made(name: str, wire: str, words: str, **more: type[Compressor]) -> type[Compressor]:
        return type(name, (Compressor,), {"__module__": __name__, "__doc__": words, "wire": wire, **more})

    plain = made(f"{name}WithoutFeedback", on_the_wire.without_feedback, f"{described}.")
    return made(name, on_the_wire, f"{described}, and makes up for what it loses.", without_feedback=plain)


class Compression:
    """The compressors that come with the package: ``none``, ``fp16``, ``bf16``, ``int8``, ``int4`` and ``powersgd(rank)``.

    Example:
        >>> with tf.GradientTape() as tape:
        ...     loss = loss_of(model(images), labels)
        >>> tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.bf16)
        >>> gradients = tape.gradient(loss, model.trainable_variables)

    ``int8`` and ``int4`` make up for what they lose of a gradient when it comes again; ``int8.without_feedback`` does
    not. ``powersgd(rank=2)`` does too, and is for the gradients of optimizers and tapes alone.
    """

    none = Compressor
    fp16 = _cast_to(tf.float16, "FP16Compressor", arrays.Compression.fp16)
    bf16 = _cast_to(tf.bfloat16, "BF16Compressor", arrays.Compression.bf16)
    int8 = _in_blocks(arrays.Compression.int8, "Int8Compressor", "int8 with a scale for each 256")
    int4 = _in_blocks(arrays.Compression.int4, "Int4Compressor", "4 bits with a scale for each 128")
    powersgd = PowerSGD


NoneCompressor, FP16Compressor = Compression.none, Compression.fp16  # where Horovod's users find them
