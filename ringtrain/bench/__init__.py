"""``ringtrain bench``: ours, the peers and the floor side by side in one run, with verified results.

``__main__`` reads the command line and starts itself on N ranks; its table has one row for each benchmark, whose file
of the same name has ``run(**options)``. ``turns`` times systems that take turns, ``report`` writes results, tables and
JSON, ``ranks`` is what the ranks do together outside of the system under test, ``sizes`` numbers of bytes as text,
``machine`` facts; ``worlds`` opens ours over each transport; ``shaped`` starts benchmarks on ``hosts`` made on one
machine; ``computing`` stands for backward passes; ``faults`` does faults to ``jobs`` under watch; ``launch`` times the
launchers themselves.

What is compared: ``systems`` for single operations, ``torch_systems`` for training steps with PyTorch,
``tensorflow_systems`` for graphs of TensorFlow, ``jax_systems`` for programs of JAX. ``compress`` measures the modes of
``ringtrain.launch.modes``. What they work on: ``models`` (parameter shapes), ``torch_networks``, and ``torch_tasks``,
which have data.
"""
