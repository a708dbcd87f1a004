"""Which gradients travel together once the steps have become alike: the optimizer's groups, made into buckets.

``window`` notes here what each of its windows reduced, and asks for the groups of the next one. All ranks note the same, since
they have agreed on it, and so have the same buckets from the same window on.
"""

from collections.abc import Iterator, Sequence

import torch

from ringtrain.torch.agreement import DENSE
from ringtrain.torch.buckets import Bucket
from ringtrain.torch.gradients import Group, Member
from ringtrain.torch.tensors import DTYPE_IDS

# Windows that reduced the same gradients before they become views: the first ones find what is unused or sparse.
STEADY_WINDOWS = 3
# Parameters that were not grouped share buckets of this size. What is larger travels alone, unpacked as it is.
BUCKET_BYTES = 8 << 20


class Plan:
    """The groups that an optimizer was given, and those in which its gradients travel.

    Args:
        prefix: of the names of buckets.
        makes_buckets: whether there shall be any.

    Attributes:
        groups: in which gradients travel in the current window.
    """

    def __init__(self, prefix: str, makes_buckets: bool):
        self.groups: list[Group] = []
        self._prefix = prefix
        self._makes_buckets = makes_buckets
        self._given: list[Group] = []
        # By member, DENSE, SPARSE or 0 for what was reduced of it: in this window, in the last one, when buckets were made.
        self._kinds = self._last_kinds = self._bucketed_kinds = b""
        self._alike = 0  # windows in a row

    @property
    def given_count(self) -> int:
        """How many groups the optimizer was given."""
        return len(self._given)

    def add(self, groups: Sequence[Group]) -> None:
        """Takes further groups over; buckets are given up until steps are alike again."""
        self._given += groups
        self._travel_in(list(self._given))
        self._kinds = self._last_kinds = self._bucketed_kinds = bytes(sum(len(group.members) for group in self._given))
        self._alike = 0

    def note(self, codes: Sequence[int], closed: bool) -> None:
        """Notes what a round has reduced, as a code for each member, and whether the window is closed by that."""
        if not self._makes_buckets:
            return
        self._kinds = bytes(
            code if code >= DENSE else kind for kind, code in zip(self._kinds, codes, strict=True)
        )
        if closed:
            self._alike = self._alike + 1 if self._kinds == self._last_kinds else 1
            self._last_kinds, self._kinds = self._kinds, bytes(len(self._kinds))

    def renew(self) -> None:
        """Makes buckets, or makes them anew, if the last windows were alike; between two windows."""
        if self._alike >= STEADY_WINDOWS and self._last_kinds != self._bucketed_kinds:
            self._bucketed_kinds = self._last_kinds
            self._travel_in(in_buckets(self._given, self._bucketed_kinds, self._prefix))

    def _travel_in(self, groups: list[Group]) -> None:
        self.groups = groups
        for group in groups:
            for member in group.members:
                member.group = group


def in_buckets(groups: Sequence[Group], kinds: bytes, prefix: str) -> list[Group]:
    """The same members in groups that have buckets, where that saves packing; the others as they were.

    A group of several members becomes one bucket. Members that are alone fill buckets in the order in which backward
    passes reach them, from the last one on. A bucket holds dense gradients of one dtype and device.
    """
    found, lone = [], []
    for group in groups:
        if len(group.members) == 1:
            lone.append(group)
        else:
            kind_of_all = {_bucket_kind(member, kinds) for member in group.members}
            fits = len(kind_of_all) == 1 and None not in kind_of_all
            found.append(_with_bucket(group.name, group.members) if fits else group)
    for number, run in enumerate(_runs(reversed(lone), kinds)):
        if len(run) == 1:
            found += run
        else:
            found.append(_with_bucket(f"{prefix}.bucket.{number}", [group.members[0] for group in run]))
    return found


def _runs(groups: Iterator[Group], kinds: bytes) -> Iterator[list[Group]]:
    """Groups of one member in runs of one kind, each as long as its gradients fit in a bucket."""
    open_runs: dict[tuple, list[Group]] = {}
    for group in groups:
        (member,) = group.members
        kind = _bucket_kind(member, kinds)
        if kind is None or member.parameter.nbytes >= BUCKET_BYTES:
            yield [group]
            continue
        run = open_runs.setdefault(kind, [])
        run.append(group)
        if sum(each.members[0].parameter.nbytes for each in run) >= BUCKET_BYTES:
            yield open_runs.pop(kind)
    yield from open_runs.values()


def _bucket_kind(member: Member, kinds: bytes) -> tuple[torch.dtype, torch.device] | None:
    """What the members of a bucket have in common; None for one that is in none."""
    parameter = member.parameter
    if kinds[member.index] != DENSE or parameter.dtype not in DTYPE_IDS:
        return None
    return parameter.dtype, parameter.device


def _with_bucket(name: str, members: Sequence[Member]) -> Group:
    return Group(name, list(members), Bucket([member.parameter for member in members]))
