"""Gradients of several passes, which an optax transformation adds up on its rank: only the sums travel, and update."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from ringtrain.jax.trees import Tree

if TYPE_CHECKING:
    import optax

Update = Callable[..., tuple[Tree, object]]


class Accumulated(NamedTuple):
    """The state of ``accumulating``.

    Attributes:
        passes: how many are in the sums.
        sums: of this rank's gradients.
        inner: state of the transformation.
    """

    passes: jax.Array
    sums: object
    inner: object


class Accumulation:
    """Calls a transformation's update with the sums, in the last one of several passes. The updates of the others are zeros.

    Args:
        inner: the transformation.
        update: its update, with the gradients of all ranks.
        passes: how many make a step.
        averages: whether sums are divided by that number.
    """

    def __init__(self, inner: "optax.GradientTransformationExtraArgs", update: Update, passes: int, averages: bool):
        self._inner, self._update, self._passes, self._averages = inner, update, passes, averages

    def init(self, params: object) -> Accumulated:  # optax's name
        sums = jax.tree.map(jnp.zeros_like, params)
        return Accumulated(jnp.zeros((), jnp.int32), sums, self._inner.init(params))

    def update(
        self, updates: Tree, state: Accumulated, params: object = None, **extra: object
    ) -> tuple[Tree, Accumulated]:
        sums = jax.tree.map(jnp.add, state.sums, updates)
        passes = state.passes + 1
        given = jax.tree.map(self._divided, sums) if self._averages else sums

        def last() -> tuple[Tree, Accumulated]:
            result, inner = self._update(given, state.inner, params, **extra)
            inner = jax.tree.map(_as_before, inner, state.inner)
            return result, Accumulated(jnp.zeros_like(passes), jax.tree.map(jnp.zeros_like, sums), inner)

        def earlier() -> tuple[Tree, Accumulated]:
            like, _ = jax.eval_shape(lambda: self._inner.update(given, state.inner, params, **extra))
            return jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), like), Accumulated(
                passes, sums, state.inner
            )

        is_last = passes == self._passes
        if isinstance(is_last, jax.core.Tracer):
            return jax.lax.cond(is_last, last, earlier)
        return last() if is_last else earlier()

    def _divided(self, total: jax.Array) -> jax.Array:
        return (total / self._passes).astype(total.dtype)


def _as_before(new: jax.Array, old: jax.Array) -> jax.Array:
    """An array of a state in the dtype of before, as both branches of a program must have it."""
    return new.astype(old.dtype) if getattr(new, "dtype", None) != getattr(old, "dtype", None) else new
