"""Which parameters a rank trains: compared before the first gradients travel, and the words where they differ. Pure.

A layer that is frozen on one rank leaves the others waiting for gradients that never come, or two layers' gradients under
one name. So ranks compare a digest of their lists, and the lists themselves where that differs.
"""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ringtrain._training.adapter.checks import hashed, named_ranks

_MOST = 4  # parameters that a text names


class Parameter(NamedTuple):
    """One that is trained.

    Attributes:
        name: what errors call it.
        shape: as text; "" where ranks may have parts of it.
    """

    name: str
    shape: str = ""

    @property
    def kind(self) -> tuple[str, str]:
        """What is the same on all ranks: of paths the end, without the numbers that frameworks count up in each process."""
        return "/".join(re.sub(r"_\d+(?=[/:]|$)", "", self.name).split("/")[-2:]), self.shape


def digest_of(trained: Sequence[Parameter]) -> int:
    """63 bits of what must be the same on all ranks."""
    return hashed(repr([each.kind for each in trained]).encode())


def encoded(trained: Sequence[Parameter]) -> bytes:
    """As bytes, to be sent."""
    return json.dumps(trained).encode()


def decoded(content: bytes) -> list[Parameter]:
    """What ``encoded`` was given."""
    return [Parameter(*each) for each in json.loads(content)]


def unequal_trained(optimizer: str, of_ranks: Sequence[tuple[int, Sequence[Parameter]]]) -> str:
    """The error's text, from pairs of a rank and what it trains."""
    found = " and ".join(
        f"{_listed(names)} {'is' if len(names) == 1 else 'are'} frozen or missing on {named_ranks(list(ranks))}"
        for ranks, names in _missing(of_ranks).items()
    )
    return (
        f"step '{optimizer}': the parameters that are trained must be the same on all ranks, in one order, but "
        f"{found or 'their order differs'}. Freeze the same layers on every rank, and give the optimizer or the tape the same "
        "parameters."
    )


def _missing(of_ranks: Sequence[tuple[int, Sequence[Parameter]]]) -> dict[tuple[int, ...], list[str]]:
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
