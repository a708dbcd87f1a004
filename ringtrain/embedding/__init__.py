"""Embedding tables whose rows are dealt over the ranks of a process set, for every framework.

``dealing`` says who owns a row, ``plan`` which rows a rank asks whom for; ``trips`` carries it out by the core's
alltoall; ``initial`` makes first values, ``storage`` keeps rows, ``optimizers`` changes them, ``checkpoints`` saves
them. Only ``trips`` knows of a world.
"""
