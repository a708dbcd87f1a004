"""Which parameters a rank trains, and the words where that is not the same on all ranks. Pure.

A layer that one rank alone has frozen counts as zeros in the average of the others, leaves them waiting for gradients that
never come, or gives two layers' gradients one name. Ranks say what they train in messages that they send anyhow; where
that differs, they tell each other their lists.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ringtrain._training.adapter.checks import hashed, named_ranks

_MOST = 4  # parameters that a text names


class Parameter(NamedTuple):
    """One that is trained.

    Attributes:
        name: what errors call it.
        shape: as text; "" where its name is that of all ranks.
    """

    name: str
    shape: str = ""

    @property
    def kind(self) -> tuple[str, str]:
        """What is the same on all ranks: of paths the end, without the numbers that frameworks count up in each process."""
        return "/".join(re.sub(r"_\d+(?=[/:]|$)", "", self.name).split("/")[-2:]), self.shape


Lists = Sequence[tuple[int, Sequence[Parameter]]]


def digest_of(trained: Sequence[Parameter]) -> int:
    """63 bits of what must be the same on all ranks."""
    return hashed(encoded([Parameter(*each.kind) for each in trained]))


def encoded(trained: Sequence[Parameter]) -> bytes:
    """As bytes, to be sent."""
    return json.dumps(trained).encode()


def decoded(content: bytes) -> list[Parameter]:
    """What ``encoded`` was given."""
    return [Parameter(*each) for each in json.loads(content)]


def are_alike(of_ranks: Lists) -> bool:
    """Whether all ranks train the same parameters, in one order."""
    return len({tuple(each.kind for each in trained) for _, trained in of_ranks}) <= 1


def unequal_trained(optimizer: str, of_ranks: Lists, compared_by: str = "") -> str:
    """The error's text.

    Args:
        optimizer: that steps.
        of_ranks: ranks with what they train.
        compared_by: what takes the mode that lets replicas differ; "" where that does not help.
    """
    everyone = [rank for rank, _ in of_ranks]
    found = " and ".join(
        f"{_listed(names)} {'is' if len(names) == 1 else 'are'} trained on "
        f"{named_ranks([rank for rank in everyone if rank not in lacking])} and not on {named_ranks(list(lacking))}"
        for lacking, names in _missing(of_ranks).items()
    )
    way_out = f' Or give {compared_by} a mode with replicas="differ": then zeros count for what is frozen.'
    return (
        f"step '{optimizer}': the parameters that are trained must be the same on all ranks, but "
        f"{found or 'their order differs'}. Freeze the same layers on every rank, before the same step, also where one rank alone "
        f"loads a checkpoint; give every rank's optimizer the same parameters, in one order.{way_out if compared_by else ''}"
    )


def _missing(of_ranks: Lists) -> Mapping[tuple[int, ...], list[str]]:
    """For ranks that lack something the parameters, as others call them."""
    names: dict[tuple[str, str], dict[int, list[Parameter]]] = defaultdict(dict)
    for rank, trained in of_ranks:
        for each in trained:
            names[each.kind].setdefault(rank, []).append(each)
    missing: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for own in names.values():
        most = max(own.values(), key=len)
        for place, each in enumerate(most):
            if lacking := tuple(rank for rank, _ in of_ranks if _lacks(own.get(rank, []), place, most)):
                missing[lacking].append(f"'{each.name}'" + (f" of shape {each.shape}" if each.shape else ""))
    return missing


def _lacks(own: Sequence[Parameter], place: int, most: Sequence[Parameter]) -> bool:
    """Whether one of several that are called alike is missing: by its full name, or else the last ones are."""
    if len(own) == len(most):
        return False
    known, named = {each.name for each in most}, {each.name for each in own}
    return most[place].name not in named if named <= known and len(known) == len(most) else place >= len(own)


def _listed(names: Sequence[str]) -> str:
    told = list(names[:_MOST])
    return ", ".join(told) + (f" and {len(names) - len(told)} more" if len(names) > len(told) else "")
