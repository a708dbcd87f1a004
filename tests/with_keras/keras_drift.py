"""Planted drift, for each Keras and backend: ranks that train apart are told so, and what only looks like drift is let be.

``test_keras_drift`` has the cases of Keras 3 on TensorFlow; processes with another Keras ``check`` the same in ``fit``.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

import ringtrain as rt
from ringtrain._training import drift
from ringtrain.errors import MismatchError
from ringtrain.testing import World


class Cause(NamedTuple):
    """What the last rank does alone before its second step, and what the error says then."""

    act: Callable[[Any, Any], None]
    words: str


def _other_rate(model: Any, optimizer: Any) -> None:
    optimizer.learning_rate = 0.05


def _assignment(model: Any, optimizer: Any) -> None:
    variable = model.trainable_variables[0]
    variable.assign(variable.numpy() + 0.25)


CAUSES = {
    "rate": Cause(_other_rate, "learning_rate must be the same on all ranks, but is 0.1 on rank 0 and 0.05 on rank 1"),
    "assignment": Cause(_assignment, "by up to 0.25"),
}


def data(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Another batch on each rank."""
    drawn = np.random.default_rng(rank)
    return drawn.normal(size=(4, 3)).astype("float32"), drawn.normal(size=(4, 1)).astype("float32")


def is_last() -> bool:
    return rt.rank() == rt.size() - 1


# ---- for any Keras ----


def check_steps_that_survive(keras: Any, hvd: Any) -> None:
    """As ``check``, in a ``fit`` with ``elastic.Elastic``."""
    with compared_always(), World(2) as world:
        one, other = world.run(lambda rank: fits(keras, hvd, rank, survives=True))
        assert all((mine == theirs).all() for mine, theirs in zip(one, other, strict=True))
        for cause in CAUSES.values():
            told = world.run(lambda rank, act=cause.act: _told(lambda: fits(keras, hvd, rank, act, survives=True)))
            assert told[0] == told[1] and cause.words in told[0], told


@contextmanager
def compared_always() -> Iterator[None]:
    """Parameters are compared in each step."""
    before, drift.PERIOD, drift.SHARE = (drift.PERIOD, drift.SHARE), 0.0, float("inf")
    try:
        yield
    finally:
        drift.PERIOD, drift.SHARE = before


def check(keras: Any, hvd: Any) -> None:
    """Each cause is told in ``fit``, in one text on both ranks, and ranks that are alike are let be."""
    with compared_always(), World(2) as world:
        one, other = world.run(lambda rank: fits(keras, hvd, rank))
        assert all((mine == theirs).all() for mine, theirs in zip(one, other, strict=True))
        world.run(
            lambda rank: fits(keras, hvd, rank, CAUSES["assignment"].act, mode=hvd.Synchronous(replicas="differ"))
        )
        for cause in CAUSES.values():
            told = world.run(lambda rank, act=cause.act: _told(lambda: fits(keras, hvd, rank, act)))
            assert told[0] == told[1] and cause.words in told[0], told
        for layer in range(2):
            check_a_frozen_layer(keras, hvd, world, layer)


def check_a_frozen_layer(keras: Any, hvd: Any, world: Any, layer: int) -> None:
    """Which the last rank alone does not train: it is named when ``fit`` begins, and not as numbers of tensors."""
    told = world.run(lambda rank: _told(lambda: fits(keras, hvd, rank, frozen=layer)))
    shape = [[3, 4], [4, 1]][layer]
    named = rf"but '\S*dense\S*/kernel\S*' of shape {re.escape(str(shape))}, '\S+' of shape \[\d\] are trained on rank 0 and not on"
    assert told[0] == told[1] and re.search(f"{named} rank 1. Freeze", told[0]), told


def fits(
    keras: Any,
    hvd: Any,
    rank: int,
    act: Callable[[Any, Any], None] | None = None,
    survives: bool = False,
    frozen: int | None = None,
    **arguments: Any,
) -> list[np.ndarray]:
    """The weights after four steps, which may be such that survive; the last rank acts before its third one.

    Args:
        frozen: a layer that it does not train.
    """
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    weights = np.random.default_rng(7)  # ranks are threads, which share the seed of Keras
    model.set_weights([weights.normal(size=each.shape) for each in model.get_weights()])
    if frozen is not None:
        model.layers[frozen].trainable = not is_last()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), **arguments), "mse")

    def begins(batch: int, logs: Any = None) -> None:
        if act is not None and batch == 2 and is_last():
            getattr(model, "jax_state_sync", lambda: None)()  # as Keras asks for on JAX
            act(model, model.optimizer)

    callback = keras.callbacks.LambdaCallback(on_train_batch_begin=begins)
    x, y = data(rank)
    if survives:
        sampler = hvd.elastic.BatchSampler(range(2 * len(x)), batch_size=1)
        elastic = hvd.elastic.Elastic(model, sampler=sampler)
        drawn = hvd.elastic.batches(sampler, lambda indices: (x[indices % len(x)], y[indices % len(x)]))
        model.fit(drawn, verbose=0, callbacks=[elastic, callback])
    else:
        model.fit(x, y, batch_size=1, shuffle=False, verbose=0, callbacks=[callback])
    return model.get_weights()


def _told(act: Callable[[], Any]) -> str:
    try:
        act()
    except MismatchError as problem:  # of `fit`, whatever the framework makes of it
        return str(problem)
    return ""
