"""``ringtrain.common.elastic``, as scripts for Horovod import it."""

from ringtrain.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]
