"""What is checked with TensorFlow: late values, training, and what it costs to leave tensors on the GPU.

On the first GPU where TensorFlow sees one; else on the CPU, so that CI runs these lines too. On a GPU they have not run.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import tensorflow as tf

import ringtrain.tensorflow as hvd

DEVICE = "/GPU:0" if tf.config.list_physical_devices("GPU") else "/CPU:0"
for _gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(_gpu, True)  # PyTorch's and NCCL's memory are beside TensorFlow's


def late_values_are_awaited() -> bool:
    """Inputs behind work of some milliseconds; results are used at once, eagerly and in graphs."""

    def step(start: tf.Tensor) -> tf.Tensor:
        work = start
        for _ in range(20):
            work = work @ work / tf.cast(tf.shape(work)[0], tf.float32)
        sums = [hvd.allreduce(work * float(index), op=hvd.Sum, name=f"late.{index}") for index in range(4)]
        return tf.add_n([total * 2.0 for total in sums])

    with tf.device(DEVICE):
        start = tf.ones([2048 if DEVICE == "/GPU:0" else 64] * 2)
        return all(np.allclose(wrapped(start), 12.0) for wrapped in (step, tf.function(step)) for _ in range(3))


def training_is_the_same() -> bool:
    """Steps with a distributed tape of one rank are those with a plain one, as far as sums repeat on the device."""
    ends = []
    for wrap in (lambda tape: tape, hvd.DistributedGradientTape):
        with tf.device(DEVICE):
            random = np.random.default_rng(2)
            weights = [
                tf.Variable(random.standard_normal(shape).astype("float32") / 16) for shape in ((256, 512), (512, 10))
            ]
            inputs, labels = (
                tf.constant(random.standard_normal((64, 256)).astype("float32")),
                random.integers(10, size=64),
            )

            @tf.function
            def step() -> None:
                with tf.GradientTape() as tape:
                    logits = tf.nn.relu(inputs @ weights[0]) @ weights[1]
                    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
                for weight, gradient in zip(weights, wrap(tape).gradient(loss, weights), strict=True):
                    weight.assign_sub(0.1 * gradient)

            for _ in range(5):
                step()
        ends.append([weight.numpy() for weight in weights])
    return all(np.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(*ends, strict=True))


def seconds_of_100_megabytes(way: str) -> float:
    """Median seconds of an allreduce of 100 MB with ``RINGTRAIN_TENSORFLOW_GPU`` set so, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "gpu.tensorflow_checks"], env=os.environ | {"RINGTRAIN_TENSORFLOW_GPU": way},
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    return float(done.stdout.split()[-1])


def _measure() -> float:
    import statistics
    import time

    hvd.init()
    with tf.device(DEVICE):
        tensor, taken = tf.ones([25_000_000]), []
        for _ in range(10):
            start = time.perf_counter()
            hvd.allreduce(tensor, name="measured")[0].numpy()
            taken.append(time.perf_counter() - start)
    hvd.shutdown()
    return statistics.median(taken[2:])


if __name__ == "__main__":
    print(_measure())
