"""What ``bench allreduce --operation`` measures beside allreduce: how each system is asked for an operation, what its result
must be, and what it copies at least.

The size of an operation is that of the larger of what a rank puts in and what it gets. What others need of a rank must
lie in memory that they share, and what it gets in its own: the floor is a memcpy of as much, on all ranks at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import ringtrain as rt
from ringtrain.bench import ranks
from ringtrain.bench.systems import Gloo, Memcpy, Mpi, Over, Ringtrain, System


@dataclass(frozen=True)
class Collective:
    """An operation on float32 numbers; shares are parts of its size, by the number of ranks.

    Attributes:
        puts_in: share that a rank puts in.
        gets: share that it gets; None: the result is where the input was.
        copied: share that it must copy.
        right: what a rank gets, of what all put in.
        ours: asks ringtrain for it, under a name, with memory for the result where the operation takes some.
        gloo: asks torch.distributed, with tensors to read and to write.
        mpi: asks a communicator of mpi4py, with arrays to read and to write.
    """

    puts_in: Callable[[int], float]
    gets: Callable[[int], float] | None
    copied: Callable[[int], float]
    right: Callable[[Sequence[np.ndarray], int], np.ndarray]
    ours: Callable[[np.ndarray, str, np.ndarray], np.ndarray]
    gloo: Callable[[Any, Any, Any], object]
    mpi: Callable[[Any, np.ndarray, np.ndarray], object]


def _part(values: np.ndarray, rank: int) -> np.ndarray:
    return np.split(values, ranks.size())[rank]


def _newer(distributed: Any, name: str, older: str) -> Callable[..., object]:
    """A function of torch.distributed that was renamed in 2.13."""
    return getattr(distributed, name, None) or getattr(distributed, older)


def _whole(count: int) -> float:
    return 1.0


def _part_of(count: int) -> float:
    return 1.0 / count


def _neighbours(rank: int) -> tuple[int, int]:
    """The next rank, and the one before."""
    return (rank + 1) % ranks.size(), (rank - 1) % ranks.size()


def _ours_around(given: np.ndarray, result: np.ndarray) -> np.ndarray:
    after, before = _neighbours(rt.rank())
    handle = rt.send_async(given, after)
    rt.receive(result, before)
    handle.wait()
    return result


def _gloo_around(distributed: Any, given: Any, result: Any) -> None:
    after, before = _neighbours(ranks.rank())
    work = distributed.isend(given, after)
    distributed.recv(result, before)
    work.wait()


COLLECTIVES = {
    "allgather": Collective(
        puts_in=_part_of,
        gets=_whole,
        copied=lambda count: 1 + 1 / count,
        right=lambda inputs, rank: np.concatenate(list(inputs)),
        ours=lambda given, name, _: rt.allgather(given, name=name),
        gloo=lambda distributed, given, result: _newer(distributed, "all_gather_single", "all_gather_into_tensor")(
            result, given
        ),
        mpi=lambda world, given, result: world.Allgather(given, result),
    ),
    "alltoall": Collective(
        puts_in=_whole,
        gets=_whole,
        copied=lambda count: 2 - 1 / count,
        right=lambda inputs, rank: np.concatenate([_part(values, rank) for values in inputs]),
        ours=lambda given, name, _: rt.alltoall(given, name=name),
        gloo=lambda distributed, given, result: distributed.all_to_all_single(result, given),
        mpi=lambda world, given, result: world.Alltoall(given, result),
    ),
    "broadcast": Collective(
        puts_in=_whole,
        gets=None,
        copied=_whole,
        right=lambda inputs, rank: inputs[0],
        ours=lambda given, name, _: rt.broadcast_(given, 0, name=name),
        gloo=lambda distributed, given, result: distributed.broadcast(given, 0),
        mpi=lambda world, given, result: world.Bcast(given, 0),
    ),
    "reducescatter": Collective(
        puts_in=_whole,
        gets=_part_of,
        copied=_whole,
        right=lambda inputs, rank: sum(_part(values, rank) for values in inputs),
        ours=lambda given, name, _: rt.reducescatter(given, name=name, op=rt.Sum),
        gloo=lambda distributed, given, result: _newer(distributed, "reduce_scatter_single", "reduce_scatter_tensor")(
            result, given
        ),
        mpi=lambda world, given, result: world.Reduce_scatter_block(given, result),
    ),
    "send": Collective(  # to the next rank, while the one before sends to this one
        puts_in=_whole,
        gets=_whole,
        copied=_whole,
        right=lambda inputs, rank: inputs[_neighbours(rank)[1]],
        ours=lambda given, name, result: _ours_around(given, result),
        gloo=lambda distributed, given, result: _gloo_around(distributed, given, result),
        mpi=lambda world, given, result: world.Sendrecv(given, _neighbours(world.rank)[0], 0, result),
    ),
}


class _Moves:
    """The part of a system that knows which operation it is asked for."""

    def __init__(self, collective: Collective, *arguments: Any):
        super().__init__(*arguments)
        self._collective = collective

    def use(self, work: np.ndarray) -> None:
        super().use(work)  # type: ignore[misc]
        gets, puts_in = self._collective.gets, self._collective.puts_in
        self._output = work if gets is None else np.zeros(_times(work, gets, puts_in), np.float32)

    def result(self) -> np.ndarray:
        return self._output

    def is_right(self, inputs: Sequence[np.ndarray]) -> bool:
        return bool(np.array_equal(self.result(), self._collective.right(inputs, ranks.rank())))


def _times(work: np.ndarray, share: Callable[[int], float], puts_in: Callable[[int], float]) -> int:
    """Elements of a share, where the input has those of another."""
    return round(len(work) * share(ranks.size()) / puts_in(ranks.size()))


class RingtrainMoves(_Moves, Ringtrain):
    """Ours; what it gets lies in memory that the operation allocates, as its users have it."""

    def run(self) -> None:
        self._output = self._collective.ours(self._work, self._name, self._output)


class OverMoves(_Moves, Over):
    """The same over one transport."""

    def run(self) -> None:
        self._world.enter()
        self._output = self._collective.ours(self._work, self._operation, self._output)


class GlooMoves(_Moves, Gloo):
    """torch.distributed, which is given the memory for its results."""

    def use(self, work: np.ndarray) -> None:
        super().use(work)
        self._result = self._torch.from_numpy(self._output)

    def run(self) -> None:
        self._collective.gloo(self._distributed, self._parts[0], self._result)


class MpiMoves(_Moves, Mpi):
    """The MPI's own, which is given the memory for its results."""

    def run(self) -> None:
        self._collective.mpi(self._mpi.COMM_WORLD, self._work, self._output)


class MemcpyMoves(Memcpy):
    """The floor of an operation."""

    def __init__(self, collective: Collective):
        self._collective = collective

    def use(self, work: np.ndarray) -> None:
        super().use(np.resize(work, _times(work, self._collective.copied, self._collective.puts_in)))

    def is_right(self, inputs: Sequence[np.ndarray]) -> bool:
        return bool(np.array_equal(self._copy, self._work))


PEERS: dict[str, Callable[[Collective], System]] = {"gloo": GlooMoves, "mpi": MpiMoves}
