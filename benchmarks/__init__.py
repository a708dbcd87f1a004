"""Measurements behind the figures of the documentation: ``python -m benchmarks NAME``, in the root of the source tree.

They are made as those of ``ringtrain bench``, with its modules, and are in no wheel. ``computing`` stands for backward
passes; ``faults`` does faults to ``jobs`` under watch, ``elastic`` to those that go on; ``launch`` times launchers.
``compress`` measures the modes of ``ringtrain.launch.modes``. What is compared: ``tensorflow_systems`` for graphs of
TensorFlow, ``jax_systems`` for programs of JAX, ``replicas_systems`` for what comparing costs. What they work on:
``models`` (parameter shapes), and ``torch_tasks``, which have data.
"""
