"""What all ranks must have set alike for one optimizer, and the words in which they hear that they have not. Pure."""

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from ringtrain._training.adapter.checks import named_ranks

_ABSENT = "absent"


def encoded(terms: Mapping[str, object]) -> bytes:
    """Terms as bytes, the same for equal terms."""
    return json.dumps(terms, sort_keys=True).encode()


def decoded(content: bytes) -> dict[str, Any]:
    """What ``encoded`` was given, with lists for tuples."""
    return json.loads(content)


def difference(terms: Sequence[tuple[int, Mapping[str, object]]]) -> tuple[str, str] | None:
    """The first term that is not the same on all ranks, and its values with the ranks that have them; None if all are.

    Args:
        terms: ranks with their terms.
    """
    for key in dict.fromkeys(key for _, theirs in terms for key in theirs):
        values = [(rank, _text(theirs.get(key, _ABSENT))) for rank, theirs in terms]
        if len({value for _, value in values}) > 1:
            return key, by_value(values)
    return None


def by_value(values: Iterable[tuple[int, Hashable]]) -> str:
    """Values with the ranks that have them.

    Example:
        >>> by_value([(0, 4), (1, 8), (2, 4)])
        '4 on ranks 0, 2 and 8 on rank 1'
    """
    ranks: dict[Hashable, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return " and ".join(f"{value} on {named_ranks(those)}" for value, those in ranks.items())


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True).replace("null", "None")
