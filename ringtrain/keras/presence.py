"""Which gradients of a step any rank has, where the step runs at once: the ranks agree beside the gradients."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import keras

from ringtrain._runtime.context import current
from ringtrain._runtime.process_sets import id_of
from ringtrain._training.agreement import Agreement
from ringtrain._training.grouping import Groups, grouped
from ringtrain._training.presence import DENSE, MISSING
from ringtrain._training.trained import Parameter
from ringtrain.keras.types import Gradient, Gradients, Tensor
from ringtrain.keras.variables import path_of

if TYPE_CHECKING:
    from ringtrain.keras.reduction_settings import Settings

Combine = Callable[[list[int], list[Gradient | None]], list[Gradient | None]]
_WHO_IS_MISSING = (
    "With it the ranks agree which gradients there are: the missing ones have not come to apply() with these variables. "
    "Take the same steps on every rank."
)


def reduce_present(
    gradients: Gradients,
    names: Sequence[str],
    variables: Sequence[keras.Variable],
    settings: "Settings",
    groups: Groups,
    combine: Combine,
    zeros: Callable[[keras.Variable], Tensor],
) -> list[Gradient | None]:
    """What ``combine`` makes of each group of gradients that any rank has; zeros count for those that this one lacks.

    Args:
        gradients: of this rank, None for those that it lacks.
        names: of the gradients.
        variables: what they belong to.
        settings: ``reduction.Settings``.
        groups: which of them go together.
        combine: makes of places, and all gradients, those at the places.
        zeros: makes them for a variable.
    """
    if not gradients:
        return []
    codes = bytes(MISSING if gradient is None else DENSE for gradient in gradients)
    agreement = Agreement(current(), id_of(settings.process_set), f"{names[0]}.present", codes, _WHO_IS_MISSING)
    agreement.meet(
        settings.process_set, lambda: [Parameter(path_of(each), str(list(each.shape))) for each in variables]
    )
    results = agreement.complete(gradients, codes, lambda place, _: zeros(variables[place]))
    results = combine_each(results, variables, groups, combine)
    agreement.agreed()  # its name is free then
    return results


def combine_each(
    gradients: Gradients, variables: Sequence[keras.Variable], groups: Groups, combine: Combine
) -> list[Gradient | None]:
    """What ``combine`` makes of each group of the gradients that are there."""
    results = list(gradients)
    present = [place for place, gradient in enumerate(results) if gradient is not None]
    for group in grouped([variables[place] for place in present], groups):
        places = [present[each] for each in group]
        for place, result in zip(places, combine(places, results), strict=True):
            results[place] = result
    return results
