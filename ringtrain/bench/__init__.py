"""``ringtrain bench``: ours, the peers and the floor side by side in one run, with verified results.

``__main__`` reads the command line and starts itself on N ranks; ``allreduce``, ``step`` and ``idle`` are the
benchmarks, one file each; ``systems`` holds what is compared, ``ranks`` what the ranks do together outside of it,
``report`` tables and JSON, ``sizes`` numbers of bytes as text, ``machine`` and ``models`` facts.
"""
