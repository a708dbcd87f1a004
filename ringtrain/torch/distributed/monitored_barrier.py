"""``torch.distributed.monitored_barrier`` for groups of this backend too, which torch's own refuses by their name."""

from datetime import timedelta

import torch.distributed as dist

from ringtrain._runtime.arguments import check_kind
from ringtrain.torch.distributed.process_group import RingtrainProcessGroup

_by_torch = dist.monitored_barrier


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier that names the ranks which did not come.

    Example:
        >>> dist.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)

    Args:
        group: None for the default one.
        timeout: for which each rank waits; None for that of the group.
        wait_all_ranks: whether rank 0 names all ranks that did not come, and not the first alone.

    Raises:
        InvalidArgumentError: timeout is no time.
        RuntimeError: not all ranks came in time; on rank 0 it names them.
    """
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return None  # as torch has it for ranks outside
    ours = dist.group.WORLD if group is None else group
    if not isinstance(ours, RingtrainProcessGroup):
        return _by_torch(group, timeout, wait_all_ranks)
    if isinstance(timeout, (int, float)):
        timeout = timedelta(seconds=timeout)
    if timeout is not None:
        check_kind("monitored_barrier: timeout must be a timedelta", timeout, timedelta, "Write timedelta(seconds=30)")
    return ours.monitored_barrier(timeout, wait_all_ranks)


def offer() -> None:
    """Has torch's name for it mean this one."""
    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier
