"""A plain allreduce within one host: ranks that exchange through shared memory, and do nothing else.

A memcpy moves bytes within a core's reach. Ranks must hand theirs to other cores, and a line of memory that another core
has read is taken away from it before it is written again, which costs more than to copy it.
"""

import mmap
import os
import threading

import numpy as np

from ringtrain.bench import ranks
from ringtrain.bench.systems import Sum

_LINE = 64  # bytes of a cache line, which a rank's counter has for itself
_PIECE = 1 << 20  # bytes of a tensor at a time: what is handed over stays in caches


class PlainAllreduce(Sum):
    """Each rank lays out what others sum, sums its share, lays that out, and takes the shares of the others.

    These are the bytes that must be handed over, each once, in two meetings of the ranks for each MiB; no agreement, and
    nothing that a library needs. All ranks are on one host.
    """

    name = "exchange"

    def use(self, work: np.ndarray) -> None:
        self.close()
        self._work, self._meetings = work, 0
        self._pieces = np.split(work, range(_PIECE // work.itemsize, work.size, _PIECE // work.itemsize))
        most = max(piece.size for piece in self._pieces)
        counters = ranks.size() * _LINE
        memory = _shared_by_all(counters + 2 * ranks.size() * most * work.itemsize)
        self._counters = np.frombuffer(memory, np.uint64, ranks.size() * _LINE // 8)[:: _LINE // 8]
        laid_out = np.frombuffer(memory, work.dtype, 2 * ranks.size() * most, counters)
        # By turn and rank, whose own share holds its sum. Who lays out again has met all at the turn between, and they
        # have taken what they needed.
        self._laid_out = laid_out.reshape(2, ranks.size(), most)
        self._fence = threading.Lock()
        self._fence.acquire()
        self._yields = ranks.size() > len(os.sched_getaffinity(0))

    def run(self) -> None:
        for piece in self._pieces:
            self._exchange(piece)

    def _exchange(self, piece: np.ndarray) -> None:
        me, all_ranks = ranks.rank(), range(ranks.size())
        laid_out = self._laid_out[self._meetings // 2 % 2]
        shares = [
            slice(piece.size * rank // len(all_ranks), piece.size * (rank + 1) // len(all_ranks)) for rank in all_ranks
        ]
        others = [rank for rank in all_ranks if rank != me]
        for other in others:
            np.copyto(laid_out[me, shares[other]], piece[shares[other]])
        self._meet()
        for other in others:
            np.add(piece[shares[me]], laid_out[other, shares[me]], out=piece[shares[me]])
        np.copyto(laid_out[me, shares[me]], piece[shares[me]])
        self._meet()
        for other in others:
            np.copyto(piece[shares[other]], laid_out[other, shares[other]])

    def _meet(self) -> None:
        """Returns when all ranks have called it as often; they then see what each has written before."""
        self._meetings += 1
        self._order()
        self._counters[ranks.rank()] = self._meetings
        while self._counters.min() < self._meetings:
            if self._yields:
                os.sched_yield()
        self._order()

    def _order(self) -> None:
        """Keeps what is read and written before it before what comes after it, on processors that would not."""
        self._fence.release()
        self._fence.acquire()

    def result(self) -> np.ndarray:
        return self._work

    def close(self) -> None:
        for name in ("_counters", "_laid_out"):
            self.__dict__.pop(name, None)


def _shared_by_all(size_bytes: int) -> mmap.mmap:
    """Zeroed memory of all ranks of this host, which needs no file and goes with its last user."""
    file = os.memfd_create("ringtrain-bench") if ranks.rank() == 0 else -1
    if ranks.rank() == 0:
        os.posix_fallocate(file, 0, size_bytes)
    path = ranks.gathered(f"/proc/{os.getpid()}/fd/{file}")[0]
    mine = os.open(path, os.O_RDWR)
    memory = mmap.mmap(mine, size_bytes)
    ranks.wait_for_all()  # all have opened it
    for each in {mine, file} - {-1}:
        os.close(each)
    return memory
