"""Rows of all ranks for a loss that every rank computes over them, as contrastive losses do: with the exact gradient."""

from functools import partial

import jax
from jax.typing import ArrayLike

from ringtrain._runtime.process_sets import ProcessSet, global_process_set, size_of
from ringtrain.jax.operations import allgather


def gather_with_gradient(
    tensor: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set
) -> jax.Array:
    """``allgather`` whose gradient is the sum over the ranks; see ``ringtrain.torch.gather_with_gradient``.

    Example:
        >>> images, texts = hvd.gather_with_gradient(images), hvd.gather_with_gradient(texts)

    Derivatives go backwards alone, as by ``jax.grad``.

    Args:
        tensor: rows of this rank, of one shape and in a program as many on all ranks; floating point.
        name: identity among the ranks.
        process_set: the ranks that take part.

    Returns:
        The rows of all ranks, in rank order.
    """
    return allgather(_with_multiplied_gradient(tensor, size_of(process_set)), name=name, process_set=process_set)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _with_multiplied_gradient(array: jax.Array, factor: int) -> jax.Array:
    return array


def _forward(array: jax.Array, factor: int) -> tuple[jax.Array, None]:
    return array, None


def _backward(factor: int, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (gradient * factor,)


_with_multiplied_gradient.defvjp(_forward, _backward)
