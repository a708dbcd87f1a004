"""Names of ``horovod.tensorflow.util`` that programs and Horovod's own tests import, private though they are there."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ringtrain.common.util import _cache as _cache


def _executing_eagerly() -> bool:
    """Whether operations run at once, and are not part of a graph."""
    return bool(tf.executing_eagerly())


def _make_subgraph(f: Callable) -> Callable:
    """The function as a graph of its own."""
    return tf.function(f)


def vars_to_refs(vars: Any) -> Any:
    """Variables, in lists or alone, as references that a set can hold."""
    return tuple(map(vars_to_refs, vars)) if isinstance(vars, (list, tuple)) else vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """The variables of ``vars_to_refs`` again, in lists."""
    return list(map(refs_to_vars, refs)) if isinstance(refs, (list, tuple)) else refs.deref()
