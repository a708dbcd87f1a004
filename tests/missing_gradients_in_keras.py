"""The table of ``missing_gradients`` carried out by an optimizer of Keras 3, on whichever framework that runs."""

import keras
import missing_gradients as table
import numpy as np

import ringtrain.keras as hvd


def weights_after(rank, steps, passes, in_graph=False, **settings):
    """This rank's weights after the steps. In a graph each pass is traced once, and the steps must be alike."""
    weights = [keras.Variable(np.ones(1, "float32")) for _ in range(table.COUNT)]
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0, weight_decay=table.WEIGHT_DECAY), backward_passes_per_step=passes, **settings
    )
    optimizer.build(weights)

    def apply(own):
        tensors = [None if each is None else keras.ops.convert_to_tensor([each], "float32") for each in own]
        optimizer.apply(tensors, weights)

    functions = {}
    for step in steps:
        for number, own in enumerate(table.passes_of(step, rank, passes)):
            if in_graph:
                if number not in functions:
                    functions[number] = graph_of(apply, own)
                functions[number]()
            else:
                apply(own)
    return [float(keras.ops.convert_to_numpy(weight)[0]) for weight in weights]


def graph_of(apply, own):
    """A function of TensorFlow for one pass."""
    import tensorflow as tf

    return tf.function(lambda: apply(own))
