"""The default process group of an elastic job: one object, in whichever world its rank is.

Ranks that join make their models while the others train. So until its training begins a rank answers by itself what
DistributedDataParallel's constructor asks all ranks; ``Guard.epochs`` gives it the state of the others. All else is refused.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Work
from torch.nn.parallel import DistributedDataParallel

from ringtrain._runtime import context as contexts
from ringtrain._runtime.context import Context
from ringtrain._runtime.pending import Operation
from ringtrain.errors import UnsupportedError
from ringtrain.torch.distributed.between_two import Tags
from ringtrain.torch.distributed.calls import Calls
from ringtrain.torch.distributed.process_group import RingtrainProcessGroup

_constructing = threading.local()  # `depth`: how many constructors of DDP this thread is in


@functools.cache
def tell_of_constructors() -> None:
    """From now on it is known while DDP is made: what that asks all ranks, each answers by itself."""
    make = DistributedDataParallel.__init__

    @functools.wraps(make)
    def made(self: DistributedDataParallel, *args: object, **kwargs: object) -> None:
        _constructing.depth = getattr(_constructing, "depth", 0) + 1
        try:
            make(self, *args, **kwargs)
        finally:
            _constructing.depth -= 1

    DistributedDataParallel.__init__ = made


def _is_constructing() -> bool:
    return getattr(_constructing, "depth", 0) > 0


class ElasticProcessGroup(RingtrainProcessGroup):
    """The group of all ranks that there are at the moment; its arguments are those of ``RingtrainProcessGroup``."""

    def __init__(self, context: Context, name: str, timeout: timedelta, close: Callable[[], object]) -> None:
        super().__init__(context, name, timeout, close)
        tell_of_constructors()
        self._way: Any = _ByItself()
        self._tags: Any = self._way

    def begin(self) -> None:
        """From here on operations are between ranks."""
        self._way = _OfTheWorld(self._enter)
        self._tags = _TagsOfTheWorld(self._way)

    def getRank(self) -> int:
        return contexts.current().rank

    def getSize(self) -> int:
        return contexts.current().size

    rank, size = getRank, getSize

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        raise UnsupportedError(
            "monitored_barrier: in an elastic job ranks must wait for each other by barrier(), since there is no store for who is "
            "missing, but it was called. A rank that is missing is named by the stall report."
        )

    def _enter(self, context: Context) -> tuple[Calls, Tags]:
        self._context, self._rank, self._size = context, context.rank, context.size
        return Calls(context, self._name, self._seconds), Tags(context, self._name, 0)  # there is no other group


class _OfTheWorld:
    """The calls of the present world; each has its own, whose numbers all its ranks count from the same one."""

    def __init__(self, enter: Callable[[Context], tuple[Calls, Tags]]) -> None:
        self._enter = enter
        self._context: Context | None = None
        self._entered: tuple[Calls, Tags] | None = None

    def present(self) -> tuple[Calls, Tags]:
        context = contexts.current()
        if self._entered is None or context is not self._context:
            self.close()
            self._context, self._entered = context, self._enter(context)
        return self._entered

    def close(self) -> None:
        """No work of the last world completes any more."""
        if self._entered is not None:
            self._entered[0].close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.present()[0], name)


class _TagsOfTheWorld:
    """The same of sends and receives."""

    def __init__(self, way: _OfTheWorld) -> None:
        self._way = way

    def submit(self, operation: str, values: Tensor, other: int, tag: int) -> Operation:
        return self._way.present()[1].submit(operation, values, other, tag)


class _ByItself:
    """Answers as if all ranks had what this one has."""

    def gather_all(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: object, what: str
    ) -> Work:
        if not _is_constructing():
            return self._refuse()
        for places, given in zip(outputs, inputs, strict=True):
            for place in places:
                place.detach().view(-1, max(given.numel(), 1)).copy_(given.detach().reshape(1, -1))
        return _done([place for places in outputs for place in places])

    def submit(self, operation: str, prepare: Callable[[], tuple], results: Sequence[Tensor], opts: object) -> Work:
        if operation == "broadcast" and _is_constructing():  # leaves everything as it is
            return _done(results)
        return self._refuse()

    def close(self) -> None:
        """There is nothing to end."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self._refuse()

    @staticmethod
    def _refuse() -> NoReturn:
        raise UnsupportedError(
            "torch.distributed: in an elastic job ranks must exchange tensors within Guard.epochs(), since a rank that joins is alone "
            "before, but a collective was called outside. Give Guard what all ranks must have alike."
        )


def _done(results: Sequence[Tensor]) -> Work:
    """A work that has ended."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(list(results))
    return c10d._create_work_from_future(future)
