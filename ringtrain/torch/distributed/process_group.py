"""The process group that ``torch.distributed`` calls: each collective becomes one operation of the core, by its ``Calls``.

Every function may be called from any thread; the order of calls must be the same on all ranks, as torch demands.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

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
    Work,
)

from ringtrain._runtime.context import Context
from ringtrain.torch.distributed import layouts
from ringtrain.torch.distributed.between_two import BetweenTwo, Tags
from ringtrain.torch.distributed.calls import Calls, back, dealing
from ringtrain.torch.distributed.layouts import carried, flat
from ringtrain.torch.distributed.store_barriers import StoreBarriers
from ringtrain.torch.eager import with_eager_methods
from ringtrain.torch.tensors import values_of


@with_eager_methods
class RingtrainProcessGroup(BetweenTwo, dist.ProcessGroup):
    """A group of ranks of ``torch.distributed``, in which ringtrain's core carries out all operations.

    Args:
        context: of this rank, in the world of which the group has all ranks, in their order.
        name: torch's name of the group, the same on all its ranks.
        timeout: how long a wait may take that names no deadline.
        close: what ``shutdown`` calls: ends the world, if the group has one of its own.
        store: of torch's, for this group alone; None where there are no monitored barriers.
    """

    if not hasattr(dist.ProcessGroup, "supports_splitting"):  # which `new_group` of torch 2.4 asks each backend for
        supports_splitting = False

    def __init__(
        self,
        context: Context,
        name: str,
        timeout: timedelta,
        close: Callable[[], object] = lambda: None,
        store: dist.Store | None = None,
    ) -> None:
        super().__init__(context.rank, context.size)
        self._context = context
        self._rank, self._size = context.rank, context.size
        self._seconds = timeout.total_seconds()
        self._way = Calls(context, name, self._seconds)
        self._tags = Tags(context, name, context.count_call("torch.distributed.groups"))  # in one order on all ranks
        self._name, self._description = name, "undefined"
        self._close = close
        self._monitored = StoreBarriers(store, self._rank, self._size)

    # ---- what torch asks a group ----

    def getBackendName(self) -> str:
        return "ringtrain"

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    name, rank, size = getBackendName, getRank, getSize
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def setGroupName(self, name: str) -> None:
        self._name = name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> "RingtrainProcessGroup":
        return self  # torch looks for what it can set of its own backends

    def __repr__(self) -> str:
        return f"RingtrainProcessGroup(name={self._name!r}, rank={self._rank}, size={self._size})"

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a wait may take from now on that names no deadline."""
        self._way.seconds = self._seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """Ends the group; what is pending fails if its world ends with it."""
        self._close()
        self._way.close()

    def abort(self) -> None:
        """Fails everything pending and later in the group's world, on all ranks."""
        self._context.abort(f"rank {self._rank} called abort() of the process group '{self._name}'")
        self.shutdown()

    # ---- collectives that keep the shape ----

    def allreduce(self, tensors: Tensor | Sequence[Tensor], opts: AllreduceOptions = AllreduceOptions()) -> Work:  # noqa: B008 - torch's way
        """Combines a tensor of all ranks, in place. Sparse ones are summed."""
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        layouts.check_one(tensors, "all_reduce")
        if tensors[0].is_sparse:
            return self._way.sum_sparse(tensors[0], opts)
        return self._way.reduce_in_place(tensors, opts, "allreduce")

    def allreduce_coalesced(
        self,
        tensors: Sequence[Tensor],
        opts: AllreduceCoalescedOptions = AllreduceCoalescedOptions(),  # noqa: B008
    ) -> Work:
        """``allreduce`` of several tensors as one operation."""
        return self._way.reduce_in_place(tensors, opts, "allreduce")

    def broadcast(self, tensors: Tensor | Sequence[Tensor], opts: BroadcastOptions = BroadcastOptions()) -> Work:  # noqa: B008
        """The root's tensor on all ranks, in place."""
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        layouts.check_one(tensors, "broadcast")
        root = opts if isinstance(opts, int) else opts.rootRank

        def prepare() -> tuple:
            values = carried(values_of(tensors[0]))
            return [values], [values], {"root": root}, back(tensors, [values], "broadcast")

        return self._way.submit("broadcast", prepare, tensors, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: ReduceOptions = ReduceOptions()) -> Work:  # noqa: B008
        """Combines a tensor of all ranks, on the root; the others' stay as they are."""
        layouts.check_one(tensors, "reduce")
        if opts.rootRank == self._rank:
            return self._way.reduce_in_place(tensors, opts, "allreduce")

        def prepare() -> tuple:
            values = values_of(tensors[0])
            return [values], [torch.empty_like(values)], layouts.reduction_of(opts.reduceOp), None

        return self._way.submit("allreduce", prepare, tensors, opts)

    def barrier(self, opts: BarrierOptions = BarrierOptions()) -> Work:  # noqa: B008
        """Done when all ranks have come."""
        return self._way.submit("barrier", lambda: ([], [], {}, None), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Returns when all ranks have come; else rank 0 names who has not. ``StoreBarriers.enter`` has the details."""
        seconds = self._way.seconds if timeout is None else timeout.total_seconds()
        self._monitored.enter(seconds, wait_all_ranks)

    # ---- collectives on rows ----

    def allgather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: AllgatherOptions = AllgatherOptions(),  # noqa: B008
    ) -> Work:
        """Each rank's tensor into a list; shapes may differ from rank to rank."""
        layouts.check_one(inputs, "all_gather")
        layouts.check_one(outputs, "all_gather")
        return self._way.gather_all([list(outputs[0])], inputs, opts, "all_gather")

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: AllgatherOptions = AllgatherOptions(),  # noqa: B008
    ) -> Work:
        """``allgather`` of several tensors as one operation: ``outputs`` has a list for each rank, with a tensor for each input."""
        layouts.check_length(outputs, self._size, "one for each rank", "all_gather_coalesced")
        for of_rank in outputs:
            layouts.check_length(of_rank, len(inputs), "one for each input", "all_gather_coalesced")
        of_inputs = [[of_rank[index] for of_rank in outputs] for index in range(len(inputs))]
        return self._way.gather_all(of_inputs, inputs, opts, "all_gather_coalesced")

    def all_gather_single(self, output: Tensor, input: Tensor, opts: AllgatherOptions = AllgatherOptions()) -> Work:  # noqa: B008
        """Each rank's tensor into one, one behind the other."""
        return self._way.gather_all([[output]], [input], opts, "all_gather_into_tensor")

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: AllgatherOptions = AllgatherOptions(),  # noqa: B008
    ) -> Work:
        """``all_gather_single`` of several tensors as one operation."""
        return self._way.gather_all([[each] for each in outputs], inputs, opts, "all_gather_into_tensor")

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: ReduceScatterOptions = ReduceScatterOptions(),  # noqa: B008
    ) -> Work:
        """Combines lists with a tensor for each rank, and leaves each rank its own."""
        layouts.check_one(outputs, "reduce_scatter")
        layouts.check_one(inputs, "reduce_scatter")
        pieces = inputs[0]
        layouts.check_length(pieces, self._size, "one for each rank", "reduce_scatter")
        if any(each.shape != pieces[0].shape for each in pieces):
            return self._way.reduce_scatter_unequal(outputs[0], pieces, opts)
        return self._way.scatter_sums(outputs, lambda: [torch.stack([values_of(each) for each in pieces])], opts)

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        opts: ReduceScatterOptions = ReduceScatterOptions(),  # noqa: B008
    ) -> Work:
        """Combines a tensor of all ranks, and leaves each rank an equal part."""
        return self._way.scatter_sums([output], lambda: [values_of(input)], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: ReduceScatterOptions = ReduceScatterOptions(),  # noqa: B008
    ) -> Work:
        """``reduce_scatter_single`` of several tensors as one operation."""
        return self._way.scatter_sums(outputs, lambda: [values_of(each) for each in inputs], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int],
        opts: AllToAllOptions = AllToAllOptions(),  # noqa: B008
    ) -> Work:  # fmt: skip
        """Rows of one tensor to each rank, and what they sent into another one."""

        def prepare() -> tuple:
            splits = layouts.split_rows(input_splits or (), input, self._size, "all_to_all_single")
            layouts.split_rows(output_splits or (), output, self._size, "all_to_all_single")
            values = flat([input])
            to = [layouts.room([output], values, None)]
            return [values], to, {"splits": splits}, dealing([[output]], to, "all_to_all_single")

        return self._way.submit("alltoall", prepare, [output], opts)

    alltoall_base = all_to_all_single

    def alltoall(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: AllToAllOptions = AllToAllOptions(),  # noqa: B008
    ) -> Work:
        """A tensor to each rank, and one from each."""
        return self._way.exchange(inputs, outputs, opts, "all_to_all")

    def gather(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: GatherOptions = GatherOptions(),  # noqa: B008
    ) -> Work:
        """Each rank's tensor into a list of the root's."""
        layouts.check_one(inputs, "gather")
        mine = opts.rootRank == self._rank
        nothing = inputs[0].detach().new_empty(0)
        sent = [inputs[0] if rank == opts.rootRank else nothing for rank in range(self._size)]
        return self._way.exchange(sent, list(outputs[0]) if mine else [nothing] * self._size, opts, "gather")

    def scatter(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        opts: ScatterOptions = ScatterOptions(),  # noqa: B008
    ) -> Work:
        """To each rank its tensor of a list of the root's."""
        layouts.check_one(outputs, "scatter")
        mine = opts.rootRank == self._rank
        nothing = outputs[0].detach().new_empty(0)
        expected = [outputs[0] if rank == opts.rootRank else nothing for rank in range(self._size)]
        return self._way.exchange(list(inputs[0]) if mine else [nothing] * self._size, expected, opts, "scatter")

    # ---- several collectives at once ----

    def _start_coalescing(self, device: torch.device) -> None:
        self._way.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Work:
        return self._way.end_coalescing()
