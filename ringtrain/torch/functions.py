"""The start of a training run: every rank gets the parameters and the optimizer's state of one of them.

Scripts call these once after ``init()``, and again after loading a checkpoint on one rank.
"""

import io
import operator
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ringtrain.context import current
from ringtrain.errors import InvalidArgumentError, MismatchError, RingtrainError
from ringtrain.objects import allgather_object, broadcast_object
from ringtrain.pending import Operation
from ringtrain.process_sets import ProcessSet, global_process_set, members_of
from ringtrain.submission import Submission, preparing
from ringtrain.torch.shards import is_shard
from ringtrain.torch.tensors import buffer_of, check_supported, finish


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Puts the root's values into the tensors of all ranks; rows of sharded embeddings stay each rank's own.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, or tensors in an order that all ranks share;
            of any dtype and layout, the same names and shapes on all ranks.
        root_rank: global rank of the root.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: something else than tensors, or a root that is no member.
        MismatchError: ranks disagree about a shape or a dtype.

    Example:
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    named = {name: tensor for name, tensor in _named_tensors(params).items() if not is_shard(tensor)}
    broadcast_in_place(
        {f"broadcast_parameters.{name}": tensor for name, tensor in named.items()}, root_rank, process_set
    )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives all ranks the root's optimizer state and the options of its param groups, exactly; takes no step.

    What is kept of rows of sharded embeddings stays each rank's own.

    Args:
        optimizer: any optimizer, distributed or not; its state may be empty, on the root and elsewhere.
        root_rank: global rank of the root.
        model: accepted for Horovod's sake; the state is taken as it is.
        process_set: the ranks that take part.

    Raises:
        MismatchError: the optimizers hold different numbers of parameters.
    """
    give_optimizer_state(optimizer, root_rank, process_set, forgets=True)


def give_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, process_set: ProcessSet, forgets: bool
) -> None:
    """``broadcast_optimizer_state``; ``forgets``: whether what compression has lost on this rank is of another state."""
    sizes_name = "broadcast_optimizer_state.sizes"
    with preparing("allgather", f"{sizes_name}.sizes", process_set):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
    _require_equal_sizes(allgather_object(sizes, sizes_name, process_set), process_set)
    is_root = current().rank == root_rank
    _make_whole(optimizer, root_rank)
    with preparing("broadcast", "broadcast_optimizer_state.size", process_set):
        packed, tensors = _pack(state_of(optimizer)) if is_root else (b"", [])
    packed = broadcast_object(packed, root_rank, "broadcast_optimizer_state", process_set)
    if not is_root:
        state, tensors = _unpack(packed)
    named = {f"broadcast_optimizer_state.{index}": tensor for index, tensor in enumerate(tensors)}
    broadcast_in_place(named, root_rank, process_set)
    if not is_root:
        set_state(optimizer, state)
    for part in (getattr(optimizer, "_reducer", None), getattr(optimizer, "_delayed", None)):
        feedback = part.feedback() if part is not None and forgets else None
        if feedback is not None:  # on the root, too, as where it has loaded the state alone
            feedback.forget()
    periodic = getattr(optimizer, "_periodic", None)
    if periodic is not None:  # the root, too, begins anew with it
        periodic.load(optimizer, _local_steps_of(optimizer) if is_root else state["local_steps"])


def _make_whole(optimizer: Any, root_rank: int) -> None:
    """Where ranks have shares of the state (``overlap_forward``), it becomes whole on the root, and is forgotten elsewhere."""
    ahead = getattr(optimizer, "_ahead", None)
    if ahead is not None:
        ahead.state.gather_at(root_rank)


def _named_tensors(params: Any) -> dict[str, torch.Tensor]:
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    named: dict[str, torch.Tensor] = {}
    for index, pair in enumerate(pairs):
        name, tensor = pair if isinstance(pair, tuple) and len(pair) == 2 else (str(index), pair)
        if name in named:
            raise InvalidArgumentError(f"broadcast_parameters '{name}': expected unique names but found it twice.")
        named[name] = tensor
    return named


def broadcast_in_place(named: Mapping[str, torch.Tensor], root: int, process_set: ProcessSet) -> None:
    """Puts the root's values into named tensors of any layout: all at once, so that small ones share a batch.

    Raises MismatchError if ranks disagree about a shape or dtype; of several tensors that fail the first is told.
    """
    pending: list[tuple[Operation, torch.Tensor, torch.Tensor]] = []
    problem: RingtrainError | None = None
    for name, tensor in named.items():
        try:
            pending.append(_start_broadcast(name, tensor, root, process_set))
        except RingtrainError as refused:
            problem = problem or refused
    for operation, tensor, contiguous in pending:  # all of them, so that no name stays in flight
        try:
            finish(operation, contiguous)
        except RingtrainError as failed:
            problem = problem or failed
        else:
            if not tensor.is_contiguous():
                tensor.detach().copy_(contiguous)
    if problem is not None:
        raise problem


def _start_broadcast(
    name: str, tensor: torch.Tensor, root: int, process_set: ProcessSet
) -> tuple[Operation, torch.Tensor, torch.Tensor]:
    with Submission("broadcast", name, process_set) as submission:
        check_supported(tensor)
        contiguous = tensor.detach().contiguous()
        buffer = buffer_of(contiguous)
        return submission.start([buffer], [buffer], root=operator.index(root)), tensor, contiguous


def _require_equal_sizes(sizes: list[list[int]], process_set: ProcessSet) -> None:
    ranks = members_of(process_set)
    for rank, theirs in zip(ranks, sizes, strict=True):
        if theirs != sizes[0]:
            raise MismatchError(
                f"broadcast_optimizer_state: parameters per group must be the same on all ranks, but are {sizes[0]} "
                f"on rank {ranks[0]} and {theirs} on rank {rank}. Make the same optimizer everywhere."
            )


# ---- state as bytes and tensors ----


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State by the parameter's place, since the parameters themselves differ from rank to rank."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [None if is_shard(parameter) else optimizer.state.get(parameter) for parameter in parameters]
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    delayed = getattr(optimizer, "_delayed", None)
    return {
        "states": states,
        "options": options,
        "local_steps": _local_steps_of(optimizer),
        "delayed": None if delayed is None else delayed.state(optimizer),
    }


def _local_steps_of(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """What local steps add to the state; None without them."""
    periodic = getattr(optimizer, "_periodic", None)
    return None if periodic is None else periodic.state()


def set_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Not by ``load_state_dict``: that casts to the parameters' dtype, and the ranks would differ from the root."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, values in zip(parameters, state["states"], strict=True):
        if is_shard(parameter):
            continue
        if values is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = values
    for group, options in zip(optimizer.param_groups, state["options"], strict=True):
        group.update(options)
    delayed = getattr(optimizer, "_delayed", None)
    if delayed is not None:
        delayed.load(optimizer, state["delayed"])


def _pack(state: Any) -> tuple[bytes, list[torch.Tensor]]:
    """A pickle in which tensors are places in a list, however deep they lie, and the list."""
    tensors: list[torch.Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> tuple | None:
            if not isinstance(value, torch.Tensor):
                return None
            tensors.append(value)
            return tuple(value.shape), value.dtype, value.device.type

    stream = io.BytesIO()
    Pickler(stream).dump(state)
    return stream.getvalue(), tensors


def _unpack(packed: bytes) -> tuple[Any, list[torch.Tensor]]:
    """The state with fresh tensors, and these in the order of ``_pack``."""
    tensors: list[torch.Tensor] = []

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, description: tuple) -> torch.Tensor:
            shape, dtype, device = description
            tensors.append(
                torch.empty(shape, dtype=dtype, device=device)
            )  # of this rank's current GPU, where it is one
            return tensors[-1]

    return Unpickler(io.BytesIO(packed)).load(), tensors
