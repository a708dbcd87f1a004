"""The programs in docs/migrate-from-tf-strategies.md run on two ranks as they stand there."""

import numpy as np
import pytest

pytest.importorskip("keras")
pytest.importorskip("tensorflow")
pytest.importorskip("torch")

from test_docs import blocks, run_on_two_ranks, versions

PAGE = "migrate-from-tf-strategies.md"


def test_migration_from_strategies():
    program, commands = blocks(PAGE, "diff")
    before, after = versions(program)
    compile(before, PAGE, "exec")
    first, second = run_on_two_ranks(after, *blocks(PAGE, "python"), page=PAGE)
    for mine, theirs in zip(first["model"].get_weights(), second["model"].get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert first["norms"] == second["norms"] and int(first["optimizer"].iterations) == 4
    assert versions(commands)[1].startswith("ringtrainrun -np 2")
