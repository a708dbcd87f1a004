"""Barriers that name the ranks which did not come, by a group's store and without its world.

So they tell who is missing even where an operation of the world stands still. Words and exceptions are those that programs
written for the backend "gloo" look for.
"""

import itertools
import time

from torch.distributed import Store

_LOOK_SECONDS = 0.001, 0.05  # first, and at most
_PASSED, _FAILED = "passed", "failed"


class StoreBarriers:
    """The barriers of a group, one after the other.

    Args:
        store: of the group alone; torch makes one for each.
        rank, size: this rank among the group's, and how many they are.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._numbers = itertools.count()
        self._passed = ""  # the last barrier, whose keys the other ranks may still look at

    def enter(self, seconds: float, wait_all_ranks: bool) -> None:
        """Returns when all ranks have come.

        Args:
            seconds: for which this rank waits.
            wait_all_ranks: whether rank 0 names all who are missing then, and not the first alone.

        Raises:
            RuntimeError: not all came in time. Rank 0 names them.
        """
        barrier = f"ringtrain/monitored_barrier/{next(self._numbers)}"
        if self._rank == 0:
            self._gather(barrier, seconds, wait_all_ranks)
        else:
            self._store.set(f"{barrier}/{self._rank}", "")
            if not self._await(f"{barrier}/{_PASSED}", time.monotonic() + seconds, f"{barrier}/{_FAILED}"):
                raise RuntimeError(
                    f"[Rank {self._rank}]: Rank {self._rank} successfully reached monitoredBarrier, but received errors "
                    "while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank."
                )

    def _gather(self, barrier: str, seconds: float, wait_all_ranks: bool) -> None:
        deadline = time.monotonic() + seconds
        missing: list[int] = []
        for rank in range(1, self._size):
            if not self._await(f"{barrier}/{rank}", deadline):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        self._store.set(f"{barrier}/{_FAILED if missing else _PASSED}", "")
        if not missing:
            self._forget(self._passed)  # which all have left, since they have come to this one
            self._passed = barrier
            return
        milliseconds = round(seconds * 1000)
        if milliseconds == 0:
            raise RuntimeError(
                f"[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms. Rank {missing[0]} had not come. Give it a timeout."
            )
        who = f"Ranks {', '.join(map(str, missing))}" if wait_all_ranks else f"Rank {missing[0]}"
        raise RuntimeError(f"[Rank 0]: {who} failed to pass monitoredBarrier in {milliseconds} ms")

    def _forget(self, barrier: str) -> None:
        if barrier:
            for key in (_PASSED, *map(str, range(1, self._size))):
                self._store.delete_key(f"{barrier}/{key}")

    def _await(self, key: str, deadline: float, *but: str) -> bool:
        """Whether a key comes, by the deadline and before one of the others. Other threads may use the store meanwhile."""
        pause, most = _LOOK_SECONDS
        while not self._store.check([key]):
            if time.monotonic() >= deadline or any(self._store.check([other]) for other in but):
                return False
            time.sleep(pause)
            pause = min(2 * pause, most)
        return True
