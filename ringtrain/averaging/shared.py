"""A tensor that workers share, and what all of them have in common of it."""

import enum
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Role(enum.Enum):
    """What becomes of a tensor at a synchronisation."""

    PARAMETER = "averaged, by way of the outer optimizer and the compression"
    STATISTIC = "averaged as it is"
    COUNTER = "the maximum"


class Shared(Protocol):
    """A tensor that workers share.

    Attributes:
        name: identity among the ranks.
        role: what becomes of it.
    """

    name: str
    role: Role

    def read(self) -> np.ndarray:
        """The values, flat; floating-point ones as float32 or float64. May be the tensor's own memory."""

    def held(self, values: np.ndarray) -> np.ndarray:
        """What ``read`` returns after ``write(values)``: rounded, where the tensor has 16 bits."""

    def write(self, values: np.ndarray) -> None:
        """Puts values that ``read`` would return into the tensor."""


@dataclass
class Copy:
    """What all workers have in common of a tensor: X and m, and the part that it is averaged with."""

    shared: Shared
    common: np.ndarray
    velocity: np.ndarray | None
    part: int = 0
