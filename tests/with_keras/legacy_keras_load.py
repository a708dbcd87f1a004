"""Loads the files of legacy_keras_run.py with tf_keras alone; a process of its own, in which ringtrain is not there."""

import sys

import tf_keras

sys.modules["ringtrain"] = None


@tf_keras.saving.register_keras_serializable("mine", "Slow")
class Registered(tf_keras.optimizers.SGD):
    pass


class Unregistered(tf_keras.optimizers.SGD):
    pass


legacy = tf_keras.optimizers.legacy
objects = {"Unregistered": Unregistered}
for place, kind in enumerate([Registered, Unregistered, legacy.Adam, Registered]):
    nested = place == 3  # in HDF5 tf_keras itself does not find a registered optimizer within another
    for ending in (".keras",) if nested else (".keras", ".h5", ""):
        optimizer = tf_keras.models.load_model(f"{sys.argv[1]}/{place}{ending}", custom_objects=objects).optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        assert type(inner) is kind, (place, ending, type(inner))
        # tf_keras keeps no state of the older optimizers in .keras, and loads none from "".
        keeps_state = ending == ".h5" or (ending == ".keras" and not isinstance(inner, legacy.Optimizer))
        assert int(inner.iterations) == 1 or not keeps_state, (place, ending)
