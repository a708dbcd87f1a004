"""The start of a training run: every rank gets the parameters and the optimizer's state of one of them.

Scripts call these once after ``init()``, and again after loading a checkpoint on one rank.
"""

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ringtrain.context import current
from ringtrain.errors import InvalidArgumentError, MismatchError, RingtrainError
from ringtrain.objects import allgather_object, broadcast_object
from ringtrain.process_sets import ProcessSet, global_process_set, id_of
from ringtrain.torch.tensors import buffer_of, check_supported, finish


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Puts the root's values into the tensors of all ranks.

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
    named = _named_tensors(params)
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

    Args:
        optimizer: any optimizer, distributed or not; its state may be empty, on the root and elsewhere.
        root_rank: global rank of the root.
        model: accepted for Horovod's sake; the state is taken as it is.
        process_set: the ranks that take part.

    Raises:
        MismatchError: the optimizers hold different numbers of parameters.
    """
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    _require_equal_sizes(allgather_object(sizes, "broadcast_optimizer_state.sizes", process_set), process_set)
    is_root = current().rank == root_rank
    packed, tensors = _pack(_state_of(optimizer)) if is_root else (b"", [])
    packed = broadcast_object(packed, root_rank, "broadcast_optimizer_state", process_set)
    if not is_root:
        state, tensors = _unpack(packed)
    named = {f"broadcast_optimizer_state.{index}": tensor for index, tensor in enumerate(tensors)}
    broadcast_in_place(named, root_rank, process_set)
    if not is_root:
        _set_state(optimizer, state)


def _named_tensors(params: Any) -> dict[str, torch.Tensor]:
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    named: dict[str, torch.Tensor] = {}
    for index, pair in enumerate(pairs):
        name, tensor = pair if isinstance(pair, tuple) and len(pair) == 2 else (str(index), pair)
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(
                f"broadcast_parameters '{name}': expected a tensor but found a {type(tensor).__name__}. "
                "Send other objects with broadcast_object."
            )
        if name in named:
            raise InvalidArgumentError(f"broadcast_parameters '{name}': expected unique names but found it twice.")
        named[name] = tensor
    return named


def broadcast_in_place(named: Mapping[str, torch.Tensor], root: int, process_set: ProcessSet) -> None:
    """Puts the root's values into named tensors of any layout: all at once, so that small ones share a batch.

    Raises MismatchError if ranks disagree about a shape or dtype.
    """
    context, identity = current(), id_of(process_set)
    pending = []
    for name, tensor in named.items():
        try:
            check_supported(tensor)
        except RingtrainError as problem:  # seen by this rank alone: the others must not wait for it
            context.refuse("broadcast", name, identity, problem)
        contiguous = tensor.detach().contiguous()
        buffer = buffer_of(contiguous)
        operation = context.submit("broadcast", name, [buffer], [buffer], root=root, process_set=identity)
        pending.append((operation, tensor, contiguous))
    for operation, tensor, contiguous in pending:
        finish(operation, contiguous)
        if not tensor.is_contiguous():
            tensor.detach().copy_(contiguous)


def _require_equal_sizes(sizes: list[list[int]], process_set: ProcessSet) -> None:
    ranks = process_set.ranks
    for rank, theirs in zip(ranks, sizes, strict=True):
        if theirs != sizes[0]:
            raise MismatchError(
                f"broadcast_optimizer_state: parameters per group must be the same on all ranks, but are {sizes[0]} "
                f"on rank {ranks[0]} and {theirs} on rank {rank}. Make the same optimizer everywhere."
            )


# ---- state as bytes and tensors ----


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State by the parameter's place, since the parameters themselves differ from rank to rank."""
    states = [optimizer.state.get(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"states": states, "options": options}


def _set_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Not by ``load_state_dict``: that casts to the parameters' dtype, and the ranks would differ from the root."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, values in zip(parameters, state["states"], strict=True):
        if values is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = values
    for group, options in zip(optimizer.param_groups, state["options"], strict=True):
        group.update(options)


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
            tensors.append(torch.empty(shape, dtype=dtype, device=device))  # of this rank's current GPU, where it is one
            return tensors[-1]

    return Unpickler(io.BytesIO(packed)).load(), tensors
