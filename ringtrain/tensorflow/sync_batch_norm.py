"""Batch normalisation over the batches of all ranks: as Keras computes it on the concatenated batch.

Two allreduces forward, one for the mean and one for the variance around it, each weighted by what a rank's batch holds;
backpropagation goes through both. The Keras backend must be TensorFlow.
"""

import tensorflow as tf

from ringtrain._runtime.arguments import check_among
from ringtrain._runtime.operations import Sum
from ringtrain._runtime.process_sets import global_process_set, is_alone
from ringtrain.errors import UnsupportedError
from ringtrain.tensorflow.names import claim_in_function
from ringtrain.tensorflow.nodes import as_it_is
from ringtrain.tensorflow.operations import allreduce
from ringtrain.tensorflow.types import Variable


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """Batch normalisation with the statistics of all ranks' batches, which may differ in size.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), hvd.SyncBatchNormalization(), keras.layers.Dense(1)])

    In inference and in a world of one it is plain batch normalisation.

    Args:
        fused: must be False; there is no fused kernel across ranks.
        kwargs: those of ``tf.keras.layers.BatchNormalization``, except ``renorm``.

    Raises:
        InvalidArgumentError: ``fused`` is not False.
        UnsupportedError: ``renorm``, or another Keras backend than TensorFlow.
    """

    def __init__(self, fused: bool | None = False, **kwargs: object):
        check_among("SyncBatchNormalization: fused must be False", fused, [False])
        renorm, backend = kwargs.get("renorm", False), tf.keras.backend.backend()
        check_among("SyncBatchNormalization: renorm must be False", renorm, [False], "Leave it out", UnsupportedError)
        demand = "SyncBatchNormalization: Keras' backend must be TensorFlow"
        check_among(demand, backend, ["tensorflow"], "Set KERAS_BACKEND=tensorflow", UnsupportedError)
        super().__init__(**kwargs)

    @as_it_is
    def call(self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None) -> tf.Tensor:
        """Normalises ``inputs``; the result has their shape.

        Args:
            inputs: channels along the layer's ``axis``, floating point.
            training: whether to use the batch's statistics, which then enter the moving ones.
            mask: of the shape of ``inputs`` without its last dimension; where it is False, values do not count.
        """
        if not (training and self.trainable) or is_alone(global_process_set):
            return super().call(inputs, training=training, mask=mask)
        values = tf.cast(inputs, tf.float64 if inputs.dtype == tf.float64 else tf.float32)
        mean, variance = self._moments_of_all(values, mask)
        self._move(self.moving_mean, mean)
        self._move(self.moving_variance, variance)
        offset = tf.cast(self.beta, values.dtype) if self.center else None
        scale = tf.cast(self.gamma, values.dtype) if self.scale else None
        statistics = [self._spread(tensor, values) for tensor in (mean, variance, offset, scale)]
        return tf.cast(tf.nn.batch_normalization(values, *statistics, self.epsilon), self.compute_dtype)

    def _moments_of_all(self, values: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Mean and variance of every channel over all ranks, each of shape (channels,)."""
        axes = [axis for axis in range(len(values.shape)) if axis != self._channels % len(values.shape)]
        weights = tf.ones_like(values)
        if mask is not None:
            weights *= tf.cast(mask, values.dtype)[..., None]
        local = tf.stack([tf.reduce_sum(values * weights, axes), tf.reduce_sum(weights, axes)])
        total, count = tf.unstack(allreduce(local, op=Sum, name=claim_in_function("sync_batch_norm.mean")))
        mean = tf.math.divide_no_nan(total, count)
        squares = tf.reduce_sum(tf.square(values - self._spread(mean, values)) * weights, axes)
        squares = allreduce(squares, op=Sum, name=claim_in_function("sync_batch_norm.variance"))
        return mean, tf.math.divide_no_nan(squares, count)

    @property
    def _channels(self) -> int:
        """The axis of the channels; Keras 2 makes a list of it when it builds the layer."""
        return self.axis if isinstance(self.axis, int) else self.axis[0]

    def _move(self, moving: Variable, newest: tf.Tensor) -> None:
        kept = tf.cast(moving, newest.dtype) * self.momentum
        moving.assign(kept + tf.stop_gradient(newest) * (1.0 - self.momentum))

    def _spread(self, tensor: tf.Tensor | None, values: tf.Tensor) -> tf.Tensor | None:
        """A tensor of shape (channels,) in a shape that broadcasts against ``values``."""
        if tensor is None:
            return None
        shape = [1] * len(values.shape)
        shape[self._channels] = -1
        return tf.reshape(tensor, shape)
