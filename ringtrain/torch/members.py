"""The parameters of one optimizer, as its gradients travel: their names among the ranks, and their groups."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ringtrain._training.feedback import Feedback
from ringtrain._training.powersgd import Beginning, Memory
from ringtrain._training.trained import Parameter
from ringtrain.torch.arrays import TORCH
from ringtrain.torch.bucketing import Bucketing
from ringtrain.torch.gradients import Group, OptimizedParameter, ReductionSettings

MakeGroup = Callable[[str, list[OptimizedParameter]], Group]


class Members:
    """Parameters of one optimizer, numbered in the order in which they were added.

    Args:
        settings: how gradients are combined, the same on all ranks.
        bucketing: takes the groups.
        beginning: when PowerSGD begins; None without it.
        make_group: makes groups of another kind than those of ``gradients``.

    Attributes:
        prefix: of all names that the optimizer submits; "" before it is in a world.
    """

    def __init__(
        self, settings: ReductionSettings, bucketing: Bucketing, beginning: Beginning | None, make_group: MakeGroup
    ):
        self.prefix = ""
        self._settings = settings
        self._bucketing = bucketing
        self._beginning = beginning
        self._make_group = make_group
        self._names: dict[torch.Tensor, str] = {}  # prefix not included
        self._members: list[OptimizedParameter] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[OptimizedParameter]:
        return iter(self._members)

    def __getitem__(self, index: int) -> OptimizedParameter:
        return self._members[index]

    def rename(self, prefix: str) -> None:
        """Names all anew, with another prefix; between two steps, or when nothing is on its way."""
        self.prefix = prefix
        for member in self._members:
            member.name = self.name_of(member.parameter)
        for number, group in enumerate(self._bucketing.given):
            group.name = self._group_name(number, [member.parameter for member in group.members])
        self._bucketing.rename()

    def add_names(self, names: Mapping[torch.Tensor, str]) -> None:
        """Names parameters, those of this optimizer or others that may be added later; the first name stays."""
        for parameter, name in names.items():
            self._names.setdefault(parameter, name)

    def name_of(self, parameter: torch.Tensor) -> str:
        """The identity of a parameter among the ranks."""
        return f"{self.prefix}.{self._names[parameter]}"

    def add(self, groups: Sequence[Sequence[torch.Tensor]]) -> range:
        """Takes over further parameters, in groups; returns their places."""
        first, first_group = len(self._members), len(self._bucketing.given)
        self._bucketing.add(
            [self._group_of(parameters, number) for number, parameters in enumerate(groups, first_group)]
        )
        return range(first, len(self._members))

    def trained(self) -> list[Parameter]:
        """As ranks compare them, those that are frozen too."""
        return [Parameter(self._names[member.parameter]) for member in self._members]

    def memories(self) -> list[Memory]:
        """What PowerSGD keeps of gradients, in the order of the parameters."""
        return [member.memory for member in self._members if member.memory is not None]

    def feedback(self) -> Feedback:
        """What compression has lost of these gradients."""
        how, memories = self._settings, self.memories()
        return Feedback(
            TORCH, how.session, f"{self.prefix}.", how.averages, how.keeps_residuals, memories, self._beginning
        )

    def _group_of(self, parameters: Sequence[torch.Tensor], number: int) -> Group:
        first = len(self._members)
        self._members += [
            OptimizedParameter(parameter, self.name_of(parameter), index, memory=self._memory_of(parameter))
            for index, parameter in enumerate(parameters, first)
        ]
        return self._make_group(self._group_name(number, parameters), self._members[first:])

    def _group_name(self, number: int, parameters: Sequence[torch.Tensor]) -> str:
        return self.name_of(parameters[0]) if len(parameters) == 1 else f"{self.prefix}.group.{number}"

    def _memory_of(self, parameter: torch.Tensor) -> Memory | None:
        powersgd, beginning = self._settings.powersgd, self._beginning
        if powersgd is None or beginning is None:
            return None
        shape = powersgd.shape_of(parameter.shape) if parameter.is_floating_point() else None
        if shape is None:
            return None
        return Memory(TORCH, shape, self._names[parameter], beginning, parameter.dtype == torch.float64)
