"""Whether ranks have values of the same names and shapes, so that one can take over what the others have. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Outline = Mapping[str, str]  # what each part of a state is, by its name


def is_made_of(is_value: Callable[[Any], bool], found: Any) -> bool:
    """Whether something is a value, or containers of values alone: another process may take it over, as it has no objects."""
    if isinstance(found, Mapping):
        return all(is_made_of(is_value, each) for item in found.items() for each in item)
    if isinstance(found, (list, tuple, set, frozenset)):
        return all(is_made_of(is_value, each) for each in found)
    return is_value(found)


def unlike(outlines: Sequence[Outline]) -> list[int]:
    """The ranks whose outline is not that of rank 0."""
    return [rank for rank, outline in enumerate(outlines) if outline != outlines[0]]


def refusal(outlines: Sequence[Outline], rank: int) -> str:
    """Why a rank cannot take over what rank 0 has: the first part in which they differ."""
    own, theirs = outlines[rank], outlines[0]
    part = next(name for name in [*theirs, *own] if own.get(name) != theirs.get(name))
    return (
        f"elastic.State: rank {rank} must have values of the same names, shapes and dtypes as rank 0, but {part} is "
        f"{own.get(part, 'missing')} there, and {theirs.get(part, 'missing')} on rank 0. Make the same model, optimizer "
        "and sampler on all ranks."
    )
