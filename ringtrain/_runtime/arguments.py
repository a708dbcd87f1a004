"""Arguments of operations, checked and in the form that the core takes; request attributes are checked in `operations`.

Whatever cannot be meant raises InvalidArgumentError before anything is submitted; what the ranks must agree on, and which
ranks there are, the core says.
"""

import operator
from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np

from ringtrain._binding import tables
from ringtrain.errors import InvalidArgumentError

_MOST_RANKS = 1 << 31  # that a C int counts


def reduction(op: int | None) -> str:
    """The name of a reduction by its constant; None is the average."""
    if op is None:
        return "average"
    if type(op) is int and op in tables.REDUCTION_BY_ID:  # the quick one of what is_reduction asks
        return tables.REDUCTION_BY_ID[op]
    check_reduction(op)
    return tables.REDUCTION_BY_ID[op]


def is_reduction(op: Any) -> bool:
    """Whether it is one of the constants ``Average``, ``Sum`` …

    Those of other libraries are not, although they may be equal to an integer, which then means something else.
    """
    is_integer = type(op) is int or (
        isinstance(op, Integral) and not isinstance(op, bool)
    )  # the first is the quick one
    return is_integer and op in tables.REDUCTION_BY_ID


def check_reduction(op: Any) -> None:
    """Raises InvalidArgumentError unless it is one of the constants ``Average``, ``Sum`` …"""
    if is_reduction(op):
        return
    known = ", ".join(
        f"{tables.REDUCTION_CONSTANTS[name]} ({identity})" for name, identity in tables.REDUCTIONS.items()
    )
    raise InvalidArgumentError(f"op must be one of {known}, but is {op!r}. Use ringtrain's constants.")


def integer(what: str, value: Any) -> int:
    """An integer of any type but bool: a flag has come to the wrong place."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{what} must be an integer, but is {value!r}.") from None


def whole(what: str, value: Any) -> int:
    """A whole number of any type but bool, as classes take it that are made before the job is known. Raises TypeError."""
    try:
        return integer(what, value)
    except InvalidArgumentError:
        raise TypeError(f"{what} must be a whole number, but is {value!r}. Give an int.") from None


def root(value: Any) -> int:
    """As the C struct takes it; whether it is a member the core says."""
    rank = integer("root_rank", value)
    if not -_MOST_RANKS <= rank < _MOST_RANKS:
        raise InvalidArgumentError(f"root must be a rank of the process set, got {rank}.")
    return rank


def number(what: str, value: Any) -> float:
    """A number, and no text that reads like one."""
    if type(value) is float:
        return value
    try:
        if isinstance(value, (str, bytes)):  # which float would parse
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(f"{what} must be a number, but is {value!r}.") from None


def split_rows(splits: Any) -> list[int]:
    """Rows for each rank, of any sequence of integers."""
    try:
        rows = np.asarray(splits)
        counts = (
            [int(count) for count in rows] if (rows.ndim == 1 and rows.dtype.kind in "iu") or not rows.size else None
        )
    except (TypeError, ValueError):
        counts = None
    if counts is None or any(count >= 1 << 63 for count in counts):
        raise InvalidArgumentError(f"splits must be a list of integers below 2^63, but is {splits!r}.")
    return counts


def check_among(
    demand: str, value: Any, allowed: Collection[Any], advice: str = "", error: type[Exception] = InvalidArgumentError
) -> None:
    """Raises an error unless a value is one of some.

    Args:
        demand: what must be, in a sentence without an end.
        value: as given.
        allowed: which it may be.
        advice: what to do, likewise.
        error: another class.
    """
    if value not in allowed:
        raise error(_refusal(demand, repr(value), advice))


def check_kind(
    demand: str,
    value: object,
    kind: type | tuple[str, ...],
    advice: str = "",
    error: type[Exception] = InvalidArgumentError,
) -> None:
    """As ``check_among``, unless a value is of a class, or has all attributes of some names."""
    fits = isinstance(value, kind) if isinstance(kind, type) else all(hasattr(value, name) for name in kind)
    if not fits:
        raise error(_refusal(demand, f"a {type(value).__name__}", advice))


def check_least(what: str, value: Any, least: float) -> None:
    """Raises InvalidArgumentError unless a number is so great; one that is none at all is not."""
    if not (isinstance(value, Real) and float(value) >= least):
        raise InvalidArgumentError(f"{what} must be at least {least}, but is {value!r}.")


def check_unique(what: str, names: Iterable[str], advice: str) -> None:
    """Raises InvalidArgumentError for a name that comes twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidArgumentError(f"{what} must be unique, but '{name}' comes twice. {advice}.")
        seen.add(name)


def _refusal(demand: str, found: str, advice: str) -> str:
    return f"{demand}, but is {found}." + (f" {advice}." if advice else "")
