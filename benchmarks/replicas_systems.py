"""What the benchmark of comparing trains: a perceptron with momentum in each framework, on this rank's batch."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

RATE, MOMENTUM = 0.001, 0.9


class Trainer(Protocol):
    """A model that one process trains together with the others."""

    def step(self) -> None:
        """Trains on the batch, and has ended when it returns."""

    def parameters(self) -> list[np.ndarray]:
        """As they are now."""


class Torch:
    """PyTorch's loop.

    Args:
        layers: widths.
        batch: of this rank.
        replicas: of the mode.
    """

    def __init__(self, layers: Sequence[int], batch: np.ndarray, replicas: str):
        import torch

        import ringtrain.torch as hvd

        linears = [torch.nn.Linear(*pair) for pair in itertools.pairwise(layers)]
        self._model = torch.nn.Sequential(*[part for linear in linears for part in (linear, torch.nn.ReLU())])
        hvd.broadcast_parameters(self._model.state_dict(), 0)
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self._model.parameters(), lr=RATE, momentum=MOMENTUM),
            self._model.named_parameters(),
            mode=hvd.Synchronous(replicas=replicas),
        )
        self._batch = torch.from_numpy(batch)

    def step(self) -> None:
        self._optimizer.zero_grad()
        (self._model(self._batch) - 1).square().mean().backward()
        self._optimizer.step()

    def parameters(self) -> list[np.ndarray]:
        return [each.detach().numpy() for each in self._model.parameters()]


class Keras:
    """Keras' own step, on the backend that it runs on; arguments as of ``Torch``."""

    def __init__(self, layers: Sequence[int], batch: np.ndarray, replicas: str):
        import keras

        import ringtrain.keras as hvd

        keras.utils.set_random_seed(7)
        dense = [keras.layers.Dense(width, "relu") for width in layers[1:]]
        self._model = keras.Sequential([keras.Input((layers[0],)), *dense])
        optimizer = keras.optimizers.SGD(RATE, MOMENTUM)
        self._model.compile(
            hvd.DistributedOptimizer(optimizer, mode=hvd.Synchronous(replicas=replicas)), "mse", jit_compile=False
        )
        self._batch = batch, np.ones((len(batch), layers[-1]), np.float32)

    def step(self) -> None:
        self._model.train_on_batch(*self._batch)

    def parameters(self) -> list[np.ndarray]:
        return self._model.get_weights()


class TensorFlow:
    """A tape in a graph; arguments as of ``Torch``."""

    def __init__(self, layers: Sequence[int], batch: np.ndarray, replicas: str):
        import tensorflow as tf

        import ringtrain.tensorflow as hvd

        shapes = [shape for a, b in itertools.pairwise(layers) for shape in ((a, b), (b,))]
        self._weights = [tf.Variable(first) for first in first_values(shapes)]
        momenta = [tf.Variable(tf.zeros(shape)) for shape in shapes]
        x = tf.constant(batch)

        @tf.function(autograph=False)
        def step() -> None:
            with tf.GradientTape() as tape:
                y = x
                for matrix, bias in zip(self._weights[::2], self._weights[1::2], strict=True):
                    y = tf.nn.relu(y @ matrix + bias)
                loss = tf.reduce_mean(tf.square(y - 1.0))
            tape = hvd.DistributedGradientTape(tape, mode=hvd.Synchronous(replicas=replicas))
            for gradient, momentum, weight in zip(
                tape.gradient(loss, self._weights), momenta, self._weights, strict=True
            ):
                weight.assign_sub(RATE * momentum.assign(MOMENTUM * momentum + gradient))

        self.step = step

    def parameters(self) -> list[np.ndarray]:
        return [each.numpy() for each in self._weights]


class Jax:
    """A compiled step with optax; arguments as of ``Torch``."""

    def __init__(self, layers: Sequence[int], batch: np.ndarray, replicas: str):
        import jax
        import jax.numpy as jnp
        import optax

        import ringtrain.jax as hvd

        shapes = [shape for a, b in itertools.pairwise(layers) for shape in ((a, b), (b,))]
        self._parameters: Any = [jnp.asarray(first) for first in first_values(shapes)]
        optimizer = hvd.DistributedGradientTransformation(
            optax.inject_hyperparams(optax.sgd)(learning_rate=RATE, momentum=MOMENTUM),
            mode=hvd.Synchronous(replicas=replicas),
        )
        self._state = optimizer.init(self._parameters)

        def loss_of(parameters: Any, y: Any) -> Any:
            for matrix, bias in zip(parameters[::2], parameters[1::2], strict=True):
                y = jax.nn.relu(y @ matrix + bias)
            return jnp.mean(jnp.square(y - 1.0))

        @jax.jit
        def step(parameters: Any, state: Any, batch: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(jax.grad(loss_of)(parameters, batch), state, parameters)
            return optax.apply_updates(parameters, updates), state

        self._step, self._batch, self._ended = step, jnp.asarray(batch), jax.block_until_ready

    def step(self) -> None:
        self._parameters, self._state = self._ended(self._step(self._parameters, self._state, self._batch))

    def parameters(self) -> list[np.ndarray]:
        return [np.asarray(each) for each in self._parameters]


def first_values(shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """The same on all ranks."""
    drawn = np.random.default_rng(7)
    return [(0.02 * drawn.normal(size=shape)).astype(np.float32) for shape in shapes]


SYSTEMS: dict[str, Callable[[Sequence[int], np.ndarray, str], Trainer]] = {
    "torch": Torch, "keras": Keras, "tensorflow": TensorFlow, "jax": Jax,
}  # fmt: skip
