"""What ``benchmarks compress`` measures beside the modes of ``ringtrain.launch.modes``: PowerSGD, and fragments that travel.

Their bytes are not a share of float32's. Those of PowerSGD follow from the matrices, here each gradient as square as its
number of elements allows; fragments are averaged in turn, over several batches.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

import ringtrain as rt
from ringtrain._runtime.process_sets import global_process_set
from ringtrain._training.on_host import HostReducer, HostSettings
from ringtrain._training.powersgd import RESIDUAL, PowerSGD
from ringtrain._training.session import Session
from ringtrain.launch.modes import FURTHER, STREAMING, streaming_batch_seconds

RANK = 2
NEAR = 1e-5  # of the largest element: what float32 rounds in the sums of a product


class Way(Protocol):
    """A way of sending gradients, in the world that is entered.

    Attributes:
        batches: of a turn.
    """

    batches: int

    def run(self, compute: Callable[[], None]) -> None:
        """The batches of a turn, each of which computes once."""

    def bytes_sent(self, hosts: int) -> float:
        """What a host must send in a turn."""

    def foretold(self, computing: float, exchange: float, exact: float) -> float:
        """Seconds of a batch, from those of computing, of an exchange alone and of one of float32."""

    def is_right(self) -> bool:
        """Whether its results are, by some more batches."""


class Factors:
    """PowerSGD, as Keras and TensorFlow have it: two factors of each gradient, when all have been computed.

    Args:
        gradients: flat, of float32.
    """

    batches = 1

    def __init__(self, gradients: Sequence[np.ndarray]):
        self._matrices = [as_matrix(gradient) for gradient in gradients]
        self._names = [f"compress.powersgd.{index}" for index in range(len(gradients))]
        self._how = PowerSGD(RANK, start_after=1)
        settings = HostSettings(averages=True, powersgd=self._how)
        self._host = HostReducer(Session(global_process_set), "compress.powersgd.", settings)

    def run(self, compute: Callable[[], None]) -> None:
        """Computes, then sends."""
        compute()
        self._reduce()

    def bytes_sent(self, hosts: int) -> float:
        """2 (H - 1) / H of rank (n + m) elements of a matrix n x m, and of all of one that would not shrink."""
        return 2 * (hosts - 1) / hosts * sum(factor_bytes(self._how, matrix.shape) for matrix in self._matrices)

    def foretold(self, computing: float, exchange: float, exact: float) -> float:
        """One after the other."""
        return computing + exchange

    def is_right(self) -> bool:
        """Whether what is delivered, and what the ranks have lost then, is all that was to be delivered."""
        kept_before = self._kept()
        results = self._reduce()
        kept = zip(kept_before, self._kept(), strict=True)
        for name, matrix, result, (before, lost) in zip(self._names, self._matrices, results, kept, strict=True):
            exact = rt.allreduce(matrix, f"{name}.exact")
            if np.abs(result + lost - before - exact).max() > NEAR * np.abs(exact).max():
                return False
        return True

    def _reduce(self) -> list[np.ndarray]:
        results = self._host.reduce(self._names, self._matrices)
        self._host.settle(used=True)
        return results

    def _kept(self) -> list[np.ndarray]:
        """The mean of what ranks have lost, by gradient."""
        state = self._host.compression_state()
        return [
            state[f"{index}/0"][RESIDUAL] if f"{index}/0" in state else np.zeros_like(matrix)
            for index, matrix in enumerate(self._matrices)
        ]


class Fragments:
    """Local steps whose fragments travel while training goes on, as the doctor names them.

    Args:
        gradients: of which the parameters have the sizes.
    """

    batches = STREAMING["every"]

    def __init__(self, gradients: Sequence[np.ndarray]):
        self._parameters = [np.zeros_like(gradient) for gradient in gradients]
        how = STREAMING
        self._average = rt.PeriodicAverage(
            self._parameters, how["every"], fragments=how["fragments"], overlap=how["overlap"]
        )
        for _ in range(STREAMING["overlap"]):  # so that nothing is on its way when a turn ends
            self._average.step()

    def run(self, compute: Callable[[], None]) -> None:
        """A whole period; each fragment leaves once."""
        for _ in range(self.batches):
            compute()
            self._average.step()

    def bytes_sent(self, hosts: int) -> float:
        """2 (H - 1) / H of all parameters."""
        return 2 * (hosts - 1) / hosts * sum(parameter.nbytes for parameter in self._parameters)

    def foretold(self, computing: float, exchange: float, exact: float) -> float:
        """Only what the overlap does not cover is waited for."""
        return streaming_batch_seconds(computing, exact, **STREAMING)

    def is_right(self) -> bool:
        """Whether what the ranks have changed becomes the mean."""
        before = [parameter.copy() for parameter in self._parameters]
        for parameter in self._parameters:
            parameter += rt.rank()
        self._average.synchronize()
        change = np.float32((rt.size() - 1) / 2)
        return all(
            np.allclose(parameter, former + change, rtol=NEAR, atol=NEAR)
            for parameter, former in zip(self._parameters, before, strict=True)
        )


WAYS: dict[str, Callable[[Sequence[np.ndarray]], Way]] = dict(zip(FURTHER, (Factors, Fragments), strict=True))


def as_matrix(flat: np.ndarray) -> np.ndarray:
    """The same memory with as many rows as columns, or as near as that can be."""
    rows = max(rows for rows in range(1, int(flat.size**0.5) + 1) if flat.size % rows == 0)
    return flat.reshape(rows, -1)


def factor_bytes(how: PowerSGD, dimensions: Sequence[int]) -> int:
    """Of what travels for a gradient in float32: its factors, or the gradient."""
    shape = how.shape_of(dimensions)
    return 4 * (int(np.prod(dimensions)) if shape is None else shape.rank * (shape.rows + shape.columns))
