"""A loop with a DistributedGradientTape whose steps survive; test_elastic_frameworks.py runs it on the ranks of a job.

Contributions depend on slot, step and the weights. With PLAN it takes the steps of a plan in a job of a fixed size instead.
A weight's gradient has two terms: TensorFlow adds three in one graph in an order that changes from step to step, and with it
the last bits, on one rank alone.
"""

import hashlib
import json
import os

import elastic_faults
import numpy as np
import tensorflow as tf

import ringtrain.tensorflow as hvd

SLOTS, EPOCHS, STEPS = 8, 2, 12
slot = elastic_faults.slot
hvd.init()
own = 1.0 if slot == 0 else 2.0
weights, tags = tf.Variable(tf.fill([257], own)), tf.Variable(tf.zeros([SLOTS]))
idle = tf.Variable(1.0)
optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.5)
marks = tf.keras.optimizers.SGD(1.0)


def step_on(drawn, tag):
    """Only the weights and the marks have a gradient."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights * drawn + 0.05 * tf.square(weights)) + tf.reduce_sum(tags * tag)
    tape = hvd.DistributedGradientTape(tape, op=getattr(hvd, os.environ.get("OP", "Average")))
    of_weights, of_tags, of_idle = tape.gradient(loss, [weights, tags, idle])
    assert of_idle is None
    optimizer.apply([of_weights], [weights])
    marks.apply([of_tags], [tags])


optimizer.build([weights])
marks.build([tags])
train_on = step_on if "EAGER" in os.environ else tf.function(step_on)


def apply(step, contributor):
    """One step; returns the slots whose contributions are in it."""
    drawn = np.random.default_rng([step, contributor]).standard_normal(257).astype(np.float32)
    elastic_faults.strike(step, "begun")
    tags.assign(tf.zeros([SLOTS]))
    train_on(tf.constant(drawn), tf.one_hot(contributor, SLOTS))
    elastic_faults.strike(step, "released")
    return np.flatnonzero(tags.numpy()).tolist()


def values():
    """All that the end depends on."""
    return [variable.numpy() for variable in (weights, *optimizer.variables)]


def end(step):
    """Tells the result."""
    print("end", step, hashlib.sha256(b"".join(value.tobytes() for value in values())).hexdigest(), flush=True)


if "PLAN" in os.environ:
    plan, saved = json.loads(open(os.environ["PLAN"]).read()), elastic_faults.folder / "saved.npz"
    first = 0
    if saved.exists():
        kept = np.load(saved)
        first = int(kept["first"])
        for place, variable in enumerate((weights, *optimizer.variables)):
            variable.assign(kept[str(place)])
    else:
        hvd.broadcast_variables([weights], root_rank=0)
    for step, contributors in enumerate(plan, first):
        apply(step, contributors[hvd.rank()])
    if hvd.rank() == 0:
        np.savez(saved, first=first + len(plan), **{str(place): value for place, value in enumerate(values())})
    end(first + len(plan))
else:
    state = hvd.elastic.State(weights=weights, idle=idle, optimizer=optimizer)
    state.on_change(lambda old, new: print("change", old, new, flush=True))
    for epoch in state.epochs(EPOCHS):
        print("epoch", epoch, state.batch, hvd.size(), flush=True)
        for _ in state.steps(STEPS):
            elastic_faults.await_joiners(state.step)
            step = state.step
            print("applied", step, hvd.rank(), slot, *apply(step, slot), flush=True)
    end(state.step)
