"""The stand-ins for CUDA's driver and for NCCL keep their promises; fakes/checks.py has one check for each."""

from __future__ import annotations

import pytest

from fakes import check, checks


@pytest.mark.parametrize("name", check.CHECKS[checks.__name__])
def test_fakes(name: str) -> None:
    problem = check.run(checks.__name__, name)
    assert not problem, problem
