"""What traces of all ranks say of the steps: ``ringtrain timeline report``.

``trace_arrays`` makes arrays of the files, ``steps`` puts the ranks on one clock and cuts their operations into steps,
``findings`` decides what follows, ``page`` shows it. All but ``trace_arrays`` and ``page`` are pure.
"""
