"""How many files this process may open: the soft limit is raised as far as is needed, and what it lacks is told.

It is not raised further: a program that uses select() cannot have descriptors of 1024 and above, and would get them.
"""

import os
import resource

_ROUND = 64  # what is advised is a multiple, so that it does for what comes later too


def lack(needed: int, wished: int = 0) -> str:
    """Makes room for so many more descriptors; "" if there is, else what is wrong and what to do.

    Args:
        needed: without these nothing works.
        wished: how many there may become; the soft limit is raised as far as the hard one allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = _open_now(soft)
    raised = limit_for(used + max(needed, wished), soft, hard)
    if raised != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    least = used + needed
    if raised == resource.RLIM_INFINITY or least <= raised:
        return ""
    advised = -(-least // _ROUND) * _ROUND
    return (
        f"limit of open files: it must be at least {least}, since {used} are open and {needed} more are needed, but is {raised}. "
        f"Raise it with: ulimit -n {advised}"
    )


def limit_for(wanted: int, soft: int, hard: int) -> int:
    """The soft limit with which so many can be open, if the hard one allows; never less than it is. Pure."""
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def _open_now(limit: int) -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # that by which it is read
    except OSError:  # there is not even one for that
        return limit
