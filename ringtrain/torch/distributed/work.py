"""A collective that was submitted, as torch's ``Work``: waited for by whoever wants its result, or by way of a future."""

import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Work

from ringtrain._runtime import exits
from ringtrain._runtime.pending import Operation
from ringtrain.errors import ClosedError, PeerLostError
from ringtrain.errors import TimeoutError as RingtrainTimeout
from ringtrain.torch.distributed.completions import Completions
from ringtrain.torch.eager import with_eager_methods

Place = Callable[[Operation], None]
_SMALL_BYTES = 4096
_OF_A_PEER = re.compile(rf"(?:^|callback: )(?:{PeerLostError.__name__}|{ClosedError.__name__}): ")


class _MeetsErrorsOfPeers(type):
    def __instancecheck__(cls, problem: object) -> bool:
        return type(problem) is RuntimeError and _OF_A_PEER.search(str(problem)) is not None


class ErrorOfAPeer(Exception, metaclass=_MeetsErrorsOfPeers):
    """Stands for the RuntimeError of a future, such as DDP's, that says what became of another rank: the class is text there.

    Else a launcher would take the rank that met it for the first that has failed.
    """


exits.count_as_errors_of_peers(ErrorOfAPeer)


class PendingWork:
    """An operation of the core with what is left to do when it is done: its results go where torch wants them.

    Args:
        operation: the submitted operation.
        results: the tensors that the caller gave for results.
        place: copies what the core allocated into them; None where the core has written there itself.
        seconds: how long a wait without a deadline of its own may take.
    """

    def __init__(self, operation: Operation, results: Sequence[torch.Tensor], place: Place | None, seconds: float):
        self.results = list(results)
        self.seconds = seconds
        self.placed = place is None
        self.settled = False
        self._operation = operation
        self._place = place
        self._lock = threading.Lock()
        self._problem: Exception | None = None
        self.device = next((each.device for each in self.results if each.is_cuda), None)
        self._on_queue: torch.Event | None = None  # torch's event behind the results, on a GPU

    def done(self) -> bool:
        """Whether the operation ended, well or not, a GPU's part included."""
        return self._operation.finished()

    def settle(self, seconds: float | None = None) -> None:
        """Blocks until the results are in place; on a GPU the current stream waits for them.

        Raises:
            TimeoutError: the deadline passed; the operation goes on.
            RingtrainError: the operation failed, in the words that all ranks get.
        """
        if self._problem is not None:
            raise self._problem
        patience = self.seconds if seconds is None else seconds
        try:
            self._operation.wait(patience)
            with self._lock:
                self._put()
            self.settled = True
        except RingtrainTimeout as problem:  # in words that programs for torch's backends look for
            raise RingtrainTimeout(f"torch.distributed: Timed out after {patience:g} s. {problem}") from None
        except Exception as problem:  # torch's too, where results cannot be put in their places
            self._problem = problem
            raise

    def settle_quietly(self) -> None:
        """``settle`` that keeps its error, a deadline's too, for whoever asks: a future would be waited for in vain."""
        try:
            self.settle()
        except Exception as problem:
            self._problem = problem

    def _put(self) -> None:
        """Once: the results to their places. Each time: the order of what comes after them."""
        if self.device is not None:
            self._operation.hold_back(torch.cuda.current_stream(self.device).cuda_stream)
        if not self.placed:
            assert self._place is not None
            self._place(self._operation)
            self.placed, self._place = True, None
            if self.device is not None:
                self._on_queue = torch.cuda.current_stream(self.device).record_event()
        elif self._on_queue is not None:
            torch.cuda.current_stream(self.device).wait_event(self._on_queue)

    def is_small(self) -> bool:
        """Whether its results may be kept when nobody may want them any more."""
        return sum(each.nbytes for each in self.results if not each.is_sparse) <= _SMALL_BYTES

    def source(self) -> int:
        """The rank whose tensor a receive has taken; -1 before that."""
        return self._operation.result()

    def problem(self) -> Exception | None:
        """Why it failed, once that is known."""
        return self._problem


class HeldWorks:
    """Works that must not lose their Python part while C++ may have theirs: until somebody has waited for them.

    Args:
        most: of them; the oldest is let go then.
    """

    def __init__(self, most: int):
        self._most = most
        self._works: dict[int, RingtrainWork] = {}
        self._lock = threading.Lock()

    def hold(self, work: "RingtrainWork") -> None:
        """From here on."""
        oldest = None
        with self._lock:
            self._works[id(work)] = work
            if len(self._works) > self._most:
                oldest = self._works.pop(next(iter(self._works)))
        del oldest  # behind the lock: its end may take it

    def let_go(self, work: "RingtrainWork") -> None:
        """Whoever waits for it has it."""
        with self._lock:
            self._works.pop(id(work), None)

    def __iter__(self) -> Iterator["RingtrainWork"]:
        """Those that are held now."""
        return iter(list(self._works.values()))


@with_eager_methods
class RingtrainWork(Work):
    """What the collectives of the process group return.

    Dropping it is safe: the results come nevertheless. C++ that was given it may still wait for it then, as DDP's
    reducer does within ``join``, and would wait for ever for an object without its Python part. So a small one that
    nobody has waited for goes on living in ``dropped``.

    Args:
        pending: the operation.
        completions: whose threads complete futures.
        dropped: of the group; forgets the oldest.
        held: of the group, for a torch that keeps no Python part alive.
    """

    def __init__(
        self, pending: PendingWork, completions: Completions, dropped: deque["RingtrainWork"], held: HeldWorks | None
    ):
        super().__init__()
        self._pending = pending
        self._completions = completions
        self._dropped = dropped
        self._held = held
        self._was_waited_for = False
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        if held is not None:
            held.hold(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until the results are there; True. Raises what ``Pending.settle`` does."""
        self._is_awaited()
        seconds = timeout.total_seconds()
        self._pending.settle(seconds if seconds > 0 else None)
        return True

    def synchronize(self) -> None:
        """``wait`` without a result."""
        self._is_awaited()
        self._pending.settle()

    def block_current_stream(self) -> None:
        """On a GPU the current stream waits; on the CPU the caller does."""
        self._is_awaited()
        self._pending.settle()

    def is_completed(self) -> bool:
        """Whether ``wait`` returns at once."""
        return self._pending.done()

    def is_success(self) -> bool:
        """Whether it ended well, its results in place."""
        if not self._pending.done():
            return False
        self._pending.settle_quietly()
        return self._pending.problem() is None

    def exception(self) -> Exception | None:
        """Why it failed, or None."""
        return None if self.is_success() else self._pending.problem()

    def _source_rank(self) -> int:
        return self._pending.source()

    def result(self) -> list[torch.Tensor]:
        """The result tensors, after ``wait``."""
        return self._pending.results

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A ``torch.futures.Future`` of the list of the result tensors, the same one each time.

        If the operation fails its ``wait`` raises a RuntimeError with the operation's text, as do callbacks that ask
        for its value.
        """
        if self._future is None:
            self._is_awaited()
            self._future = future_of(self._pending, self._completions)
        return self._future

    def _is_awaited(self) -> None:
        self._was_waited_for = True
        if self._held is not None:
            self._held.let_go(self)

    def __del__(self) -> None:  # once, also if it lives on
        pending = getattr(self, "_pending", None)
        if pending is None or self._future is not None or sys.is_finalizing():  # then no thread starts any more
            return
        if not pending.placed:
            self._completions.add(pending.settle_quietly, lambda: None)
        may_be_used = self._held is not None or not self._was_waited_for
        if may_be_used and pending.is_small():
            self._dropped.append(self)


def future_of(pending: PendingWork, completions: Completions) -> torch.futures.Future[list[torch.Tensor]]:
    """A future that a thread of ``completions`` completes; one that is complete if the end is known already."""
    begun = torch.futures.Future(devices=None if pending.device is None else [pending.device])

    def value(_: object) -> list[torch.Tensor]:
        if problem := pending.problem():
            raise problem
        return pending.results

    # An exception given to set_exception is a value for C++, which would take it for tensors. That of a callback is an error.
    future = begun.then(value)
    if pending.settled or pending.problem():  # DDP's reducer asks for the value of what it has waited for
        begun.set_result(pending.results)
    else:
        completions.add(pending.settle_quietly, lambda: begun.set_result(pending.results))
    return future
