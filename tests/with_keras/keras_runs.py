"""Training runs of a small Keras model for tests: with ringtrain on the ranks of a world, and the oracle, one process
with plain Keras on the batches of all ranks in one."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

import ringtrain.keras as hvd
from ringtrain.testing import World

STEPS = 6
GLOBAL_BATCH = 12  # two and three ranks share it evenly
_random = np.random.default_rng(7)
X = _random.normal(size=(STEPS * GLOBAL_BATCH, 5)).astype("float32")
Y = np.stack([X.sum(1), X[:, 0] * X[:, 1]], axis=1).astype("float32")


@dataclass
class Trained:
    """What a run left behind."""

    weights: list[np.ndarray]
    state: list[np.ndarray]
    history: dict[str, list[float]]
    optimizer: Any = field(repr=False)


def dense_model(seed: int = 0) -> keras.Model:
    """A model whose first weights depend on the seed alone, without the global random state of Keras."""
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(2)])
    return with_weights_of(model, seed)


def with_weights_of(model: keras.Model, seed: int) -> keras.Model:
    """The model with trainable weights drawn from a seed."""
    random = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(0.5 * random.normal(size=variable.shape))
    return model


def share_of(rank: int, size: int, data: np.ndarray, passes: int = 1) -> np.ndarray:
    """A rank's rows: of each global batch its own part, in micro-batches of equal sizes."""
    batches = data.reshape(-1, GLOBAL_BATCH, *data.shape[1:])
    return np.concatenate([batch[rank::size] for batch in batches])


def fit(
    model: keras.Model, rank: int, size: int, passes: int = 1, callbacks: list[Any] | None = None, epochs: int = 1
) -> Trained:
    """Fits a compiled model on a rank's share; each global batch is an update of ``passes`` micro-batches."""
    history = model.fit(
        share_of(rank, size, X), share_of(rank, size, Y), batch_size=GLOBAL_BATCH // size // passes, epochs=epochs,
        shuffle=False, verbose=0, callbacks=callbacks or [],
    )  # fmt: skip
    return trained(model, history.history)


def trained(model: keras.Model, history: dict[str, list[float]] | None = None) -> Trained:
    """What is to be compared of a model."""
    optimizer = model.optimizer
    return Trained(
        [np.array(weight) for weight in model.get_weights()],
        [np.array(variable.numpy()) for variable in getattr(optimizer, "variables", [])],
        history or {},
        optimizer,
    )


def start_callbacks() -> list[Any]:
    """What every script passes to fit."""
    return [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]


def distributed_runs(
    size: int, make_optimizer: Callable[[], Any], compiling: dict[str, Any] | None = None, **settings: Any
) -> list[Trained]:
    """Trains on all ranks of a world, each from weights of its own, and returns what each has."""
    passes = settings.get("backward_passes_per_step", 1)

    def run(rank: int) -> Trained:
        model = dense_model(seed=rank)
        model.compile(hvd.DistributedOptimizer(make_optimizer(), **settings), "mse", metrics=["mae"], **compiling or {})
        return fit(model, rank, size, passes, start_callbacks())

    with World(size) as world:
        return world.run(run)


class StopsBehind(keras.callbacks.Callback):
    """Stops within an epoch, as TerminateOnNaN does, or a limit of time."""

    def __init__(self, batch: int | None):
        super().__init__()
        self._batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counted from 0; None never stops."""
        if batch == self._batch:
            self.model.stop_training = True


# Behind which batch each rank stops, and how many steps all have taken then.
STOPS = [((1, None), 3), ((None, 1), 3), ((1, 2), 3), ((1, 1), 2), ((4, None), 6), ((None, None), 2 * STEPS)]


def check_stops_within_an_epoch(stops: list = STOPS, **compiling: Any) -> None:
    """A rank that stops alone takes a step more, with all; ranks that stop together stop as one process. No fit waits, nor the next."""
    for behind, taken in stops:

        def run(rank: int, behind: Any = behind) -> tuple[Trained, int]:
            model = dense_model(seed=rank)
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse", **compiling)
            first = fit(model, rank, 2, 1, [*start_callbacks(), StopsBehind(behind[rank])], epochs=2)
            steps = int(model.optimizer.iterations.numpy())
            fit(model, rank, 2)
            assert int(model.optimizer.iterations.numpy()) == steps + STEPS
            return first, steps

        with World(2, stall_abort_seconds=60) as world:
            runs, steps = zip(*world.run(run), strict=True)
        assert set(steps) == {taken}, (behind, steps)
        assert_same_bits(list(runs))


def oracle_run(make_optimizer: Callable[[], Any], gradient_factor: float = 1.0) -> Trained:
    """Trains plain Keras on the global batches; the gradients can be multiplied, for sums.

    On TensorFlow without a graph, whatever the ranks do: tracing one takes longer than these steps.
    """
    model = dense_model(seed=0)
    how = {"run_eagerly": True} if keras.backend.backend() == "tensorflow" else {"jit_compile": False}
    model.compile(make_optimizer(), "mse", metrics=["mae"], loss_weights=[gradient_factor], **how)
    model.optimizer.build(model.trainable_variables)  # ScheduleFreeAdamW copies weights when built
    return fit(model, 0, 1)


def assert_same_bits(runs: list[Trained]) -> None:
    """All ranks ended with the same weights, optimizer state and history."""
    first = runs[0]
    for other in runs[1:]:
        for mine, theirs in zip(first.weights + first.state, other.weights + other.state, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert first.history == other.history


def assert_close(one: Trained, other: Trained, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """The same weights, up to the order of additions, and weights that moved at all."""
    for mine, theirs in zip(one.weights, other.weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=atol)
    start = dense_model(seed=0).get_weights()
    assert any(not np.allclose(begun, ended, atol=1e-4) for begun, ended in zip(start, one.weights, strict=True))
