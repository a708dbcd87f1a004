"""``ringtrain bench``: ours, the peers and the floor side by side in one run, with verified results.

``__main__`` has a row for each benchmark, whose file of the same name has ``run(**options)``; ``command`` reads the line
and starts itself on N ranks. ``turns`` times systems that take turns, ``report`` writes results, tables and JSON,
``ranks`` is what the ranks do together outside of the system under test, ``machine`` facts;
``measured_worlds`` opens ours over each transport; ``shaped`` starts benchmarks on ``namespaces`` made on one machine.

What is compared: ``systems`` for single operations, ``torch_systems`` for training steps with PyTorch, whose networks
are ``torch_networks``. The source tree has further measurements in ``benchmarks``.
"""
