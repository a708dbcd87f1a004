"""Runs a script of Keras on ranks that are threads, and in one process with the batches of all; on the backend of KERAS_BACKEND."""

from __future__ import annotations

import logging
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import dtypes
from modes import in_mode
from pytest import MonkeyPatch

import ringtrain as rt
import ringtrain.keras as hvd
from ringtrain.keras.variables import slots_of
from training.fuzzing import Fuzzer, difference, on_ranks
from training.keras_script import (
    FIRST,
    HEAD,
    HIDDEN,
    LOCAL,
    MISTAKES,
    SCRIPTS,
    Script,
    Turn,
    groups_of,
    is_rounded,
    known_to_optimizer,
)  # fmt: skip

WIDTH, CLASSES, ROWS, IDS, SAMPLES = 3, 3, 6, 2, 2
STALL_SECONDS = 60.0
PATIENCE = 600.0  # of the threads of one process, which hear of each other's errors: for a machine that does much else
RATE, EPS, CLIP, EVERY = 0.1, 1e-2, 0.05, 2
TOLERANCE, OF_ROWS, ROUNDED = 1e-9, 2e-6, 5e-2  # rows of tables have 32 bits
CLASS_WEIGHTS = {0: 0.5, 1: 1.5, 2: 1.0}
ON_TENSORFLOW, ON_JAX = (keras.backend.backend() == name for name in ("tensorflow", "jax"))
if ON_JAX:
    import jax

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # ranks share XLA's threads
    logging.getLogger("jax").setLevel(logging.CRITICAL)  # which tells what ranks are told, too

# What Keras does not do on JAX, or ringtrain (docs/modes.md).
ILLEGAL_ON_JAX = {
    "Keras: an optimizer has the variables with which it was built": lambda s: any(
        frozen != set(turn.frozen) for frozen, turn in known_to_optimizer(s.turns)
    ),
    "Keras: a step is given the variables of one optimizer": lambda s: s.step == "two",
    "Keras: LossScaleOptimizer has an update for programs alone, which nothing here can delay or share": lambda s: (
        s.scales != "" and s.method != "exact"
    ),
    "Keras: the end of fit gives variables and their moving averages the same memory, which a compiled step gives away twice": lambda s: (
        s.moving != "" and s.runs != "eager" and len(s.turns) > 1
    ),
    "rows of tables come in any number": lambda s: s.table == "sharded",
}
LANGUAGE = replace(SCRIPTS, rules={**SCRIPTS.rules, **(ILLEGAL_ON_JAX if ON_JAX else {})})


# eps large enough that what rounds otherwise is not divided by next to nothing
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": keras.optimizers.SGD,
    "momentum": lambda **extra: keras.optimizers.SGD(momentum=0.9, weight_decay=0.01, **extra),
    "nesterov": lambda **extra: keras.optimizers.SGD(momentum=0.5, nesterov=True, **extra),
    "adam": lambda **extra: keras.optimizers.Adam(epsilon=EPS, **extra),
    "amsgrad": lambda **extra: keras.optimizers.Adam(epsilon=EPS, amsgrad=True, **extra),
    "adamw": lambda **extra: keras.optimizers.AdamW(epsilon=EPS, weight_decay=0.1, **extra),
    "rmsprop": lambda **extra: keras.optimizers.RMSprop(epsilon=EPS, momentum=0.5, centered=True, **extra),
    "adagrad": lambda **extra: keras.optimizers.Adagrad(epsilon=EPS, **extra),
    "adamax": lambda **extra: keras.optimizers.Adamax(epsilon=EPS, **extra),
    "nadam": lambda **extra: keras.optimizers.Nadam(epsilon=EPS, **extra),
    "adafactor": lambda **extra: keras.optimizers.Adafactor(epsilon_1=EPS, epsilon_2=EPS, **extra),
    "lamb": lambda **extra: keras.optimizers.Lamb(epsilon=EPS, **extra),
    "muon": lambda **extra: keras.optimizers.Muon(epsilon=EPS, **extra),
    "schedule free": lambda **extra: keras.optimizers.ScheduleFreeAdamW(epsilon=EPS, **extra),
}
MOVING = {
    "": {},
    "often": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "end": {"use_ema": True, "ema_momentum": 0.5},
}


# ---- the model ----


class DenseTable(keras.layers.Embedding):
    """An Embedding whose gradient has all rows."""

    def call(self, inputs: Any) -> Any:
        return keras.ops.matmul(keras.ops.one_hot(inputs, self.input_dim, dtype=self.compute_dtype), self.embeddings)


class Penalty(keras.regularizers.Regularizer):
    """As L2, which on TensorFlow has 32 bits where the loss has 64."""

    def __call__(self, weights: Any) -> Any:
        return keras.ops.cast(0.05 * keras.ops.sum(keras.ops.square(weights)), keras.config.floatx())

    def get_config(self) -> dict[str, Any]:
        return {}


class Stepping:
    """A training step of a script, in front of one of Keras' models."""

    stepper = ""  # Script.step
    second: Any = None  # the other optimizer of "two"

    def train_step(self, *given: Any) -> Any:
        if not self.stepper:
            return super().train_step(*given)
        return self.own_step(*given)

    def own_step(self, data: Any) -> Any:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        loss, gradients, predicted = gradients_of(self, x, y, weights)
        apply(self, gradients)
        for metric in self.metrics:
            metric.update_state(*([loss] if metric.name == "loss" else [y, predicted]))
        return {metric.name: metric.result() for metric in self.metrics}


class SteppingOnJAX(Stepping):
    def own_step(self, state: Any, data: Any) -> Any:
        held = self.trainable_variables, self.non_trainable_variables, self.optimizer.variables, self.metrics_variables
        with keras.StatelessScope(list(zip(sum(map(list, held), []), sum(map(list, state), []), strict=True))) as scope:
            logs = super().own_step(data)
        return logs, tuple([scope.get_current_value(each) for each in some] for some in held)


if ON_JAX:
    Stepping = SteppingOnJAX


class Functional(Stepping, keras.Model):
    pass


class Sequential(Stepping, keras.Sequential):
    pass


class Subclassed(Stepping, keras.Model):
    """A model of one's own, in which parts of a batch may go through hidden layers of their own."""

    def __init__(self, **settings: Any):
        super().__init__()
        self.settings = settings
        self.parts = layers_of(**settings)
        self.routes: tuple[tuple[int, ...], ...] = ()

    def call(self, x: Any) -> Any:
        routes = self.routes or (HIDDEN,)
        parts = [x] if len(routes) == 1 else keras.ops.split(x, len(routes), axis=0)
        return keras.ops.concatenate([self.through(route, part) for route, part in zip(routes, parts, strict=True)])

    def through(self, route: Sequence[int], x: Any) -> Any:
        head = next(place for place, layer in enumerate(self.parts) if layer.name == f"layer{HEAD}")
        for layer in self.parts[: head - len(HIDDEN)]:
            x = layer(x)
        for number in route:
            x = self.parts[head - len(HIDDEN) + HIDDEN.index(number)](x)
        return self.parts[head](x)

    def get_config(self) -> dict[str, Any]:
        return self.settings

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Subclassed:
        return cls(**config)


KINDS = {"functional": Functional, "sequential": Sequential, "subclassed": Subclassed}
OBJECTS = {kind.__name__: kind for kind in (*KINDS.values(), DenseTable, Penalty)}


def first_rows(ids: np.ndarray) -> np.ndarray:
    """Of a sharded table."""
    return np.sin(ids[:, None] * 1.7 + np.arange(WIDTH)).astype(np.float32)


def layers_of(table: str, seed: int, local_seed: int, regularizes: bool, width: int, sums: bool) -> list[Any]:
    """The layers; their first weights depend on the seeds alone.

    Args:
        table: "" for a first layer of numbers; "embedding"; "dense" for one of the same values with a dense gradient; "sharded",
            and "rows" for a dense one of its values.
        seed: of all but the local layer.
        local_seed: of that.
        regularizes: whether they add to the loss.
        width: of the hidden layers.
        sums: whether gradients of rows are added up over the ranks, and not averaged.
    """

    def first(number: int) -> Any:
        return keras.initializers.RandomNormal(
            stddev=0.5, seed=10 * (local_seed if number % 5 == LOCAL else seed) + number
        )

    def dense(number: int, width: int, activation: str | None) -> Any:
        """Each variable costs time: one bias is enough."""
        penalty = Penalty() if regularizes else None
        return keras.layers.Dense(
            width, activation, number == HEAD, kernel_initializer=first(number), bias_initializer=first(number + 5),
            kernel_regularizer=penalty, name=f"layer{number}",
        )  # fmt: skip

    hidden = [dense(number, width, "tanh") for number in HIDDEN]
    head = dense(HEAD, CLASSES, None)
    if not table:
        return [dense(FIRST, WIDTH, "tanh"), *hidden, head]
    if table == "sharded":
        reduction = hvd.Sum if sums else hvd.Average
        rows = hvd.layers.ShardedEmbedding(
            ROWS, WIDTH, hvd.layers.SGD(lr=RATE), initializer=first_rows, op=reduction, name=f"layer{FIRST}"
        )
    else:
        values = keras.initializers.Constant(first_rows(np.arange(ROWS))) if table == "rows" else first(FIRST)
        kind = keras.layers.Embedding if table == "embedding" else DenseTable
        rows = kind(ROWS, WIDTH, embeddings_initializer=values, name=f"layer{FIRST}")
    return [rows, keras.layers.GlobalAveragePooling1D(name="pooled"), *hidden, head]


def gradients_of(model: Any, x: Any, y: Any, weights: Any) -> tuple[Any, list[Any], Any]:
    """The loss, its gradients and the model's answer."""
    if ON_TENSORFLOW:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = model.compute_loss(x, y, predicted, weights)
            scaled = model.optimizer.scale_loss(loss)
        return loss, tape.gradient(scaled, model.trainable_variables), predicted
    if ON_JAX:
        return gradients_on_jax(model, x, y, weights)
    model.zero_grad()
    predicted = model(x, training=True)
    loss = model.compute_loss(x, y, predicted, weights)
    model.optimizer.scale_loss(loss).backward()
    return loss, [variable.value.grad for variable in model.trainable_variables], predicted


def gradients_on_jax(model: Any, x: Any, y: Any, weights: Any) -> tuple[Any, list[Any], Any]:
    outer = keras.src.backend.common.stateless_scope.get_stateless_scope()

    def loss_of(values: list[Any]) -> Any:
        with keras.StatelessScope() as scope:
            scope.state_mapping = dict(outer.state_mapping)
            for variable, value in zip(model.trainable_variables, values, strict=True):
                variable.assign(value)
            predicted = model(x, training=True)
            loss = model.compute_loss(x, y, predicted, weights)
            return model.optimizer.scale_loss(loss), (loss, predicted)

    values = [each.value for each in model.trainable_variables]
    gradients, (loss, predicted) = jax.grad(loss_of, has_aux=True)(values)
    return loss, gradients, predicted


def apply_one(optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
    """``apply``; on JAX a LossScaleOptimizer has no other than ``stateless_apply``."""
    if not ON_JAX or not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer.apply(gradients, variables)
        return
    held = list(variables), list(optimizer.variables)
    values = [[each.value for each in some] for some in held]
    for some, changed in zip(held, optimizer.stateless_apply(values[1], list(gradients), values[0]), strict=True):
        for variable, value in zip(some, changed, strict=True):
            variable.assign(value)


def apply(model: Any, gradients: list[Any]) -> None:
    """An update with them."""
    pairs = list(zip(gradients, model.trainable_variables, strict=True))
    if ON_TENSORFLOW or ON_JAX:
        return apply_pairs(model, pairs)
    import torch

    with torch.no_grad():
        return apply_pairs(model, pairs)


def apply_pairs(model: Any, pairs: list[tuple[Any, Any]]) -> None:
    if model.stepper == "two":
        part = [
            [pair for pair in pairs if ("layer0" in pair[1].path or "layer1" in pair[1].path) == own]
            for own in (True, False)
        ]
        for optimizer, own in zip((model.optimizer, model.second), part, strict=True):
            if own:
                optimizer.apply(*zip(*own, strict=True))
    elif model.stepper == "synchronized" and hasattr(model.optimizer, "synchronize"):
        with model.optimizer.skip_synchronize():
            apply_one(model.optimizer, *zip(*clipped(model.optimizer.synchronize(pairs)), strict=True))
    else:
        apply_one(model.optimizer, *zip(*(clipped(pairs) if model.stepper == "synchronized" else pairs), strict=True))


def clipped(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Each gradient within a norm."""

    def within(gradient: Any) -> Any:
        dense = keras.ops.convert_to_tensor(gradient)
        return dense * keras.ops.minimum(1.0, CLIP / (keras.ops.norm(dense) + 1e-6))

    return [(None if gradient is None else within(gradient), variable) for gradient, variable in pairs]


# ---- ranks that keep something to themselves ----


class Peers:
    """What threads that train beside each other exchange, in the plainest way.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int):
        self.count = count
        self._barrier = threading.Barrier(count, timeout=PATIENCE)
        self._given: list[Any] = [None] * count

    def exchange(self, rank: int, given: Any) -> list[Any]:
        """What all have given."""
        self._given[rank] = given
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def mean(self, rank: int, arrays: list[np.ndarray | None]) -> list[np.ndarray | None]:
        """Of each array; one that is None counts as zeros where another has it."""
        everyone = self.exchange(rank, arrays)
        found = [[each for each in column if each is not None] for column in zip(*everyone, strict=True)]
        return [sum(each) / self.count if each else None for each in found]

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """What a function returns in each thread."""
        results: list[Any] = [None] * self.count
        problems: list[Exception] = []

        def body(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except Exception as problem:
                problems.append(problem)
                self._barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        return results


class Averaging:
    """Has a plain optimizer do what the distributed one of a rank does, by the peers.

    Args:
        loop: whose optimizer it is.
        optimizer: that.
    """

    def __init__(self, loop: Loop, optimizer: Any):
        self.loop, self.plainly, self.steps = loop, optimizer.apply, 0
        optimizer.apply = self.locally if loop.script.method == "local" else self.partially
        optimizer.synchronize = self.synchronize

    def locally(self, gradients: Any, variables: Any) -> None:
        self.plainly(gradients, variables)
        self.steps += 1
        if self.steps == EVERY:
            self.synchronize()

    def synchronize(self) -> None:
        self.steps = 0
        weights = self.loop.model.weights
        for variable, mean in zip(weights, self.loop.mean([as_numpy(each) for each in weights]), strict=True):
            variable.assign(mean)

    def partially(self, gradients: Any, variables: Any) -> None:
        script, variables = self.loop.script, list(variables)
        arrays = [None if each is None else as_numpy(each) for each in gradients]
        means = self.loop.mean(arrays)
        factor = script.ranks if script.op == "sum" else 1
        own = [None if each is None else each / script.ranks for each in arrays]
        chosen = [
            mine if is_local(variable) or mean is None else mean * factor
            for mine, mean, variable in zip(own, means, variables, strict=True)
        ]
        self.plainly([None if each is None else keras.ops.convert_to_tensor(each) for each in chosen], variables)


class AveragedMetrics(keras.callbacks.Callback):
    """Averages the metrics of an epoch over the peers."""

    def __init__(self, loop: Loop):
        super().__init__()
        self.loop = loop

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        means = self.loop.mean([np.float64(each) for each in logs.values()])
        logs.update(zip(list(logs), [float(each) for each in means], strict=True))


def is_local(variable: Any) -> bool:
    return f"layer{LOCAL}" in variable.path


# ---- the loop ----


class Loop:
    """What the user's script does.

    Args:
        script: what that is.
        ranks: whose batches this process has.
        wraps: whether the optimizer is distributed.
        folder: for files.
        peers: where the optimizer is not distributed, and others train beside this one.
    """

    def __init__(self, script: Script, ranks: Sequence[int], wraps: bool, folder: Path, peers: Peers | None = None):
        self.script, self.ranks, self.wraps, self.folder, self.peers = script, ranks, wraps, folder, peers
        self.rank = ranks[0]
        self.members = rt.add_process_set(list(script.members)) if wraps and script.members else rt.global_process_set
        self.model = self.new_model()
        self.history: list[float] = []

    def run(self) -> list[np.ndarray]:
        """After each turn the weights, what the optimizer steps with, and the metrics of fit."""
        seen = []
        for number, turn in enumerate(self.script.turns):
            self.history = []
            self.begin(number, turn)
            getattr(self, turn.does)(number, turn)
            if self.script.method == "local":
                self.model.optimizer.synchronize()
            seen.append(self.state(turn))
        return seen

    def state(self, turn: Turn) -> np.ndarray:
        optimizer = self.model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        numbers = [float(as_numpy(each)) for each in (inner.learning_rate, inner.iterations)]
        if inner is not optimizer:
            numbers.append(float(as_numpy(optimizer.dynamic_scale)))
        history = np.array(self.history, np.float64)
        if not turn.averages and history.size:
            history = self.mean([history])[0]
        sharded = self.wraps and self.script.table == "sharded"  # an anchor is in the place of its rows
        weights = [
            (self.rows() if sharded and f"layer{FIRST}" in each.path else as_numpy(each)).ravel()
            for each in sorted(self.model.weights, key=is_local)
        ]
        seen = np.concatenate([np.array(numbers), history, *weights])
        return np.nan_to_num(seen, nan=-1.0, posinf=-1.0, neginf=-1.0)

    def rows(self) -> np.ndarray:
        """Those of all ranks."""
        table = self.model.get_layer(f"layer{FIRST}").table
        rows = np.empty((ROWS, WIDTH), np.float32)
        for part, ids in rt.allgather_object((table.rows(), table.dealing.ids_of(table.rank))):
            rows[ids] = part
        return rows

    def mean(self, arrays: list[Any]) -> list[Any]:
        """Of each array over those that train beside this process."""
        if self.wraps:
            return (
                [rt.allreduce(each, process_set=self.members) for each in arrays] if self.members.included() else arrays
            )
        return arrays if self.peers is None else self.peers.mean(self.rank, arrays)

    def makes(self, number: int, mistake: str) -> bool:
        """Whether this rank makes a mistake in a turn."""
        last = number == len(self.script.turns) - 1
        return self.wraps and self.rank == 1 and last and self.script.mistake == mistake

    # ---- what a turn begins with ----

    def begin(self, number: int, turn: Turn) -> None:
        if turn.begins in ("reload", "resume"):
            path = self.save(number)
            if turn.begins == "reload":
                self.load(path)
            else:
                self.resume(path, turn)
        self.freeze(replace(turn, frozen=(1,)) if self.makes(number, "frozen") else turn)
        if number == 0 or turn.begins in ("compile", "fresh"):
            self.compile(new=number == 0 or turn.begins == "fresh", late=self.makes(number, "delay"))
        self.model.routes = tuple(turn.routes[rank] for rank in self.ranks) if turn.routes else ()
        if turn.broadcasts:
            self.broadcast(turn)
        if turn.rate == "assigned":
            self.model.optimizer.learning_rate = RATE / (2 + number)
        if self.makes(number, "rate"):
            self.model.optimizer.learning_rate = 2 * RATE
        if self.makes(number, "setting"):
            getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer).ema_momentum = 0.75
        if self.makes(number, "weights"):
            self.model.layers[-1].bias.assign_add(np.full(CLASSES, 0.01))

    def broadcast(self, turn: Turn) -> None:
        """Gives what BroadcastGlobalVariablesCallback does, where that is not there."""
        if self.wraps and turn.does != "fit":
            self.build()
            if self.members.included():
                hvd.broadcast_variables(self.shared(), root_rank=self.root, process_set=self.members)
        elif self.peers is not None and self.script.method == "local":
            self.take_from_first()

    def shared(self) -> list[Any]:
        """What is the same on all ranks: with local layers neither these nor what the optimizer keeps for them, whatever its name."""
        if self.script.method != "partial":
            return self.everything()
        own = list(self.local_layer.variables)
        kept = {id(each) for each in (*own, *slots_of(self.model.optimizer, own))}
        return [each for each in self.everything() if id(each) not in kept]

    def take_from_first(self) -> None:
        self.build()
        first = self.peers.exchange(self.rank, [as_numpy(each) for each in self.everything()])[0]
        for variable, value in zip(self.everything(), first, strict=True):
            variable.assign(value)

    def everything(self) -> list[Any]:
        return [*self.model.weights, *self.model.optimizer.variables]

    @property
    def root(self) -> int:
        return self.script.members[0] if self.script.members else 0

    def freeze(self, turn: Turn) -> None:
        for layer in self.model.layers:
            if layer.name.startswith("layer"):
                layer.trainable = int(layer.name[-1]) not in turn.frozen

    def new_model(self) -> Any:
        script = self.script
        if script.scales == "mixed":
            keras.config.set_dtype_policy("mixed_float16")
        # A rank starts from values of its own, so that a missing broadcast shows.
        kinds = ("sharded", "rows") if script.table == "sharded" else ("embedding", "dense")
        table = script.table and kinds[not self.wraps]
        settings = {
            "table": table,
            "seed": 0 if self.peers else self.rank,
            "local_seed": self.rank,
            "regularizes": script.regularizes,
            "width": WIDTH + self.makes(0, "model"),
            "sums": script.op == "sum",
        }
        into = keras.Input((IDS,), dtype="int32") if table else keras.Input((WIDTH,))
        if script.model == "subclassed":
            model: Any = Subclassed(**settings)
            model(np.zeros((1, IDS), "int32") if table else np.zeros((1, WIDTH)))
        elif script.model == "sequential":
            model = Sequential([into, *layers_of(**settings)])
        else:
            out = into
            for layer in layers_of(**settings):
                out = layer(out)
            model = Functional(into, out)
        model.stepper = self.stepper
        return model

    @property
    def stepper(self) -> str:
        """Of one process on JAX what Keras' step, which is given no variables for it, cannot do."""
        plain = not self.wraps and ON_JAX and self.script.method != "exact"
        return self.script.step or ("own" if plain else "")

    def compile(self, new: bool, late: bool = False) -> None:
        optimizer = self.new_optimizer(late) if new else self.compiled_with
        if new and self.script.step == "two":
            self.model.second = self.distributed(self.plain_optimizer())
        self.compiled_with = optimizer
        script = self.script
        self.model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            loss_weights=[0.1] if script.scales == "mixed" else None,
            metrics=["accuracy"],
            run_eagerly=not self.wraps or script.runs == "eager",
            steps_per_execution=2 if self.wraps and script.runs == "executions" and (ON_TENSORFLOW or ON_JAX) else 1,
        )
        self.adapt(self.model)

    def plain_optimizer(self) -> Any:
        script = self.script
        rate = keras.optimizers.schedules.ExponentialDecay(RATE, 2, 0.5) if script.schedules else RATE
        extra: dict[str, Any] = {"learning_rate": rate, **MOVING[script.moving]}
        if script.clips:
            extra[script.clips] = CLIP
        if script.keras_passes > 1:
            extra["gradient_accumulation_steps"] = script.keras_passes
        return OPTIMIZERS[script.optimizer](**extra)

    def new_optimizer(self, late: bool = False) -> Any:
        def scaled(optimizer: Any) -> Any:
            return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0, dynamic_growth_steps=3)

        optimizer = self.plain_optimizer()
        if late:
            return hvd.DistributedOptimizer(optimizer, **{**self.settings(), "groups": None, "mode": hvd.OneStepLate()})
        if self.script.scales == "within" or (self.script.scales == "around" and not self.wraps):
            return self.distributed(scaled(optimizer))
        optimizer = self.distributed(optimizer)
        return scaled(optimizer) if self.script.scales == "around" else optimizer

    def settings(self) -> dict[str, Any]:
        script = self.script
        layers = [each.trainable_variables for each in self.model.layers if each.trainable_variables]
        settings = {
            "op": hvd.Average if script.op == "average" else hvd.Sum,
            "backward_passes_per_step": script.passes_per_step,
            "average_aggregated_gradients": script.averages_passes,
            "groups": layers if script.groups == -1 else script.groups or None,
            "gradient_predivide_factor": script.predivide,
            "compression": getattr(hvd.Compression, script.compression),
            "sparse_as_dense": script.table == "dense",
            "process_set": self.members,
        }
        ways = {"late": {"late": True}, "local": {"every": EVERY}}
        return in_mode(settings | ways.get(script.method, {}))

    def distributed(self, optimizer: Any) -> Any:
        if not self.wraps:
            return optimizer
        if self.script.method == "partial":
            return hvd.PartialDistributedOptimizer(optimizer, local_layers=self.local_layer, **self.settings())
        return hvd.DistributedOptimizer(optimizer, **self.settings())

    @property
    def local_layer(self) -> Any:
        return next(layer for layer in self.model.layers if layer.name == f"layer{LOCAL}")

    def adapt(self, model: Any) -> None:
        """In one process: has the optimizer make of the loss, and of gradients, what the ranks' optimizers make of them."""
        optimizer = model.optimizer
        if self.wraps or hasattr(optimizer, "adapted"):
            return
        optimizer.adapted = True
        scale, factor = optimizer.scale_loss, self.factor
        optimizer.scale_loss = lambda loss: scale(loss) * factor
        if self.peers is not None:
            Averaging(self, optimizer)
        if self.script.method == "late":
            at_once, waiting = optimizer.apply, []

            def later(gradients: Any, variables: Any) -> None:
                gradients = [self.without_rows(*pair) for pair in zip(gradients, variables, strict=True)]
                waiting.append((gradients, list(variables)))
                if len(waiting) > 1:
                    at_once(*waiting.pop(0))

            def flush() -> None:
                while waiting:
                    at_once(*waiting.pop(0))

            def finalize(variables: Any) -> None:
                if self.script.moving:  # or the averages would not have the last gradients, which were applied to them
                    flush()
                plainly(variables)

            plainly = optimizer.finalize_variable_values
            optimizer.apply, optimizer.flush, optimizer.finalize_variable_values = later, flush, finalize

    def without_rows(self, gradient: Any, variable: Any) -> Any:
        """A gradient that is late; zeros for rows of a sharded table, which are changed at once (docs/embeddings.md)."""
        if self.script.table != "sharded" or f"layer{FIRST}" not in variable.path:
            return gradient
        variable.assign(variable - RATE * gradient)
        return keras.ops.zeros_like(gradient)

    @property
    def factor(self) -> float:
        """On the loss of one process: what the ranks' optimizers make of theirs."""
        script = self.script
        passes = 1 if script.averages_passes else script.passes_per_step
        return passes * (len(self.ranks) if script.op == "sum" else 1)

    def build(self) -> None:
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)

    def save(self, number: int) -> Path:
        path = self.folder / f"{number}.keras"
        if self.rank == 0:
            self.model.save(path)
        if self.wraps:
            rt.barrier()
        elif self.peers is not None:
            self.peers.exchange(self.rank, None)
        return path

    def load(self, path: Path) -> None:
        if self.wraps:
            self.model = hvd.load_model(path, custom_objects=OBJECTS, **self.settings())
        else:
            self.model = keras.models.load_model(path, custom_objects=OBJECTS)
        self.model.stepper = self.stepper
        self.compiled_with = self.model.optimizer
        self.adapt(self.model)

    def resume(self, path: Path, turn: Turn) -> None:
        """Rank 0 loads; the others make a model anew, which gets all from rank 0."""
        if self.rank == 0:
            self.load(path)
            return
        self.model = self.new_model()
        self.freeze(turn)
        self.compile(new=True)

    # ---- what it does ----

    def fit(self, number: int, turn: Turn) -> None:
        x, y, weights = self.data(number, turn, turn.steps + self.makes(number, "steps"))
        validation = self.data(number + 50, turn, 1)[:2] if turn.validates else None
        history = self.model.fit(
            x,
            y,
            batch_size=self.batch_size,
            epochs=turn.first + turn.epochs + self.makes(number, "epochs"),
            initial_epoch=turn.first + self.makes(number, "first"),
            shuffle=False,
            verbose=0,
            callbacks=self.callbacks(number, turn),
            validation_data=validation,
            validation_batch_size=self.batch_size,
            sample_weight=weights,
            class_weight=CLASS_WEIGHTS if turn.weights == "class" else None,
        ).history
        self.history = [value for name in ("loss", "accuracy", "val_loss") for value in history.get(name, [])]

    def batches(self, number: int, turn: Turn) -> None:
        for x, y, weights in self.each_batch(number, turn):
            self.model.train_on_batch(x, y, weights, CLASS_WEIGHTS if turn.weights == "class" else None)

    def loop(self, number: int, turn: Turn) -> None:
        def step(x: Any, y: Any, weights: Any) -> None:
            apply(self.model, gradients_of(self.model, x, y, weights)[1])

        self.build()
        if ON_TENSORFLOW and self.wraps and self.script.runs != "eager":
            import tensorflow as tf

            step = tf.function(step)
        if ON_JAX:
            step = self.on_values(step)
        for batch in self.each_batch(number, turn):
            step(*(None if each is None else keras.ops.convert_to_tensor(each) for each in batch))

    def on_values(self, step: Callable[..., None]) -> Callable[..., None]:
        """A step on JAX: values go in and come out."""
        held = [*self.model.variables, *self.model.optimizer.variables]

        def on_values(values: list[Any], *batch: Any) -> list[Any]:
            with keras.StatelessScope(list(zip(held, values, strict=True))) as scope:
                step(*batch)
            return [scope.get_current_value(each) for each in held]

        run = jax.jit(on_values) if self.wraps and self.script.runs != "eager" else on_values

        def stepping(*batch: Any) -> None:
            for variable, value in zip(held, run([each.value for each in held], *batch), strict=True):
                variable.assign(value)

        return stepping

    def callbacks(self, number: int, turn: Turn) -> list[Any]:
        made: list[Any] = []
        if self.wraps and turn.broadcasts:
            own = self.local_layer.variables if self.script.method == "partial" else None
            made.append(hvd.callbacks.BroadcastGlobalVariablesCallback(self.root, local_variables=own))
        elif turn.broadcasts and self.script.method == "late":
            flush = self.model.optimizer.flush
            made.append(keras.callbacks.LambdaCallback(on_train_end=lambda logs: flush()))
        elif turn.broadcasts and self.script.method == "local":
            average = self.model.optimizer.synchronize
            made.append(
                keras.callbacks.LambdaCallback(
                    on_epoch_end=lambda epoch, logs: average(),
                    on_test_begin=lambda logs: average(),
                    on_train_end=lambda logs: average(),
                )
            )
        if self.makes(number, "early"):
            made.append(keras.callbacks.ReduceLROnPlateau("loss"))
        if turn.averages and self.wraps:
            made.append(hvd.callbacks.MetricAverageCallback(process_set=self.members))
        elif turn.averages and self.peers is not None:
            made.append(AveragedMetrics(self))
        if self.makes(number, "stop"):
            made.append(
                keras.callbacks.LambdaCallback(
                    on_epoch_end=lambda epoch, logs: setattr(self.model, "stop_training", True)
                )
            )
        if turn.stops:
            made.append(keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True))
        if turn.rate == "scheduler":
            made.append(keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7 + 0.01 * epoch))
        if turn.rate == "plateau":
            made.append(keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, mode="max", min_delta=0.0))
        if turn.rate in ("multiplier", "warmup"):
            made.append(self.rate_callback(turn))
        return made

    def rate_callback(self, turn: Turn) -> Any:
        if turn.rate == "multiplier":
            if self.wraps:
                return hvd.callbacks.LearningRateScheduleCallback(RATE, lambda epoch: 0.5**epoch, start_epoch=1)
            return Rate(lambda epoch, step: RATE * 0.5**epoch if epoch >= 1 else None)
        if self.wraps:
            return hvd.callbacks.LearningRateWarmupCallback(RATE, warmup_epochs=2)
        size = self.script.ranks

        def warmed(epoch: int, step: int) -> float | None:
            return RATE * ((epoch + (step + 1) / turn.steps) * (size - 1) / 2 + 1) / size if epoch < 2 else None

        return Rate(warmed)

    # ---- data ----

    @property
    def batch_size(self) -> int:
        return SAMPLES if self.wraps else SAMPLES * len(self.ranks) * self.script.passes_per_step

    def each_batch(self, number: int, turn: Turn) -> Iterator[tuple[Any, Any, Any]]:
        x, y, weights = self.data(number, turn, turn.steps)
        for start in range(0, len(x), self.batch_size):
            rows = slice(start, start + self.batch_size)
            yield x[rows], y[rows], None if weights is None else weights[rows]

    def data(self, number: int, turn: Turn, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Of each step the rows of the ranks, one after the other; of each rank those of its passes."""
        of_ranks = [self.data_of(rank, number, turn, steps) for rank in self.ranks]
        x, y, weights = (np.stack(each, axis=1).reshape(-1, *each[0].shape[2:]) for each in zip(*of_ranks, strict=True))
        return x, y, weights if turn.weights == "sample" or turn.overflow >= 0 else None

    def data_of(self, rank: int, number: int, turn: Turn, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        drawn = np.random.default_rng(1000 * number + rank)
        rows = (steps, self.script.passes_per_step * SAMPLES)
        x = drawn.integers(ROWS, size=(*rows, IDS)) if self.script.table else drawn.uniform(-1, 1, size=(*rows, WIDTH))
        y = drawn.integers(CLASSES, size=rows)
        weights = drawn.uniform(0.5, 1.5, size=rows) if turn.weights == "sample" else np.ones(rows)
        if turn.overflow == rank:
            weights[0, 0] = np.inf
        return x, y, weights


class Rate(keras.callbacks.Callback):
    """Sets the learning rate before each batch, and with it the velocities of optimizers that have the rate in them.

    Args:
        rate: of an epoch and a step; None leaves it as it is.
    """

    def __init__(self, rate: Callable[[int, int], float | None]):
        super().__init__()
        self.rate, self.epoch = rate, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        new = self.rate(self.epoch, batch)
        if new is None:
            return
        getattr(self.model, "jax_state_sync", lambda: None)()
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        old = float(as_numpy(optimizer.learning_rate))
        optimizer.learning_rate = new
        has_rate = isinstance(optimizer, (keras.optimizers.SGD, keras.optimizers.RMSprop)) and optimizer.momentum
        if has_rate and optimizer.built:
            for velocity in getattr(optimizer, "momentums", None) or optimizer._momentums:
                velocity.assign(velocity * (new / old))


def as_numpy(value: Any) -> np.ndarray:
    return keras.ops.convert_to_numpy(value)


@contextmanager
def exact_numbers() -> Iterator[None]:
    """Keras computes with 64 bits, and warns of no missing gradient.

    On PyTorch it multiplies matrices, and divides a loss by its samples, with 32 bits whatever it is told. Muon makes some hundred
    times as much of that where a gradient has not the full rank: its iteration has the slope 3.4445 ** 5 at 0.
    """
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        with warnings.catch_warnings(), MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore")
            patch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, "float64", "float64")
            yield
    finally:
        keras.config.set_floatx(before)


def verdict(script: Script) -> str:
    """What is wrong with a script's weights on ranks, or with what they are told; "" if nothing is."""
    with exact_numbers(), tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, name) for name in ("one", "ranks")]
        for place in places:
            place.mkdir()

        def on_rank(rank: int) -> list[np.ndarray]:
            return Loop(script, [rank], True, places[1]).run()

        if script.mistake:
            return what_is_told(script, on_rank)
        try:
            expected = in_one_process(script, places[0])
        except Exception as problem:
            return f"one process raises {type(problem).__name__}: {problem}"
        return difference(
            lambda: on_ranks(script.ranks, script.layout, STALL_SECONDS, on_rank),
            expected,
            ROUNDED if is_rounded(script) else OF_ROWS if script.table == "sharded" else TOLERANCE,
            -WIDTH * WIDTH if script.method == "partial" else None,
            [group[0] for rank in range(script.ranks) for group in groups_of(script) if rank in group],
        )


def in_one_process(script: Script, folder: Path) -> list[list[np.ndarray]]:
    """Of each rank what it should see after each turn."""
    if script.method in ("local", "partial"):
        peers = Peers(script.ranks)
        return peers.run(lambda rank: Loop(script, [rank], False, folder, peers).run())
    seen: dict[int, list[np.ndarray]] = {}
    for group in groups_of(script):
        # In a thread of its own, since Keras counts the names of layers by thread.
        (found,) = Peers(1).run(lambda _, group=group: Loop(script, group, False, folder).run())
        seen |= dict.fromkeys(group, found)
    return [seen[rank] for rank in range(script.ranks)]


def what_is_told(script: Script, on_rank: Callable[[int], Any]) -> str:
    """What is wrong with what ranks are told of a mistake of one of them."""
    told: dict[int, str] = {}

    def run(rank: int) -> None:
        try:
            on_rank(rank)
        except Exception as problem:
            told[rank] = f"{type(problem).__name__}: {problem}"

    try:
        on_ranks(script.ranks, script.layout, STALL_SECONDS, run)
    except Exception as problem:
        return f"no end: {type(problem).__name__}: {problem}"
    silent = [rank for rank in range(script.ranks) if rank not in told]
    unclear = [text for text in told.values() if not re.search(MISTAKES[script.mistake], text, re.DOTALL)]
    return f"not told: ranks {silent}" if silent else f"unclear: {unclear[0]}" if unclear else ""


FUZZER = Fuzzer(LANGUAGE, verdict)
