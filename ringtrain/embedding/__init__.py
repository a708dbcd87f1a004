"""Embedding tables whose rows are dealt over the ranks of a process set, for every framework.

``dealing`` says who owns a row, ``layout`` who keeps it a second time, ``row_requests`` which rows a rank asks whom for; ``trips``
and ``moves`` carry it out by the core's alltoall; ``initial`` makes first values, ``storage`` keeps rows, ``row_rules``
changes them, ``table_files`` saves them. Only ``trips`` and ``moves`` know of a world.
"""
