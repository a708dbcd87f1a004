"""``ringtrain bench``: ours, the peers and the floor side by side in one run, with verified results.

``__main__`` reads the command line and starts itself on N ranks; its table has one row for each benchmark, whose file of
the same name has ``run(**options)``. ``turns`` times systems that take turns, ``report`` writes results, tables and JSON,
``ranks`` is what the ranks do together outside of the system under test, ``sizes`` numbers of bytes as text, ``machine``
facts; ``shaped`` starts benchmarks on ``hosts`` made on one machine; ``faults`` does faults to ``jobs`` under watch;
``launch`` times the launchers themselves.

What is compared: ``systems`` for single operations, ``torch_systems`` for training steps with PyTorch,
``tensorflow_systems`` for graphs of TensorFlow. What they work on: ``models`` (parameter shapes) and ``torch_networks``.
"""
