"""Arguments of a distributed optimizer as tables of tests have them: what belongs to its mode is put into one."""

from typing import Any

import ringtrain as rt

_LATE, _SHARDED = "late", "sharded"  # in such a table, the modes that have no argument of their own
_OF_LOCAL_STEPS = ("every", "outer", "within", "warmup", "fragments", "overlap", "merge", "named_buffers")


def in_mode(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, with ``mode`` in place of those that belong to one.

    Example:
        >>> in_mode({"every": 4, "op": rt.Average})
        {'op': 0, 'mode': LocalSteps(every=4)}
        >>> in_mode({"late": True})
        {'mode': OneStepLate()}
    """
    left = dict(arguments)
    if "mode" in left:
        return left
    common = {"replicas": left.pop("replicas")} if "replicas" in left else {}
    local = {name: left.pop(name) for name in _OF_LOCAL_STEPS if name in left}
    if local.get("every", 1) is None:  # exact steps, whatever else is said of local ones
        local = {}
    views = left.pop("gradient_as_bucket_view", None)
    if left.pop(_LATE, False):
        return {**left, "mode": rt.OneStepLate(**common)}
    if left.pop(_SHARDED, False):
        return {**left, "mode": rt.ShardedStep(**common)}
    if local:
        return {**left, "mode": rt.LocalSteps(**local, **common)}
    if views is None and not common:
        return left
    return {**left, "mode": rt.Synchronous(**common, gradient_as_bucket_view=bool(views))}
