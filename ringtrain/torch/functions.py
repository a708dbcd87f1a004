"""The start of a training run: every rank gets the parameters and the optimizer's state of one of them.

Scripts call these once after ``init()``, and again after loading a checkpoint on one rank.
"""

import io
import operator
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ringtrain._runtime.arguments import check_unique
from ringtrain._runtime.context import current
from ringtrain._runtime.objects import allgather_object, broadcast_object
from ringtrain._runtime.pending import Operation
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, members_of
from ringtrain._runtime.submission import Submission, preparing
from ringtrain._training.adapter.checks import require_alike, require_same_names
from ringtrain.errors import MismatchError, RingtrainError
from ringtrain.torch.modes.base import Alone, OptimizerMode, State, mode_of
from ringtrain.torch.shards import is_shard
from ringtrain.torch.tensors import buffer_of, check_supported, finish, values_of


def broadcast_parameters(
    params: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Puts the root's values into the tensors of all ranks; rows of sharded embeddings stay each rank's own.

    Example:
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, or tensors in an order that all ranks share;
            of any dtype and layout, the same names and shapes on all ranks. Or the model itself: then its modules take over,
            too, what they add to the state besides tensors (``get_extra_state``), which a ``state_dict`` cannot give back.
        root_rank: global rank of the root.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: something else than tensors, or a root that is no member.
        MismatchError: ranks disagree about names, a shape or a dtype; or what modules add to a ``state_dict`` differs from the
            root's; or, on the ranks where it is so, elements that share memory there have several values on the root.
    """
    if isinstance(params, torch.nn.Module):
        return give_model(params, root_rank, process_set, "broadcast_parameters")
    with preparing("allreduce", "broadcast_parameters.names", process_set):
        named = {name: tensor for name, tensor in _named_tensors(params).items() if not is_shard(tensor)}
    added = {name: named.pop(name) for name in list(named) if name.endswith(_EXTRA)}
    if added:
        _require_those_of_root(added, root_rank, process_set)
    require_same_names("broadcast_parameters", sorted(named), process_set)
    parts = {f"broadcast_parameters.{name}": part for whole in named.items() for name, part in _parts_of(*whole)}
    broadcast_in_place(parts, root_rank, process_set)


def give_model(model: torch.nn.Module, root: int, process_set: ProcessSet, name: str) -> None:
    """Tensors in their place; what else modules add to the state goes as objects, for the modules to take over."""
    state = model.state_dict()
    added = {key: value for key, value in state.items() if is_added(key, value)}
    broadcast_parameters({key: value for key, value in state.items() if key not in added}, root, process_set)
    added = broadcast_object(added, root, f"{name}.further", process_set)
    if added and current().rank != root:
        model.load_state_dict(added, strict=False)


_EXTRA = "_extra_state"  # torch's name in a state_dict for what a module's get_extra_state() gives


def is_added(key: str, value: object) -> bool:
    """Whether an entry of a ``state_dict`` is none of the model's tensors, but what a module makes of its state when asked."""
    return key.endswith(_EXTRA) or not isinstance(value, torch.Tensor)


def _require_those_of_root(added: Mapping[str, object], root: int, process_set: ProcessSet) -> None:
    name = "broadcast_parameters.further"
    wanted = broadcast_object(dict(added), root, name, process_set)
    with preparing("allgather", f"{name}.sizes", process_set):
        unlike = [key for key in added if key not in wanted or not _is_alike(added[key], wanted[key])]
    found = allgather_object(unlike, name, process_set)
    ranks = [rank for rank, keys in zip(members_of(process_set), found, strict=True) if keys]
    if ranks:
        key = next(filter(None, found))[0]
        raise MismatchError(
            f"broadcast_parameters '{key}': the state that a module adds must be that of rank {root}, since a state_dict "
            f"cannot give it back to the module, but differs on rank {', '.join(map(str, ranks))}. Pass the model instead of "
            "its state_dict."
        )


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and (one.dtype, one.shape) == (other.dtype, other.shape) and _same_bits(one.cpu(), other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_is_alike, one, other))
    return pickle.dumps(one) == pickle.dumps(other)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(values_of(each).reshape(-1).view(torch.uint8) for each in (one, other)))


def _parts_of(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor; of a subclass that is made of others, such as a quantized one, these. A ``DTensor`` is one rank's alone."""
    if not hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "device_mesh"):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _parts_of(f"{name}.{part}", getattr(tensor, part))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives all ranks the root's optimizer state and the options of its param groups, exactly; takes no step.

    Example:
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)

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
    demand = "broadcast_optimizer_state: parameters per group must be the same on all ranks"
    require_alike(
        demand, allgather_object(sizes, sizes_name, process_set), process_set, "Make the same optimizer everywhere"
    )
    is_root = current().rank == root_rank
    _mode(optimizer).share_with(root_rank)
    with preparing("broadcast", "broadcast_optimizer_state.size", process_set):
        packed, tensors = _pack(state_of(optimizer)) if is_root else (b"", [])
    packed = broadcast_object(packed, root_rank, "broadcast_optimizer_state", process_set)
    if not is_root:
        state, tensors = _unpack(packed)
    named = {f"broadcast_optimizer_state.{index}": tensor for index, tensor in enumerate(tensors)}
    broadcast_in_place(named, root_rank, process_set)
    if not is_root:
        set_state(optimizer, state)
    mode = _mode(optimizer)
    if forgets:  # on the root, too, as where it has loaded the state alone
        mode.forget_losses()
    if is_root:  # it, too, begins anew with that
        mode.take_common_state(optimizer, mode.common_state(optimizer))


def _mode(optimizer: torch.optim.Optimizer) -> OptimizerMode:
    """That of a distributed optimizer; another trains alone."""
    return mode_of(optimizer) or Alone()


def _named_tensors(
    params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor] | torch.Tensor],
) -> dict[str, torch.Tensor]:
    given = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    pairs = [
        pair if isinstance(pair, tuple) and len(pair) == 2 else (str(index), pair) for index, pair in enumerate(given)
    ]
    check_unique("broadcast_parameters: names", (name for name, _ in pairs), "Name each tensor once")
    return dict(pairs)


class _Arrival(NamedTuple):
    """A tensor whose values are on their way.

    Attributes:
        values: where they arrive: the tensor's memory, or a contiguous copy.
        has_twin: whether another tensor under way has the same memory, and writes to it.
    """

    name: str
    operation: Operation
    tensor: torch.Tensor
    values: torch.Tensor
    has_twin: bool

    def land(self, root: int) -> None:
        """Waits, and puts the values into the tensor. Raises MismatchError where there is not room for all of them."""
        finish(self.operation, self.values)
        if self.values.data_ptr() == self.tensor.data_ptr() or current().rank == root:
            return
        own, values = self.tensor.detach(), self.values
        for dimension, (step, extent) in enumerate(zip(own.stride(), own.shape, strict=True)):
            if step == 0 and extent > 1:  # one element for all, which torch does not write to
                own, values = own.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
        if not self.has_twin:
            own.copy_(values)
        shares = self.has_twin or own.shape != self.tensor.shape
        if shares and not _same_bits(self.tensor, self.values):
            raise MismatchError(
                f"{self.name}: elements that share memory on rank {current().rank} must have one value, but differ on root "
                f"{root}. Tie or expand the same tensors on all ranks, or give each memory of its own with clone()."
            )


def broadcast_in_place(named: Mapping[str, torch.Tensor], root: int, process_set: ProcessSet) -> None:
    """Puts the root's values into named tensors of any layout: all at once, so that small ones share a batch.

    Raises MismatchError if ranks disagree about a shape or dtype, or where elements that share memory have several values on
    the root; of several tensors that fail the first is told.
    """
    pending: list[_Arrival] = []
    seen: set[tuple] = set()
    problem: RingtrainError | None = None
    for name, tensor in named.items():
        try:
            pending.append(_start_broadcast(name, tensor, root, process_set, seen))
        except RingtrainError as refused:
            problem = problem or refused
    for arrival in pending:  # all of them, so that no name stays in flight
        try:
            arrival.land(root)
        except RingtrainError as failed:
            problem = problem or failed
    if problem is not None:
        raise problem


def _start_broadcast(name: str, tensor: torch.Tensor, root: int, process_set: ProcessSet, seen: set[tuple]) -> _Arrival:
    with Submission("broadcast", name, process_set) as submission:
        check_supported(tensor)
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        values, has_twin = values_of(tensor), place in seen and tensor.numel() > 0
        if has_twin:
            values = values.clone()
        seen.add(place)
        buffer = buffer_of(values)
        operation = submission.start([buffer], [buffer], root=operator.index(root))
    return _Arrival(name, operation, tensor, values, has_twin)


# ---- state as bytes and tensors ----


def state_of(optimizer: torch.optim.Optimizer) -> State:
    """State by the parameter's place, since the parameters themselves differ from rank to rank."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [None if is_shard(parameter) else optimizer.state.get(parameter) for parameter in parameters]
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"states": states, "options": options, "mode": _mode(optimizer).common_state(optimizer)}


def set_state(optimizer: torch.optim.Optimizer, state: State) -> None:
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
    _mode(optimizer).take_common_state(optimizer, state["mode"])


def _pack(state: object) -> tuple[bytes, list[torch.Tensor]]:
    """A pickle in which tensors are places in a list, however deep they lie, and the list. One that comes twice is one there.

    Those that are made of others are pickled, with these in the list.
    """
    tensors: list[torch.Tensor] = []
    places: dict[int, int] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> tuple | None:
            if not isinstance(value, torch.Tensor) or hasattr(value, "__tensor_flatten__"):
                return None
            place = places.setdefault(id(value), len(tensors))
            if place == len(tensors):
                tensors.append(value)
            return place, tuple(value.shape), value.dtype, value.device.type

    stream = io.BytesIO()
    Pickler(stream).dump(state)
    return stream.getvalue(), tensors


def _unpack(packed: bytes) -> tuple[Any, list[torch.Tensor]]:
    """The state with fresh tensors, and these in the order of ``_pack``."""
    tensors: list[torch.Tensor] = []

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, description: tuple) -> torch.Tensor:
            place, shape, dtype, device = description
            if place == len(tensors):
                tensors.append(
                    torch.empty(shape, dtype=dtype, device=device)
                )  # of this rank's current GPU, where it is one
            return tensors[place]

    return Unpickler(io.BytesIO(packed)).load(), tensors
