"""The groups of one optimizer: those that it was given, and those with buckets, once its steps have become alike.

``exchange`` notes here what each step reduced, and asks for the groups of the next one. ``ringtrain.gradients.plan``
decides; here the decision becomes groups of tensors.
"""

from collections.abc import Iterator, Sequence

import torch

from ringtrain.gradients.plan import SteadySteps, assigned
from ringtrain.gradients.presence import DENSE
from ringtrain.torch.buckets import Bucket
from ringtrain.torch.gradients import Group, Member
from ringtrain.torch.tensors import DTYPE_IDS

BUCKET_BYTES = 8 << 20  # that parameters share which were not grouped


class Bucketing:
    """Which groups the gradients travel in.

    Args:
        makes_buckets: whether there shall be any.

    Attributes:
        given: the groups that the optimizer was given.
        groups: those in which gradients travel in the current step.
    """

    def __init__(self, makes_buckets: bool):
        self.given: list[Group] = []
        self.groups: list[Group] = []
        self._steps = SteadySteps() if makes_buckets else None

    def add(self, groups: Sequence[Group]) -> None:
        """Takes further groups over; buckets are given up until steps are alike again."""
        self.given += groups
        self.restart()

    def restart(self) -> None:
        """Gives buckets up until steps are alike again."""
        self._travel_in(list(self.given))
        if self._steps is not None:
            self._steps.begin(sum(len(group.members) for group in self.given))

    def end(self) -> None:
        """Has no buckets from now on; between two steps."""
        self._travel_in(list(self.given))
        self._steps = None

    def note(self, agreed: bytes, closes: bool) -> None:
        """Notes what a round has reduced, as a code for each member, and whether the step is closed by that."""
        if self._steps is not None:
            self._steps.note(agreed, closes)

    def renew(self, prefix: str) -> None:
        """Makes buckets, or makes them anew, if the last steps were alike; between two steps.

        Args:
            prefix: of the names of buckets.
        """
        if self._steps is not None and self._steps.have_new_kinds():
            self._travel_in(list(in_buckets(self.given, self._steps.kinds, prefix)))

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
    members = {member.index: member for group in groups for member in group.members}

    def kind_of(index: int) -> tuple[torch.dtype, torch.device] | None:
        parameter = members[index].parameter
        fits = kinds[index] == DENSE and parameter.dtype in DTYPE_IDS
        return (parameter.dtype, parameter.device) if fits else None

    places = [[member.index for member in group.members] for group in groups]
    for number, each in enumerate(
        assigned(places, kind_of, lambda index: members[index].parameter.nbytes, BUCKET_BYTES)
    ):
        given = None if each.group is None else groups[each.group]
        if given is not None and not each.in_bucket:
            yield given
        else:
            name = f"{prefix}.bucket.{number}" if given is None else given.name
            yield _with_bucket(name, [members[index] for index in each.places])


def _with_bucket(name: str, members: list[Member]) -> Group:
    return Group(name, members, Bucket([member.parameter for member in members]))
