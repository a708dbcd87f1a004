"""Gradients and parameters, which are trees of arrays: an operation for each leaf, named after its way from the root.

All are under way together; small ones travel together, as the core does with whatever is ready.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
from jax.typing import ArrayLike

from ringtrain._runtime.operations import Compression
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain._runtime.submission import preparing
from ringtrain._training.adapter.checks import require_same_names
from ringtrain.jax import names
from ringtrain.jax.operations import as_array, start

Tree = TypeVar("Tree")  # of arrays


def allreduce_gradients(
    gradients: Tree,
    op: int | None = None,
    name: str = "gradients",
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: str = Compression.none,
) -> Tree:
    """The average over all ranks of each array of a tree, inside ``jax.jit`` or outside. What is of float0 stays as it is.

    Example:
        >>> loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
        >>> updates, state = optimizer.update(hvd.allreduce_gradients(gradients), state)

    Args:
        gradients: a tree of arrays, of the same structure, shapes and dtypes on all ranks.
        op: ``Average`` (default) or ``Sum``.
        name: what the names of the leaves' operations begin with.
        prescale_factor: factor on each contribution.
        postscale_factor: factor on the result.
        process_set: the ranks that take part.
        compression: how float32 and float64 travel between hosts.
    """
    given = {"op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _each_leaf("allreduce", gradients, name, process_set, compression=compression, **given)


def broadcast_parameters(
    parameters: Tree, root_rank: int = 0, name: str = "parameters", process_set: ProcessSet = global_process_set
) -> Tree:
    """The root's arrays on every rank: of parameters, of an optimizer's state, or of random keys.

    Example:
        >>> parameters, state = hvd.broadcast_parameters((parameters, optimizer.init(parameters)))

    Args:
        parameters: a tree of arrays, keys and numbers, of the same structure and shapes on all ranks; not changed.
        root_rank: global rank of the root.
        name: what the names of the leaves' operations begin with.
        process_set: the ranks that take part.

    Raises:
        MismatchError: outside of ``jax.jit``, trees of ranks have other leaves; the same on all.
    """
    if not names.tracing():
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(parameters)[0]]
        require_same_names(name, paths, process_set)
    return _each_leaf("broadcast", parameters, name, process_set, root_rank=root_rank)


def _each_leaf(operation: str, tree: Tree, name: str, process_set: ProcessSet, **given: Any) -> Tree:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    started: list[tuple[Callable[[], jax.Array], object]] = []
    for path, leaf in leaves:
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:  # the gradient of a whole number, which holds nothing
            started.append((partial(_unchanged, leaf), None))
            continue
        label = f"{name}{jax.tree_util.keystr(path)}"
        label = names.claim(label) or label
        with preparing(operation, label, process_set):
            array, key = _without_key(leaf, label)
        started.append((start(operation, array, label, process_set, **given), key))
    return structure.unflatten([finish() if key is None else _key(finish(), key) for finish, key in started])


def _unchanged(leaf: Tree) -> Tree:
    return leaf


def _without_key(leaf: ArrayLike, label: str) -> tuple[jax.Array, object]:
    """The array of a leaf, and of which kind it is if it is a random key."""
    array = as_array(label, leaf, "Use broadcast_object for it")
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array), jax.random.key_impl(array)
    return array, None


def _key(data: jax.Array, kind: object) -> jax.Array:
    return jax.random.wrap_key_data(data, impl=kind)
