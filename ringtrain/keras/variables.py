"""Variables of a model and its optimizer between ranks: the start of a run, and statistics that each rank keeps alone.

Values travel as NumPy arrays, which works alike for Keras 3 on each backend and for tf_keras.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ringtrain._runtime.context import current
from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.operations import allreduce_async, broadcast_async_
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, members_of
from ringtrain._runtime.submission import preparing
from ringtrain._training.adapter.checks import require_alike
from ringtrain.elastic.adapters import is_seed
from ringtrain.errors import MismatchError, UnsupportedError
from ringtrain.keras.types import Optimizer, Variable

_DESCRIBED = "broadcast_variables.described"

_SEED_STRIDE = 1_000_003  # between the seeds of neighbouring ranks


def broadcast_variables(
    variables: Iterable[Variable], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Puts the root's values into the variables of all ranks.

    Example:
        >>> hvd.broadcast_variables(model.variables + model.optimizer.variables, root_rank=0)

    The seeds of dropout and of other random layers follow from the root's too, but differ from rank to rank, so that
    ranks do not drop the same units.

    Args:
        variables: in an order that all ranks share; one that comes twice is sent once, text is left alone, and so are sums of
            ``backward_passes_per_step``.
        root_rank: global rank of the root.
        process_set: the ranks that take part.

    Raises:
        MismatchError: ranks hold different numbers of variables, or different shapes or dtypes.
    """
    with preparing("allgather", f"{_DESCRIBED}.sizes", process_set):
        chosen = _numeric(variables)
        described = [_description(variable) for variable in chosen]
    if process_set.size() == 1:
        return
    names = _agreed_names(described, process_set)
    pending = []
    for index, variable in enumerate(chosen):
        value = np.array(variable.numpy(), order="C")
        name = f"broadcast_variables.{index}.{names[index]}"
        # As bytes: any dtype travels. Dtypes and shapes are known to be the same.
        handle = broadcast_async_(value.reshape(-1).view(np.uint8), root_rank, name, process_set)
        pending.append((handle, variable, value))
    for handle, variable, value in pending:
        handle.wait()
        if is_seed(variable):
            value = _seed_of_this_rank(value, root_rank)
        variable.assign(value)


def broadcast_global_variables(root_rank: int) -> None:
    """Horovod's call for graphs of TensorFlow 1, which raises ``UnsupportedError``: Keras 3 has no global variables.

    Example:
        >>> hvd.broadcast_variables(model.variables, root_rank=0)  # in its place

    Args:
        root_rank: of no effect. Use ``broadcast_variables``.
    """
    raise UnsupportedError(
        "broadcast_global_variables: expected a graph of TensorFlow 1 but found Keras 3. Pass "
        f"BroadcastGlobalVariablesCallback({root_rank}) to fit(), or call "
        f"broadcast_variables(model.variables, {root_rank})."
    )


def average_variables(variables: Iterable[Variable], process_set: ProcessSet = global_process_set) -> None:
    """Puts the average over the ranks into floating-point variables, in an order that all ranks share."""
    chosen = _numeric(variables)
    if process_set.size() == 1:
        return
    pending = [
        (allreduce_async(np.array(variable.numpy()), f"average_variables.{index}.{own_name(variable)}",
                         process_set=process_set), variable)
        for index, variable in enumerate(chosen)
    ]  # fmt: skip
    for handle, variable in pending:
        variable.assign(handle.wait())


def build_optimizer(optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    """Makes an optimizer's variables; those of tf_keras' ``optimizers.legacy`` have a way of their own."""
    build = getattr(optimizer, "_create_all_weights", None) or optimizer.build
    build(variables)


def variables_of_optimizer(optimizer: Optimizer) -> list[Variable]:
    """A list in Keras 3, a method too in tf_keras."""
    return list(optimizer.variables() if callable(optimizer.variables) else optimizer.variables)


def slots_of(optimizer: Optimizer, variables: Sequence[Variable]) -> list[Variable]:
    """What an optimizer keeps for some of the variables that it trains, such as their momentum; Keras has a list of each kind."""
    inner: Any = getattr(optimizer, "inner_optimizer", None) or optimizer
    if hasattr(inner, "get_slot_names"):  # tf_keras' optimizers.legacy
        made = [(variable, name) for name in inner.get_slot_names() for variable in variables if variable.trainable]
        return [inner.get_slot(*each) for each in made]
    places = getattr(inner, "_trainable_variables_indices", None) or getattr(inner, "_index_dict", {})
    chosen = [places[key] for key in map(inner._var_key, variables) if key in places]
    own = {id(variable) for variable in variables_of_optimizer(inner)}
    kinds = [
        kind
        for name, kind in vars(inner).items()
        if isinstance(kind, list) and len(kind) == len(places) and name != "_variables"  # that has those of all kinds
    ]
    return [kind[place] for kind in kinds for place in chosen if id(kind[place]) in own]


def _numeric(variables: Iterable[Variable]) -> list[Variable]:
    unique = {id(variable): variable for variable in variables}
    return [
        variable
        for variable in unique.values()
        if "string" not in str(variable.dtype) and not getattr(variable, "stays_on_rank", False)
    ]


def path_of(variable: Variable) -> str:
    """What Keras calls a variable: ``sequential_1/dense_2/kernel``."""
    return getattr(variable, "path", None) or variable.name


def own_name(variable: Variable) -> str:
    """The last part of the path, without counters: ``kernel``. Not unique, but the same on all ranks.

    What stands before it is not: layers are counted in each process, and Keras 3 leaves the name of a ``Sequential``
    out of the paths of one that was loaded.
    """
    return re.sub(r"_[0-9]+$", "", path_of(variable).split("/")[-1].split(":")[0])


def _description(variable: Variable) -> tuple[tuple[tuple[int, ...], str], str]:
    """Shape and dtype, and the path."""
    return (tuple(variable.shape), str(variable.dtype)), path_of(variable)


def _agreed_names(described: Sequence[tuple[tuple[tuple[int, ...], str], str]], process_set: ProcessSet) -> list[str]:
    """What the lowest rank calls the variables; raises MismatchError if the ranks have different ones."""
    kinds, names = [kind for kind, _ in described], [name for _, name in described]
    everyone = allgather_object((kinds, names), _DESCRIBED, process_set)
    first, first_names = everyone[0]
    demand = "broadcast_variables: the number of variables must be the same on all ranks"
    advice = "Make the same model and optimizer everywhere, and build both before"
    for rank, (theirs, their_names) in zip(members_of(process_set), everyone, strict=True):
        place = next((place for place, pair in enumerate(zip(first, theirs, strict=False)) if pair[0] != pair[1]), None)
        if place is not None:
            raise MismatchError(
                f"broadcast_variables '{first_names[place]}': shape and dtype must be the same on all ranks, but are "
                f"{_text(first[place])} on rank {members_of(process_set)[0]} and {_text(theirs[place])} "
                f"('{their_names[place]}') on rank {rank}. Make the same model and optimizer everywhere."
            )
    for rank, (_, their_names) in zip(members_of(process_set), everyone, strict=True):
        if their_names != first_names and sorted(their_names) == sorted(first_names):
            place = next(place for place, name in enumerate(first_names) if name != their_names[place])
            raise MismatchError(
                f"broadcast_variables '{first_names[place]}': variables must be in the same order on all ranks, but number {place} is "
                f"'{their_names[place]}' on rank {rank}. Pass model.variables everywhere."
            )
    require_alike(demand, [len(theirs) for theirs, _ in everyone], process_set, advice)
    return first_names


def _text(described: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = described
    return f"{shape} {dtype}"


def _seed_of_this_rank(state: np.ndarray, root_rank: int) -> np.ndarray:
    # From the root's seed, which files keep: a resumed run draws what an uninterrupted one draws.
    seed, counter = (int(number) for number in state)
    shifted = (seed + _SEED_STRIDE * (current().rank - root_rank)) % (1 << 31)
    return np.array([shifted, counter]).astype(state.dtype)
