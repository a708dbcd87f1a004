"""Process sets under ``ringtrain.common.process_sets``, as scripts for Horovod import them."""

from ringtrain._runtime.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
