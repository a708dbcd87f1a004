"""What traces of all ranks say of the steps: ``ringtrain timeline report``.

``reading`` makes arrays of the files, ``steps`` puts the ranks on one clock and cuts their operations into steps,
``findings`` decides what follows, ``page`` shows it. All but ``reading`` and ``page`` are pure.
"""
