"""The systems that the allreduce benchmark compares: one class each, with the same members.

``System`` says what the benchmark calls when. ``PEERS`` are those that ``--peers`` can name.
"""

import shutil
from typing import Protocol

import numpy as np
from mpi4py import MPI

import ringtrain as rt
from ringtrain.bench import ranks


class System(Protocol):
    """What the benchmark needs from a system."""

    name: str
    sums: bool  # False for the floor, which only copies

    def use(self, work: np.ndarray) -> None:
        """Takes the array that the coming operations work on."""

    def run(self) -> None:
        """One operation; this is what is timed."""

    def result(self) -> np.ndarray:
        """Where its result is."""

    def close(self) -> None:
        """Gives back what it holds."""


class Ringtrain:
    """Ours, through the public Python API, in the world that ``rt.init`` opened."""

    sums = True

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


class Gloo:
    """torch.distributed with its gloo backend, as DDP on CPUs uses it."""

    name = "gloo"
    sums = True

    def __init__(self):
        import torch
        import torch.distributed as distributed

        self._torch, self._distributed = torch, distributed
        self._folder = ranks.shared_folder()
        distributed.init_process_group(
            "gloo", init_method=f"file://{self._folder}/store", rank=ranks.rank(), world_size=ranks.size()
        )

    def use(self, work: np.ndarray) -> None:
        self._work = work
        self._tensor = self._torch.from_numpy(work)

    def run(self) -> None:
        self._distributed.all_reduce(self._tensor)

    def result(self) -> np.ndarray:
        return self._work

    def close(self) -> None:
        self._distributed.destroy_process_group()
        ranks.wait_for_all()
        shutil.rmtree(self._folder, ignore_errors=True)


class Mpi:
    """MPI_Allreduce in place, of the MPI library that ringtrain runs over too."""

    name = "mpi"
    sums = True

    def use(self, work: np.ndarray) -> None:
        self._work = work

    def run(self) -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, self._work, MPI.SUM)

    def result(self) -> np.ndarray:
        return self._work

    def close(self) -> None:
        del self._work


class Memcpy:
    """The floor: every rank copies the same number of bytes once, all at the same time."""

    name = "memcpy"
    sums = False

    def use(self, work: np.ndarray) -> None:
        self._work = work
        self._copy = np.zeros_like(work)
        self._copy.fill(0)  # touches the pages

    def run(self) -> None:
        np.copyto(self._copy, self._work)

    def result(self) -> np.ndarray:
        return self._copy

    def close(self) -> None:
        del self._work, self._copy


PEERS = {"gloo": Gloo, "mpi": Mpi}
