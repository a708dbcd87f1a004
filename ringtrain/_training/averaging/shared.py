"""A tensor that workers share, and what all of them have in common of it."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class Role(enum.Enum):
    """What becomes of a tensor at a synchronisation."""

    PARAMETER = "averaged, by way of the outer optimizer and the compression"
    STATISTIC = "averaged as it is"
    COUNTER = "the maximum"

    @classmethod
    def of(cls, is_trained: bool, is_float: bool) -> "Role":
        """That of a parameter, of a model's statistics, or of anything else."""
        return cls.PARAMETER if is_trained else cls.STATISTIC if is_float else cls.COUNTER


class AveragedArrays(Protocol):
    """What of ``_training.arrays`` is asked of a framework here."""

    def flat(self, array: Any) -> np.ndarray:
        """As there."""

    def rounded(self, values: np.ndarray, array: Any) -> np.ndarray:
        """As there."""

    def from_host(self, array: np.ndarray) -> Any:
        """As there."""


class Shared:
    """A tensor that workers share, and its values as flat arrays in host memory; 16 bits as float32.

    Args:
        arrays: of the framework.
        name: identity among the ranks.
        role: what becomes of it.
        array: gives the array that has the values, for reading and writing.
    """

    def __init__(self, arrays: AveragedArrays, name: str, role: Role, array: Callable[[], Any]):
        self.name, self.role = name, role
        self._arrays, self._array = arrays, array

    def read(self) -> np.ndarray:
        """The values; floating-point ones as float32 or float64. May be the tensor's own memory."""
        return self._arrays.flat(self._array())

    def held(self, values: np.ndarray) -> np.ndarray:
        """What ``read`` returns after ``write(values)``: rounded, where the tensor has 16 bits."""
        return self._arrays.rounded(values, self._array())

    def write(self, values: np.ndarray) -> None:
        """Puts values that ``read`` would return into the tensor."""
        array = self._array()
        array[...] = self._arrays.from_host(values.reshape(array.shape))


@dataclass
class Copy:
    """What all workers have in common of a tensor: X and m, and the part that it is averaged with."""

    shared: Shared
    common: np.ndarray
    velocity: np.ndarray | None
    part: int = 0
