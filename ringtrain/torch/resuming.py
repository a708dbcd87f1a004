"""Going on together: all that has a state is brought from one rank to all others, after an epoch with unequal numbers of steps.

``functions`` sends parameters and optimizers; a schedule, a scaler or an average of weights is sent as its ``state_dict``.
"""

from typing import TYPE_CHECKING

import torch

from ringtrain._runtime import operations
from ringtrain._runtime.arguments import check_kind
from ringtrain._runtime.context import current
from ringtrain._runtime.objects import broadcast_object
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain._runtime.submission import preparing
from ringtrain.errors import InvalidArgumentError
from ringtrain.torch.functions import broadcast_optimizer_state, give_model

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


def resume_together(
    *parts: "Stateful", root_rank: int | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Gives all ranks the states of the rank that went furthest, and returns its number; on all ranks together.

    Example:
        >>> for x, y in loader:  # more batches on some ranks than on others
        ...     optimizer.zero_grad()
        ...     loss(model(x), y).backward()
        ...     optimizer.step()
        ...     schedule.step()
        >>> hvd.resume_together(model, optimizer, schedule)

    For the end of an epoch in which ranks take different numbers of steps: without a ``root_rank`` it joins first
    (``hvd.join()``), so call it when this rank has no more data. A schedule belongs among the parts: what is stepped with
    the optimizer has fallen behind on a rank that ended sooner.

    Args:
        parts: models, optimizers, and whatever else has ``state_dict`` and ``load_state_dict``, such as schedules,
            ``torch.amp.GradScaler`` and averages of weights; the same ones in the same order on all ranks.
        root_rank: the rank to take the states of, such as the one that has loaded a checkpoint; None for the one that joined
            last.
        process_set: the ranks that take part; with a ``root_rank`` among them.

    Raises:
        InvalidArgumentError: a part has no state to load; or a process set without a ``root_rank``.
        MismatchError: the parts have other tensors on some ranks.
    """
    _check(parts, root_rank, process_set)
    root = operations.join() if root_rank is None else root_rank
    for place, part in enumerate(parts):
        if isinstance(part, torch.nn.Module):
            give_model(part, root, process_set, f"resume_together.{place}")
        elif isinstance(part, torch.optim.Optimizer):
            broadcast_optimizer_state(part, root, process_set=process_set)
        else:
            _give_state(part, root, f"resume_together.{place}", process_set)
    return root


def _check(parts: tuple[object, ...], root_rank: int | None, process_set: ProcessSet) -> None:
    for place, part in enumerate(parts):
        demand = f"resume_together: part {place} must have state_dict and load_state_dict"
        check_kind(demand, part, ("state_dict", "load_state_dict"), "Pass models, optimizers, schedules and the like")
    if root_rank is None and process_set is not global_process_set:
        raise InvalidArgumentError(
            "resume_together: process_set must go with a root_rank, as all ranks join, but came alone. Pass both."
        )


def _give_state(part: "Stateful", root: int, name: str, process_set: ProcessSet) -> None:
    is_root = current().rank == root
    with preparing("broadcast", f"{name}.size", process_set):
        own = part.state_dict() if is_root else None
    state = broadcast_object(own, root, name, process_set)
    if not is_root:
        part.load_state_dict(state)
