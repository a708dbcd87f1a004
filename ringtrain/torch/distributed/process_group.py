"""The process group that ``torch.distributed`` calls: each collective becomes one operation of the core.

torch matches collectives by the order of calls, the core by names: the n-th call of a group has the name
``torch.distributed.<group>.<n>``, whatever it is, so that ranks which call different things get a MismatchError, and not a stall.
Every function may be called from any thread; the order of calls must be the same on all ranks, as torch demands.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from ringtrain.context import Context
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.pending import Operation
from ringtrain.torch.distributed import layouts
from ringtrain.torch.distributed.completions import Completions
from ringtrain.torch.distributed.layouts import carried, deal, flat
from ringtrain.torch.distributed.work import HeldWorks, Pending, Place, RingtrainWork
from ringtrain.torch.tensors import lent_buffer, received, values_of

_OF_ROWS = {"allgather", "alltoall", layouts.SUMS_OF_ROWS}  # whose results have other rows than their inputs
# Before torch 2.8, C++ keeps no Python `Work` alive that it was given. One that is made of a future it does, but that one
# keeps the error of the future to itself, and knows no deadline. Works that were given to C++ as arguments it keeps alive
# in no release; see `RingtrainWork`.
KEEPS_WORKS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)

_HELD_WORKS = 1024  # a graph of functional collectives may wait for all of its own at its end
_DROPPED_WORKS = 64  # DDP's reducer has one, from its forward to its backward pass


class RingtrainProcessGroup(dist.ProcessGroup):
    """A group of ranks of ``torch.distributed``, in which ringtrain's core carries out all collectives.

    Args:
        context: of this rank, in the world of which the group has all ranks, in their order.
        name: torch's name of the group, the same on all its ranks.
        timeout: how long a wait may take that names no deadline.
        close: what ``shutdown`` calls: ends the world, if the group has one of its own.
    """

    if not hasattr(dist.ProcessGroup, "supports_splitting"):  # which `new_group` of torch 2.4 asks each backend for
        supports_splitting = False

    def __init__(
        self, context: Context, name: str, timeout: timedelta, close: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(context.rank, context.size)
        self._context = context
        self._rank, self._size = context.rank, context.size
        self._prefix = f"torch.distributed.{name}"  # of its operations' names
        self._name, self._description = name, "undefined"
        self._seconds = timeout.total_seconds()
        self._close = close
        self._calls = itertools.count()
        self._completions = Completions()
        self._coalesced: list[Any] | None = None  # works since _start_coalescing
        self._dropped: deque[RingtrainWork] = deque(maxlen=_DROPPED_WORKS)
        self._held = None if KEEPS_WORKS else HeldWorks(_HELD_WORKS)

    # ---- what torch asks a group ----

    def getBackendName(self) -> str:
        return "ringtrain"

    def name(self) -> str:
        return "ringtrain"

    def getRank(self) -> int:
        return self._rank

    def rank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def size(self) -> int:
        return self._size

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> "RingtrainProcessGroup":
        return self  # torch looks for what it can set of its own backends

    def __repr__(self) -> str:
        return f"RingtrainProcessGroup(name={self._name!r}, rank={self._rank}, size={self._size})"

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a wait may take from now on that names no deadline."""
        self._seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """Ends the group; what is pending fails if its world ends with it."""
        self._close()
        self._completions.close()

    def abort(self) -> None:
        """Fails everything pending and later in the group's world, on all ranks."""
        self._context.abort(f"rank {self._rank} called abort() of the process group '{self._name}'")
        self.shutdown()

    # ---- collectives that keep the shape ----

    def allreduce(self, tensors: Any, opts: Any = AllreduceOptions()) -> Any:  # noqa: B008 - torch's way
        """Combines a tensor of all ranks, in place. Sparse ones are summed."""
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        layouts.check_one(tensors, "all_reduce")
        if tensors[0].is_sparse:
            return self._sum_sparse(tensors[0], opts)
        return self._reduce_in_place(tensors, opts, "allreduce")

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = AllreduceCoalescedOptions()) -> Any:  # noqa: B008
        """``allreduce`` of several tensors as one operation."""
        return self._reduce_in_place(tensors, opts, "allreduce")

    def broadcast(self, tensors: Any, opts: Any = BroadcastOptions()) -> Any:  # noqa: B008
        """The root's tensor on all ranks, in place."""
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        layouts.check_one(tensors, "broadcast")
        root = opts if isinstance(opts, int) else opts.rootRank

        def prepare() -> tuple:
            values = carried(values_of(tensors[0]))
            return [values], [values], {"root": root}, _back(tensors, [values], "broadcast")

        return self._submit("broadcast", prepare, tensors, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = ReduceOptions()) -> Any:  # noqa: B008
        """Combines a tensor of all ranks, on the root; the others' stay as they are."""
        layouts.check_one(tensors, "reduce")
        if opts.rootRank == self._rank:
            return self._reduce_in_place(tensors, opts, "allreduce")

        def prepare() -> tuple:
            values = values_of(tensors[0])
            return [values], [torch.empty_like(values)], layouts.reduction_of(opts.reduceOp), None

        return self._submit("allreduce", prepare, tensors, opts)

    def barrier(self, opts: Any = BarrierOptions()) -> Any:  # noqa: B008
        """Done when all ranks have come."""
        return self._submit("barrier", lambda: ([], [], {}, None), [], opts)

    # ---- collectives on rows ----

    def allgather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any = AllgatherOptions(),  # noqa: B008
    ) -> Any:
        """Each rank's tensor into a list; shapes may differ from rank to rank."""
        layouts.check_one(inputs, "all_gather")
        layouts.check_one(outputs, "all_gather")
        return self._gather_all([list(outputs[0])], inputs, opts, "all_gather")

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any = AllgatherOptions(),  # noqa: B008
    ) -> Any:
        """``allgather`` of several tensors as one operation: ``outputs`` has a list for each rank, with a tensor for each input."""
        layouts.check_count(outputs, self._size, "all_gather_coalesced")
        for of_rank in outputs:
            layouts.check_each(of_rank, inputs, "all_gather_coalesced")
        of_inputs = [[of_rank[index] for of_rank in outputs] for index in range(len(inputs))]
        return self._gather_all(of_inputs, inputs, opts, "all_gather_coalesced")

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = AllgatherOptions()) -> Any:  # noqa: B008
        """Each rank's tensor into one, one behind the other."""
        return self._gather_all([[output]], [input], opts, "all_gather_into_tensor")

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = AllgatherOptions(),  # noqa: B008
    ) -> Any:
        """``all_gather_single`` of several tensors as one operation."""
        return self._gather_all([[each] for each in outputs], inputs, opts, "all_gather_into_tensor")

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: Any = ReduceScatterOptions(),  # noqa: B008
    ) -> Any:
        """Combines lists with a tensor for each rank, and leaves each rank its own."""
        layouts.check_one(outputs, "reduce_scatter")
        layouts.check_one(inputs, "reduce_scatter")
        pieces = inputs[0]
        layouts.check_count(pieces, self._size, "reduce_scatter")
        if any(each.shape != pieces[0].shape for each in pieces):
            return self._reduce_scatter_unequal(outputs[0], pieces, opts)
        return self._scatter_sums(outputs, lambda: [torch.stack([values_of(each) for each in pieces])], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = ReduceScatterOptions()) -> Any:  # noqa: B008
        """Combines a tensor of all ranks, and leaves each rank an equal part."""
        return self._scatter_sums([output], lambda: [values_of(input)], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = ReduceScatterOptions(),  # noqa: B008
    ) -> Any:
        """``reduce_scatter_single`` of several tensors as one operation."""
        return self._scatter_sums(outputs, lambda: [values_of(each) for each in inputs], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int],
        opts: Any = AllToAllOptions(),  # noqa: B008
    ) -> Any:  # fmt: skip
        """Rows of one tensor to each rank, and what they sent into another one."""

        def prepare() -> tuple:
            splits = layouts.split_rows(input_splits or (), input, self._size, "all_to_all_single")
            layouts.split_rows(output_splits or (), output, self._size, "all_to_all_single")
            values = flat([input])
            to = [layouts.room([output], values, None)]
            return [values], to, {"splits": splits}, _dealing([[output]], to, "all_to_all_single")

        return self._submit("alltoall", prepare, [output], opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = AllToAllOptions()) -> Any:  # noqa: B008
        """A tensor to each rank, and one from each."""
        return self._exchange(inputs, outputs, opts, "all_to_all")

    def gather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any = GatherOptions(),  # noqa: B008
    ) -> Any:
        """Each rank's tensor into a list of the root's."""
        layouts.check_one(inputs, "gather")
        mine = opts.rootRank == self._rank
        nothing = inputs[0].detach().new_empty(0)
        sent = [inputs[0] if rank == opts.rootRank else nothing for rank in range(self._size)]
        return self._exchange(sent, list(outputs[0]) if mine else [nothing] * self._size, opts, "gather")

    def scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: Any = ScatterOptions(),  # noqa: B008
    ) -> Any:
        """To each rank its tensor of a list of the root's."""
        layouts.check_one(outputs, "scatter")
        mine = opts.rootRank == self._rank
        nothing = outputs[0].detach().new_empty(0)
        expected = [outputs[0] if rank == opts.rootRank else nothing for rank in range(self._size)]
        return self._exchange(list(inputs[0]) if mine else [nothing] * self._size, expected, opts, "scatter")

    # ---- what there is not ----

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> Any:
        """Refused: the core has collectives alone."""
        self._refuse_two("send", rank)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> Any:
        """Refused: the core has collectives alone."""
        self._refuse_two("recv", rank)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Any:
        """Refused: the core has collectives alone."""
        self._refuse_two("recv", "any")

    def _refuse_two(self, what: str, rank: object) -> None:
        raise UnsupportedError(
            f"{what}: with the backend 'ringtrain' ranks must exchange tensors by collectives, but rank {self._rank} called "
            f"{what} with rank {rank}. Use broadcast or all_to_all_single, or a group of another backend beside it: "
            "new_group(backend='gloo')."
        )

    # ---- several collectives at once ----

    def _start_coalescing(self, device: torch.device) -> None:
        """From here on works are kept, until ``_end_coalescing`` returns one for all of them."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        """The last work since ``_start_coalescing``, after the ones before it."""
        works, self._coalesced = self._coalesced or [], None
        for work in works[:-1]:
            work.wait()
        return works[-1] if works else None

    # ---- the way to the core ----

    def _reduce_in_place(self, tensors: Sequence[Tensor], opts: Any, operation: str) -> Any:
        def prepare() -> tuple:
            values = [values_of(each) for each in tensors]
            return values, values, layouts.reduction_of(_op_of(opts)), _back(tensors, values, operation)

        return self._submit(operation, prepare, tensors, opts)

    def _gather_all(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any, what: str) -> Any:
        """``outputs`` has the places of what becomes of each input, in the order of the ranks."""

        def prepare() -> tuple:
            values = [flat([each]) for each in inputs]
            to = [layouts.room(*each, own=self._rank * each[1].nbytes) for each in zip(outputs, values, strict=True)]
            return values, to, {}, _dealing(outputs, to, what)

        return self._submit("allgather", prepare, [each for places in outputs for each in places], opts)

    def _scatter_sums(self, outputs: Sequence[Tensor], inputs: Callable[[], list[Tensor]], opts: Any) -> Any:
        def prepare() -> tuple:
            values = inputs()
            for value, output in zip(values, outputs, strict=True):
                if value.numel() != self._size * output.numel():
                    raise InvalidArgumentError(
                        f"reduce_scatter: the input must have {self._size} times the {output.numel()} elements of the output, "
                        f"but has {value.numel()}."
                    )
            rows = [value.view(self._size, -1) if value.numel() else value.view(self._size, 0) for value in values]
            to = [
                layouts.room([each], value, own=-self._rank * each.nbytes)
                for each, value in zip(outputs, rows, strict=True)
            ]
            places = _dealing([[each] for each in outputs], to, "reduce_scatter")
            return rows, to, layouts.reduction_of(opts.reduceOp), places

        return self._submit(layouts.SUMS_OF_ROWS, prepare, outputs, opts)

    def _reduce_scatter_unequal(self, output: Tensor, pieces: Sequence[Tensor], opts: Any) -> Any:
        """By an allreduce: the core cuts equal rows."""

        def prepare() -> tuple:
            whole = torch.cat([values_of(each).reshape(-1) for each in pieces])
            begin = sum(each.numel() for each in pieces[: self._rank])

            def place(_: Operation) -> None:
                output.detach().copy_(whole[begin : begin + output.numel()].view(output.shape))

            return [whole], [whole], layouts.reduction_of(opts.reduceOp), place

        return self._submit("allreduce", prepare, [output], opts)

    def _exchange(self, sent: Sequence[Tensor], expected: Sequence[Tensor], opts: Any, what: str) -> Any:
        """To each rank one of ``sent``, from each one of ``expected``."""

        def prepare() -> tuple:
            layouts.check_count(sent, self._size, what)
            layouts.check_count(expected, self._size, what)
            splits = [layouts.elements(each) for each in sent]
            values = flat(sent)
            to = [layouts.room([each for each in expected if each.numel()], values, None)]
            return [values], to, {"splits": splits}, _dealing([expected], to, what)

        return self._submit("alltoall", prepare, [each for each in expected if each.numel()], opts)

    def _sum_sparse(self, tensor: Tensor, opts: Any) -> Any:
        """A sum of sparse tensors: all gather what each has."""

        def prepare() -> tuple:
            if layouts.reduction_of(_op_of(opts)) != {"reduction": "sum"}:
                raise UnsupportedError("all_reduce: sparse tensors can be summed alone. Use op=ReduceOp.SUM.")
            own = tensor.detach().coalesce()
            rows = [own.indices().t().contiguous(), own.values().contiguous()]

            def place(operation: Operation) -> None:
                indices, values = (received(operation, like, index) for index, like in enumerate(rows))
                total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()
                with torch.no_grad():  # a detached sparse tensor has indices of its own
                    tensor.copy_(total)

            return rows, [None] * 2, {}, place

        return self._submit("allgather", prepare, [tensor], opts)

    def _submit(self, operation: str, prepare: Callable[[], tuple], results: Sequence[Tensor], opts: Any) -> Any:
        """The next call of this group: what goes wrong before it is submitted fails it on all ranks.

        Args:
            operation: the core's.
            prepare: gives inputs, outputs (None: the core allocates), attributes, and what puts the results in their
                places (None: they are there).
            results: where torch wants the results.
        """
        name = f"{self._prefix}.{next(self._calls)}"
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
        return self._work(Pending(submitted, results, place, _seconds(opts, self._seconds)))

    def _work(self, pending: Pending) -> Any:
        work = RingtrainWork(pending, self._completions, self._dropped, self._held)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


def _op_of(opts: Any) -> Any:
    """The ``ReduceOp`` of options, which short forms give in their place."""
    return getattr(opts, "reduceOp", opts)


def _seconds(opts: Any, of_group: float) -> float:
    """The deadline of a call's options, which a negative one leaves to the group."""
    timeout = getattr(opts, "timeout", None)
    return timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else of_group


def _back(tensors: Sequence[Tensor], values: Sequence[Tensor], what: str) -> Place | None:
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


def _dealing(outputs: Sequence[Sequence[Tensor]], given: Sequence[Tensor | None], what: str) -> Place:
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
