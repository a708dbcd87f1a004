"""A script for Horovod's elastic TensorFlow 2, with its import line changed: a loop of its own, in a ``tf.function``.

Like elastic_keras.py it knows what its weight must come to. What it traces once has the next worlds' size and ranks in it.
"""

import os
import signal
import time
from pathlib import Path

import tensorflow as tf

import ringtrain as rt
import ringtrain.tensorflow as hvd

BATCHES, RATE = 40, 2.0**-6
slot, mark = os.environ.get("RINGTRAIN_RANK", "0"), Path(os.environ["TMPDIR"], "struck")

hvd.init()
weight = tf.Variable([0.0 if slot == "0" else 1.0])
local, idle, rooted = tf.Variable([0.0]), tf.Variable([1.0]), tf.Variable([0.0])
rows = tf.Variable([[0.0]])
traced = []


@tf.function
def train_one_batch(x):
    traced.append(hvd.size())
    with tf.GradientTape() as tape:
        root = hvd.broadcast(rooted * x, root_rank=0, name="rooted")
        mine = hvd.reducescatter(tf.tile(rows, [hvd.size_op(), 1]), op=hvd.Sum, name="rows")
        loss = tf.reduce_sum(weight * x + local) + 2.0 * tf.reduce_sum(root) + tf.reduce_sum(mine)
    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(local)
    sources = [weight, local, idle, rooted, rows]
    gradients = tape.gradient(loss, sources)
    assert gradients[2] is None
    for source, gradient in zip(sources, gradients, strict=True):
        if gradient is not None:
            source.assign_sub(RATE * gradient)
    return hvd.size_op(), hvd.allreduce(tf.cast(hvd.rank_op(), tf.float64), op=hvd.Sum, name="ranks")


@hvd.elastic.run
def train(state):
    print(f"world of {hvd.size()} at {state.batch}", flush=True)
    size = hvd.size()
    while state.batch < BATCHES:
        if state.batch == int(os.environ.get("AT", "-1")) and slot == os.environ.get("SLOT") and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while state.batch == 30 and hvd.size() < int(os.environ.get("JOINED", "1")):
            state.check_host_updates()
            time.sleep(0.05)
        found = train_one_batch(tf.constant([hvd.rank() + 1.0]))
        assert [float(each) for each in found] == [size, size * (size - 1) / 2], found
        state.moved += (size + 1) / 2
        state.local += 1.0 / size
        state.rooted += 2.0 / size  # the root alone has a gradient
        state.rows += size**2  # as many tiles of it, and a sum's gradient comes times the size, as in Horovod
        state.batch += 1
        if state.batch % 5 == 0:
            state.commit()
    rt.check_replicas([("weight", weight.numpy())])


def nearly(variable, moved):
    return abs(float(variable.numpy().item()) + RATE * moved) < 1e-5


state = hvd.elastic.TensorFlowState(
    [weight, local, idle, rooted, rows], batch=0, moved=0.0, local=0.0, rooted=0.0, rows=0.0
)
train(state)
right = [float(weight[0]) == -RATE * state.moved, nearly(local, state.local), float(idle[0]) == 1.0,
         nearly(rooted, state.rooted), nearly(rows, state.rows)]  # fmt: skip
print("end", state.batch, right, len(traced), flush=True)
