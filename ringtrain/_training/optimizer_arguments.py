"""Arguments that the optimizers, tapes and reductions of all adapters have in common, refused in the same words.

Optimizers, tapes and reductions call these with what the user gave, before anything is submitted.
"""

import math
import warnings
from collections.abc import Mapping
from numbers import Integral
from types import MappingProxyType

import numpy as np

from ringtrain._binding._native import lib
from ringtrain._runtime.arguments import check_least, check_reduction, integer, is_reduction, number
from ringtrain._runtime.operations import Average, Compression, Sum
from ringtrain._training.grouping import Groups
from ringtrain._training.mode import checked_mode
from ringtrain._training.needs import check_needs
from ringtrain.errors import InvalidArgumentError


def chosen_op(average: bool | None, op: int | None, mean: int = Average, total: int = Sum, stacklevel: int = 4) -> int:
    """The reduction that is meant: ``op``, or what Horovod's older argument ``average`` stands for, or the mean.

    Args:
        average: deprecated; True is the mean, False the sum.
        op: None if it was not given.
        mean: what averages.
        total: what sums.
        stacklevel: of the warning about ``average``, as ``warnings.warn`` counts.

    Raises:
        InvalidArgumentError: both are given, or one of them is something else.
    """
    if op is not None:
        check_reduction(op)
    if average is None:
        return mean if op is None else op
    if not isinstance(average, (Integral, np.bool_)):
        raise InvalidArgumentError(
            f"average (deprecated) must be True or False, but is {average!r}. Pass op=, and a name as name=."
        )
    if op is not None:
        raise InvalidArgumentError("allreduce: expected op or the deprecated average but found both. Pass op alone.")
    warnings.warn("average has become op: pass op=Average or op=Sum.", DeprecationWarning, stacklevel=stacklevel)
    return mean if average else total


def check_scaling(owner: str, op: int, predivide: float, others: Mapping[str, int] = MappingProxyType({})) -> None:
    """Raises InvalidArgumentError unless gradients can be reduced by this ``op`` and ``gradient_predivide_factor``.

    Args:
        owner: who speaks in the error.
        op: must be ``Average`` or ``Sum``, or one of the others.
        predivide: above 0; 1 for all but ``Average``.
        others: further ones, by name.
    """
    allowed = {Average: "Average", Sum: "Sum", **{each: name for name, each in others.items()}}
    if not is_reduction(op) or op not in allowed:
        *first, last = (f"{name} ({identity})" for identity, name in allowed.items())
        raise InvalidArgumentError(f"{owner}: op must be {', '.join(first)} or {last}, but is {op!r}.")
    predivide = number(f"{owner}: gradient_predivide_factor", predivide)
    if predivide != 1.0 and op != Average:
        raise InvalidArgumentError(f"{owner}: gradient_predivide_factor needs op=Average, but op is {allowed[op]}.")
    if not 0 < predivide < math.inf:
        raise InvalidArgumentError(
            f"{owner}: gradient_predivide_factor must be above 0 and finite, but is {predivide!r}."
        )


def checked_items(items: object) -> int:
    """A number of items; raises InvalidArgumentError for what is none."""
    number = integer("items of count", items)
    most = lib.RT_HIGHEST_WEIGHT
    if not 0 <= number <= most:
        raise InvalidArgumentError(f"items of count: expected a whole number from 0 to {most} but found {number}.")
    return number


def check_compressor(compression: object) -> None:
    """Raises InvalidArgumentError unless it has the methods of a compressor, as the classes in ``Compression`` do."""
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        known = ", ".join(f"Compression.{name}" for name in vars(Compression) if not name.startswith("_"))
        raise InvalidArgumentError(
            f"compression must be one of {known}, or a class with compress and decompress, but is {compression!r}."
        )


def check_passes(passes: object, owner: str = "DistributedOptimizer") -> None:
    """Raises InvalidArgumentError unless ``backward_passes_per_step`` is a whole number of at least 1."""
    if integer(f"{owner}: backward_passes_per_step", passes) < 1:
        raise InvalidArgumentError(f"{owner}: backward_passes_per_step must be at least 1, but is {passes!r}.")


def check_trainers_arguments(
    owner: str, arguments: Mapping[str, object], refused: Mapping[str, str], trait: str
) -> None:
    """Checks what a trainer, such as Lightning's, is to give a ``DistributedOptimizer``.

    Args:
        owner: who speaks in the error.
        arguments: by name.
        refused: those that are the trainer's own, with what to do instead, in a sentence.
        trait: of ``needs.TRAITS``: the trainer.

    Raises:
        InvalidArgumentError: one that is refused is among them, or no mode.
        UnsupportedError: a mode that the trainer cannot serve.
    """
    for name, advice in refused.items():
        if name in arguments:
            raise InvalidArgumentError(f"{owner}: {name} must be left out. {advice}")
    check_needs(checked_mode(arguments.get("mode"), owner).columns, {trait: True}, owner)


def check_plain(owner: str, kind: str, value: object, distributed: type | tuple[type, ...]) -> None:
    """Raises InvalidArgumentError for what was made distributed before."""
    if isinstance(value, distributed):
        raise InvalidArgumentError(f"{owner}: expected a plain {kind} but found one that is distributed already.")


def given_groups(owner: str, num_groups: int, groups: object, member: str, stacklevel: int) -> Groups:
    """The argument ``groups`` or, under Horovod's older name, ``num_groups``, with empty groups left out.

    Args:
        owner: who speaks in the error.
        num_groups: 0 if it was not given.
        groups: None, a number above 0, or lists; it counts where both are given.
        member: what the lists hold, for the error.
        stacklevel: of the warning about the older name, counted from the caller of this function.

    Raises:
        InvalidArgumentError: ``groups`` is something else, or holds a member twice.
    """
    if num_groups:
        warnings.warn("num_groups has become groups.", DeprecationWarning, stacklevel=stacklevel + 1)
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        check_least(f"{owner}: groups", groups, 1)
        return groups
    if not (isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups)):
        raise InvalidArgumentError(f"{owner}: groups must be an int or lists of {member}s, but is {groups!r}.")
    seen: set[int] = set()  # by identity: Keras' variables have no hash of their own
    for place, group in enumerate(groups):
        for each in group:
            if id(each) in seen:
                raise InvalidArgumentError(
                    f"{owner}: groups must hold each {member} once, but group {place} holds one twice."
                )
            seen.add(id(each))
    return [list(group) for group in groups if group]
