"""A loop in TensorFlow with tf.GradientTape, compiled by tf.function.

ringtrainrun -np 2 python docs/examples/tensorflow_tape.py
"""

import tensorflow as tf

import ringtrain.tensorflow as hvd


def main() -> None:
    hvd.init()
    data = make_samples(1000).shard(hvd.size(), hvd.rank()).batch(25)  # read your share

    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(32, "tanh"), tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.Adam(0.02)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=0)  # start alike

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        tape = hvd.DistributedGradientTape(tape)  # its gradients are averages over the ranks
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for epoch in range(10):
        loss = tf.reduce_mean([step(x, y) for x, y in data])
        mean = hvd.allreduce(loss, name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {float(mean):.4f}")
    hvd.shutdown()


def make_samples(count: int) -> tf.data.Dataset:
    """The same on all ranks: points of a square, and the height of a saddle above each."""
    points = tf.random.stateless_uniform((count, 2), seed=(1, 2), minval=-1.0, maxval=1.0)
    return tf.data.Dataset.from_tensor_slices((points, points[:, :1] * points[:, 1:]))


if __name__ == "__main__":
    main()
