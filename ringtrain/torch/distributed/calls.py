"""The calls of a process group, each of which becomes one operation of the core.

torch matches collectives by the order of calls, the core by names: the n-th call of a group has the name
``torch.distributed.<group>.<n>``, whatever it is, so that ranks which call different things get a MismatchError, and not a stall.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from ringtrain._runtime.arguments import check_among
from ringtrain._runtime.context import Context
from ringtrain._runtime.pending import Operation
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.torch.distributed import layouts
from ringtrain.torch.distributed.completions import Completions
from ringtrain.torch.distributed.layouts import deal, flat
from ringtrain.torch.distributed.work import HeldWorks, PendingWork, Place, RingtrainWork
from ringtrain.torch.tensors import lent_buffer, received, values_of

_OF_ROWS = {"allgather", "alltoall", layouts.SUMS_OF_ROWS}  # whose results have other rows than their inputs
# Before torch 2.8, C++ keeps no Python `Work` alive that it was given. One that is made of a future it does, but that one
# keeps the error of the future to itself, and knows no deadline. Works that were given to C++ as arguments it keeps alive
# in no release; see `RingtrainWork`.
KEEPS_WORKS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)

_HELD_WORKS = 1024  # a graph of functional collectives may wait for all of its own at its end
_DROPPED_WORKS = 64  # DDP's reducer has one, from its forward to its backward pass


class Options(Protocol):
    """Of a call; torch has a class for each kind of call."""

    timeout: timedelta


class OfReduction(Options, Protocol):
    """Of a call that reduces."""

    reduceOp: dist.ReduceOp


class Calls:
    """The way from a group's calls to the core.

    Args:
        context: of this rank, in the world of which the group has all ranks, in their order.
        name: torch's name of the group, the same on all its ranks.
        seconds: how long a wait may take that names no deadline.

    Attributes:
        seconds: the same; it may change.
    """

    def __init__(self, context: Context, name: str, seconds: float) -> None:
        self.seconds = seconds
        self.rank, self.size = context.rank, context.size
        self._context = context
        self._prefix = f"torch.distributed.{name}"  # of the operations' names
        self._numbers = itertools.count()
        self._completions = Completions()
        self._coalesced: list[Work] | None = None  # works since start_coalescing
        self._dropped: deque[RingtrainWork] = deque(maxlen=_DROPPED_WORKS)
        self._held = None if KEEPS_WORKS else HeldWorks(_HELD_WORKS)

    def close(self) -> None:
        """No work of the group completes any more."""
        self._completions.close()

    def start_coalescing(self) -> None:
        """From here on works are kept, until ``end_coalescing`` returns one for all of them."""
        self._coalesced = []

    def end_coalescing(self) -> Work:
        """The last work since ``start_coalescing``, after the ones before it."""
        works, self._coalesced = self._coalesced or [], None
        for work in works[:-1]:
            work.wait()
        return works[-1] if works else None

    def reduce_in_place(self, tensors: Sequence[Tensor], opts: Options, operation: str) -> Work:
        def prepare() -> tuple:
            values = [values_of(each) for each in tensors]
            return values, values, layouts.reduction_of(op_of(opts)), back(tensors, values, operation)

        return self.submit(operation, prepare, tensors, opts)

    def gather_all(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Options, what: str
    ) -> Work:
        """``outputs`` has the places of what becomes of each input, in the order of the ranks."""

        def prepare() -> tuple:
            values = [flat([each]) for each in inputs]
            to = [layouts.room(*each, own=self.rank * each[1].nbytes) for each in zip(outputs, values, strict=True)]
            return values, to, {}, dealing(outputs, to, what)

        return self.submit("allgather", prepare, [each for places in outputs for each in places], opts)

    def scatter_sums(self, outputs: Sequence[Tensor], inputs: Callable[[], list[Tensor]], opts: OfReduction) -> Work:
        def prepare() -> tuple:
            values = inputs()
            for value, output in zip(values, outputs, strict=True):
                if value.numel() != self.size * output.numel():
                    raise InvalidArgumentError(
                        f"reduce_scatter: the input must have {self.size} times the {output.numel()} elements of the output, "
                        f"but has {value.numel()}."
                    )
            rows = [value.view(self.size, -1) if value.numel() else value.view(self.size, 0) for value in values]
            to = [
                layouts.room([each], value, own=-self.rank * each.nbytes)
                for each, value in zip(outputs, rows, strict=True)
            ]
            places = dealing([[each] for each in outputs], to, "reduce_scatter")
            return rows, to, layouts.reduction_of(opts.reduceOp), places

        return self.submit(layouts.SUMS_OF_ROWS, prepare, outputs, opts)

    def reduce_scatter_unequal(self, output: Tensor, pieces: Sequence[Tensor], opts: OfReduction) -> Work:
        """By an allreduce: the core cuts equal rows."""

        def prepare() -> tuple:
            whole = torch.cat([values_of(each).reshape(-1) for each in pieces])
            begin = sum(each.numel() for each in pieces[: self.rank])

            def place(_: Operation) -> None:
                output.detach().copy_(whole[begin : begin + output.numel()].view(output.shape))

            return [whole], [whole], layouts.reduction_of(opts.reduceOp), place

        return self.submit("allreduce", prepare, [output], opts)

    def exchange(self, sent: Sequence[Tensor], expected: Sequence[Tensor], opts: Options, what: str) -> Work:
        """To each rank one of ``sent``, from each one of ``expected``."""

        def prepare() -> tuple:
            layouts.check_length(sent, self.size, "one for each rank", what)
            layouts.check_length(expected, self.size, "one for each rank", what)
            splits = [layouts.elements(each) for each in sent]
            values = flat(sent)
            to = [layouts.room([each for each in expected if each.numel()], values, None)]
            return [values], to, {"splits": splits}, dealing([expected], to, what)

        return self.submit("alltoall", prepare, [each for each in expected if each.numel()], opts)

    def sum_sparse(self, tensor: Tensor, opts: Options) -> Work:
        """A sum of sparse tensors: all gather what each has."""

        def prepare() -> tuple:
            how = layouts.reduction_of(op_of(opts))
            demand = "all_reduce: op must be ReduceOp.SUM for sparse tensors"
            check_among(demand, how, [{"reduction": "sum"}], error=UnsupportedError)
            own = tensor.detach().coalesce()
            rows = [own.indices().t().contiguous(), own.values().contiguous()]

            def place(operation: Operation) -> None:
                indices, values = (received(operation, like, index) for index, like in enumerate(rows))
                total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()
                with torch.no_grad():  # a detached sparse tensor has indices of its own
                    tensor.copy_(total)

            return rows, [None] * 2, {}, place

        return self.submit("allgather", prepare, [tensor], opts)

    def submit(self, operation: str, prepare: Callable[[], tuple], results: Sequence[Tensor], opts: Options) -> Work:
        """The next call of this group: what goes wrong before it is submitted fails it on all ranks.

        Args:
            operation: the core's.
            prepare: gives inputs, outputs (None: the core allocates), attributes, and what puts the results in their
                places (None: they are there).
            results: where torch wants the results.
        """
        name = f"{self._prefix}.{next(self._numbers)}"
        try:
            inputs, outputs, attributes, place = prepare()
            room = operation in _OF_ROWS
            buffers = [lent_buffer(each) for each in inputs]
            targets = [
                None if to is None else buffer if to is values else lent_buffer(to)
                for to, values, buffer in zip(outputs, inputs, buffers, strict=True)
            ]
        except Exception as problem:
            self._context.refuse(operation, name, 0, problem)
        submitted = self._context.submit(operation, name, buffers, targets, once=True, room=room, **attributes)
        return self._work(PendingWork(submitted, results, place, _seconds(opts, self.seconds)))

    def track(self, operation: Operation, results: Sequence[Tensor], place: Place | None) -> Work:
        """The work of an operation that was submitted elsewhere; ``place`` as in ``submit``."""
        return self._work(PendingWork(operation, results, place, self.seconds))

    def _work(self, pending: PendingWork) -> Work:
        work = RingtrainWork(pending, self._completions, self._dropped, self._held)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


def op_of(opts: OfReduction | dist.ReduceOp) -> dist.ReduceOp:
    """The ``ReduceOp`` of options, which short forms give in their place."""
    return getattr(opts, "reduceOp", opts)


def _seconds(opts: Options, of_group: float) -> float:
    """The deadline of a call's options, which a negative one leaves to the group."""
    timeout = getattr(opts, "timeout", None)
    return timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else of_group


def back(tensors: Sequence[Tensor], values: Sequence[Tensor], what: str) -> Place | None:
    """Copies results of an operation in place home, where it had to work on copies."""
    copies = [
        (tensor, value)
        for tensor, value in zip(tensors, values, strict=True)
        if tensor.data_ptr() != value.data_ptr() and tensor.numel()
    ]
    if not copies:
        return None
    layouts.check_places([tensor for tensor, _ in copies], what)

    def place(_: Operation) -> None:
        for tensor, value in copies:
            home = value if value.dtype == tensor.dtype else value.view(tensor.dtype)
            tensor.detach().copy_(home.view(tensor.shape))

    return place


def dealing(outputs: Sequence[Sequence[Tensor]], given: Sequence[Tensor | None], what: str) -> Place:
    """Copies each output of the core into the tensors that are meant for it, unless the core has written there itself.

    ``given`` has the room for each that the core was offered; it allocates where that has another size than the result.
    """

    def place(operation: Operation) -> None:
        for index, tensors in enumerate(outputs):
            if given[index] is not None and operation.has_filled(index):
                continue
            like = tensors[0] if tensors else torch.empty(0)
            deal(received(operation, like, index).reshape(-1), tensors, what)

    return place
