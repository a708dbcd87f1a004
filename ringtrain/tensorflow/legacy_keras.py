"""Whether ``tf.keras`` is the legacy Keras 2 (``TF_USE_LEGACY_KERAS=1``)."""

import tensorflow as tf


def is_in_use() -> bool:
    """Whether ``tf.keras`` is tf_keras. It decides when TensorFlow is imported."""
    return tf.keras.Model.__module__.startswith("tf_keras")
