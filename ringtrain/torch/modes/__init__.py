"""What a distributed optimizer of torch does in each way of training: one class for each mode of ``ringtrain._training.mode``.

``optimizer`` has the methods of users' optimizers, which ask the mode; ``base`` is the interface.
"""
