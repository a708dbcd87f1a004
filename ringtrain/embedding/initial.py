"""First values of rows: functions of (seed, row, column), so they do not depend on the number of ranks. Pure.

A number's bits come from a counter by the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014); no generator
has a state.
"""

from collections.abc import Callable

import numpy as np

from ringtrain.errors import InvalidArgumentError

Initializer = Callable[[np.ndarray], np.ndarray]
KINDS = ("normal", "uniform", "zeros")
_STEP, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def initializer(kind: str | Initializer, scale: float, seed: int, width: int, dtype: np.dtype) -> Initializer:
    """A function of rows, int64 (n,), that makes their values, (n, width).

    Args:
        kind: ``"normal"`` of standard deviation ``scale``, ``"uniform"`` from ``-scale`` to ``scale``, ``"zeros"``, or
            a function of rows that does not depend on anything else.
        scale: of the values.
        seed: any int; tables of one seed and width begin alike.
        width: numbers in a row.
        dtype: of the values.

    Raises:
        InvalidArgumentError: no such kind, or no such width.
    """
    if not isinstance(width, int) or width < 1:
        raise InvalidArgumentError(f"embedding: a row must have a number at least, but has {width!r}.")
    if callable(kind):
        return lambda rows: np.asarray(kind(rows), dtype).reshape(len(rows), width)
    if kind not in KINDS:
        raise InvalidArgumentError(
            f"embedding: initializer must be one of {', '.join(KINDS)} or a function, but is {kind!r}."
        )
    if kind == "zeros":
        return lambda rows: np.zeros((len(rows), width), dtype)
    if kind == "uniform":
        return lambda rows: ((_uniform(seed, rows, width, 0) * 2 - 1) * scale).astype(dtype)
    return lambda rows: (_normal(seed, rows, width) * scale).astype(dtype)


def _normal(seed: int, rows: np.ndarray, width: int) -> np.ndarray:
    """Box and Muller's method, one number of each pair."""
    radius = np.sqrt(-2 * np.log1p(-_uniform(seed, rows, width, 0)))
    return radius * np.cos(2 * np.pi * _uniform(seed, rows, width, 1))


def _uniform(seed: int, rows: np.ndarray, width: int, stream: int) -> np.ndarray:
    """Numbers from 0 up to but not 1, float64 (n, width)."""
    with np.errstate(over="ignore"):
        key = _mixed(np.array([seed & (2**64 - 1)], np.uint64) + _STEP * np.uint64(stream + 1))
        counter = rows.astype(np.uint64)[:, None] * np.uint64(width) + np.arange(width, dtype=np.uint64)
        return (_mixed(key + counter * _STEP) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    return bits ^ (bits >> np.uint64(31))
