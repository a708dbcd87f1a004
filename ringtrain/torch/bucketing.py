"""The groups of one optimizer: those that it was given, and larger ones, once its steps have become alike.

``exchange`` notes here what each step reduced, and asks for the groups of the next one. ``ringtrain._training.bucket_plan``
decides; here the decision becomes groups of tensors.
"""

import enum
from collections.abc import Iterator, Sequence

import torch

from ringtrain._training.bucket_plan import SteadySteps, assigned
from ringtrain._training.presence import DENSE
from ringtrain.torch.buckets import Bucket
from ringtrain.torch.gradients import Group, OptimizedParameter, ReductionSettings
from ringtrain.torch.tensors import DTYPE_IDS

BUCKET_BYTES = 8 << 20  # that parameters share which were not grouped
GROUP_BYTES = 1 << 20  # of gradients that travel together without having memory in common


class Growth(enum.Enum):
    """What becomes of the given groups, once steps have become alike."""

    NONE = "they stay"
    GROUPS = "gradients that were alone and are small travel together, as one operation"
    BUCKETS = "gradients have memory in common"


def growth_of_groups(settings: ReductionSettings, makes_buckets: bool) -> Growth:
    """What is kept under a gradient's name, or is made of each one alone, leaves groups as they are."""
    if makes_buckets:
        return Growth.BUCKETS
    one_by_one = settings.keeps_residuals or settings.compressor is not None or settings.powersgd is not None
    return Growth.NONE if one_by_one else Growth.GROUPS


class Bucketing:
    """Which groups the gradients travel in.

    Args:
        growth: what becomes of them.

    Attributes:
        given: the groups that the optimizer was given.
        groups: those in which gradients travel in the current step.
    """

    def __init__(self, growth: Growth):
        self._growth = growth
        self.given: list[Group] = []
        self.groups: list[Group] = []
        self._steps = None if growth is Growth.NONE else SteadySteps()

    def add(self, groups: Sequence[Group]) -> None:
        """Takes further groups over; those that were made are given up until steps are alike again."""
        self.given += groups
        self.restart()

    def restart(self) -> None:
        """Goes back to the given groups until steps are alike again."""
        self._travel_in(list(self.given))
        if self._steps is not None:
            self._steps.begin(sum(len(group.members) for group in self.given))

    def keep_apart(self, growth: Growth) -> None:
        """From now on gradients have no memory in common; between two steps.

        Args:
            growth: what becomes of the groups instead, unless they stay.
        """
        if self._growth is Growth.BUCKETS:
            self._growth = growth
            self._steps = None if growth is Growth.NONE else SteadySteps()
        self.restart()

    def rename(self) -> None:
        """Names groups after their first member again, which has another name now."""
        for group in self.groups:
            if group.bucket is None and group not in self.given:
                group.name = _name_of(group.members)

    def note(self, agreed: bytes, closes: bool) -> None:
        """Notes what a round has reduced, as a code for each member, and whether the step is closed by that."""
        if self._steps is not None:
            self._steps.note(agreed, closes)

    def renew(self, prefix: str) -> None:
        """Makes groups, or makes them anew, if the last steps were alike; between two steps.

        Args:
            prefix: of the names of buckets.
        """
        if self._steps is not None and self._steps.have_new_kinds():
            grown = in_buckets if self._growth is Growth.BUCKETS else in_groups
            self._travel_in(list(grown(self.given, self._steps.kinds, prefix)))

    def _travel_in(self, groups: list[Group]) -> None:
        self.groups = groups
        for group in groups:
            group.take_over()


def in_buckets(groups: Sequence[Group], kinds: bytes, prefix: str) -> Iterator[Group]:
    """The same members in groups that have buckets, where that saves packing; the others as they were.

    Args:
        groups: given ones; their members are numbered from 0 on.
        kinds: what the steps reduced of each member.
        prefix: of the names of buckets.
    """
    for number, (given, members) in enumerate(_assigned(groups, kinds, BUCKET_BYTES)):
        if given is not None and members is None:
            yield given
        elif members is not None:
            name = f"{prefix}.bucket.{number}" if given is None else given.name
            yield Group(name, members, Bucket([member.parameter for member in members]))


def in_groups(groups: Sequence[Group], kinds: bytes, _: str = "") -> Iterator[Group]:
    """The same members, those that were alone and are small together with their neighbours; the others as they were."""
    for given, members in _assigned(groups, kinds, GROUP_BYTES):
        if given is not None:
            yield given
        elif members is not None:
            yield Group(_name_of(members), members)


def _name_of(members: Sequence[OptimizedParameter]) -> str:
    return f"{members[0].name} and {len(members) - 1} more"


def _assigned(
    groups: Sequence[Group], kinds: bytes, most_bytes: int
) -> Iterator[tuple[Group | None, list[OptimizedParameter] | None]]:
    """Which members belong together: the given group, if they are one, and the members, if they can share a bucket."""
    members = {member.index: member for group in groups for member in group.members}

    def kind_of(index: int) -> tuple[torch.dtype, torch.device] | None:
        parameter = members[index].parameter
        fits = kinds[index] == DENSE and parameter.dtype in DTYPE_IDS
        return (parameter.dtype, parameter.device) if fits else None

    places = [[member.index for member in group.members] for group in groups]
    for each in assigned(places, kind_of, lambda index: members[index].parameter.nbytes, most_bytes):
        given = None if each.group is None else groups[each.group]
        yield given, [members[index] for index in each.places] if each.in_bucket else None
