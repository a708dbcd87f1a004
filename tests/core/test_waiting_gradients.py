"""Gradients of rows that wait for an update: sums by place, whatever comes in which pass."""

import numpy as np
import pytest

from ringtrain.embedding.waiting import Waiting, nothing, together

WIDTH = 3


def drawn(seed: int, rows: int = 20) -> Waiting:
    random = np.random.default_rng(seed)
    places = np.flatnonzero(random.random(rows) < 0.4)
    return Waiting(places, random.integers(-8, 8, (len(places), WIDTH)).astype(np.float32))


def dense(waiting: Waiting, rows: int = 20) -> np.ndarray:
    whole = np.zeros((rows, WIDTH), np.float32)
    whole[waiting.places] = waiting.values
    return whole


@pytest.mark.parametrize("seed", range(8))
def test_passes_are_added_up_by_place(seed):
    parts = [drawn(seed * 10 + number) for number in range(4)]
    total = nothing(WIDTH, np.dtype(np.float32))
    for part in parts:
        total = together(total, part)
    assert np.array_equal(dense(total), sum(map(dense, parts))) and total.passes == 4
    assert np.array_equal(total.places, np.unique(np.concatenate([part.places for part in parts])))
    assert total.square == float(np.square(dense(total)).sum())


def test_one_pass_keeps_its_bits_and_a_bad_one_spoils_all():
    only = drawn(1)
    assert together(nothing(WIDTH, np.dtype(np.float32)), only) is only and only.divided(1) is only
    assert only.divided(3).values.dtype == np.float32
    spoilt = together(only, Waiting(only.places, only.values, finite=False))
    assert not spoilt.finite and spoilt.square == float("inf")
