"""``python -m benchmarks tensorflow``: gradients within a graph and training steps, beside MultiWorkerMirroredStrategy.

The gradients are temporaries of the graph, as in training. What adding them up costs is the difference to the same
graph that adds up nothing; the same tensors through ringtrain.torch, in place and outside of any graph, stand beside
it. The training step is that of a perceptron, with gradient descent; its figure is the whole step.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.tensorflow_systems import Identity, Ringtrain, RingtrainTape, System, gradients_of, open_systems
from ringtrain.bench import machine, ranks, report
from ringtrain.bench.turns import time_in_turn, time_of

BATCH = 32
LEARNING_RATE = 0.01


def run(
    floats: int, tensors: int, layers: Sequence[int], peers: Sequence[str], repetitions: int | None, json: str | None
) -> bool:
    """Runs the benchmark on this rank; returns whether every sum was right and every system's replicas stayed equal."""
    systems = open_systems(peers)
    results = _measure_gradients(systems, floats, tensors, "torch" in peers, repetitions or 15)
    results += _measure_steps([*systems, RingtrainTape(), RingtrainTape("differ")], layers, repetitions or 15)
    _print(results, floats, tensors)
    report.write_json(json, results, tensorflow=tf.__version__)
    return all(result["verified"] for result in results)


# ---- gradients alone ----


def _measure_gradients(
    systems: Sequence[System], floats: int, tensors: int, with_torch: bool, repetitions: int
) -> list[dict[str, Any]]:
    weights = [tf.Variable(tf.fill([floats // tensors], float(index % 7 + 1))) for index in range(tensors)]
    scale = tf.Variable(float(ranks.rank() + 1))
    verified: dict[str, bool] = {}
    turns: dict[str, Callable[[], list[float]]] = {}
    for system in systems:

        def gradients_of(system: System = system) -> list[tf.Tensor]:
            return system.add_up([weight * scale for weight in weights])

        sums = system.compile(gradients_of)()
        verified[system.name] = not system.sums or _are_sums(sums)
        turns[system.name] = _turn_of(system.compile(_sum_of_firsts(gradients_of)))
    if with_torch:
        turns["ringtrain.torch"], verified["ringtrain.torch"] = _torch_turn(floats, tensors), True
    seconds = time_in_turn(turns, repetitions)
    floors = {"ringtrain.torch": 0.0}  # outside of any graph
    in_graph = float(np.median(seconds[Identity.name]))
    return [
        report.result(
            name, "gradients", times, verified[name], bytes=4 * floats, tensors=tensors,
            seconds_beyond_identity=float(np.median(times)) - floors.get(name, in_graph),
        )
        for name, times in seconds.items()
    ]  # fmt: skip


def _turn_of(once: Callable[[], object]) -> Callable[[], list[float]]:
    return lambda: [time_of(once)]


def _sum_of_firsts(gradients_of: Callable[[], list[tf.Tensor]]) -> Callable[[], tf.Tensor]:
    return lambda: tf.add_n([each[0] for each in gradients_of()])


def _are_sums(results: Sequence[tf.Tensor]) -> bool:
    scales = ranks.size() * (ranks.size() + 1) / 2
    right = (np.all(result == scales * (index % 7 + 1)) for index, result in enumerate(results))
    return ranks.all_true(all(right))


def _torch_turn(floats: int, tensors: int) -> Callable[[], list[float]]:
    """Our own path for PyTorch, for as many tensors of the same size."""
    import torch

    import ringtrain.torch as hvd

    gradients = [torch.ones(floats // tensors) for _ in range(tensors)]

    def add_up() -> None:
        handles = [hvd.allreduce_async_(each, name=f"torch.{index}") for index, each in enumerate(gradients)]
        for handle in handles:
            hvd.synchronize(handle)

    return lambda: [time_of(add_up)]


# ---- training steps ----


def _measure_steps(systems: Sequence[System], layers: Sequence[int], repetitions: int) -> list[dict[str, Any]]:
    verified: dict[str, bool] = {}
    turns: dict[str, Callable[[], list[float]]] = {}
    for system in systems:
        weights = _perceptron(layers)
        once = system.compile(partial(_train, system, weights))
        once()
        verified[system.name] = not system.sums or _replicas_are_equal(weights)
        turns[system.name] = _turn_of(once)
    seconds = time_in_turn(turns, repetitions)
    parameters = sum(a * b + b for a, b in itertools.pairwise(layers))
    return [
        report.result(name, "training step", times, verified[name], parameters=parameters, batch=BATCH)
        for name, times in seconds.items()
    ]


def _perceptron(layers: Sequence[int]) -> list[tf.Variable]:
    """Weights and biases, the same on all ranks."""
    shapes = [shape for a, b in itertools.pairwise(layers) for shape in ((a, b), (b,))]
    return [
        tf.Variable(tf.random.stateless_normal(shape, [7, index], stddev=0.02)) for index, shape in enumerate(shapes)
    ]


def _train(system: System, weights: Sequence[tf.Variable]) -> tf.Tensor:
    """One step on this rank's batch; returns the loss."""
    x = tf.random.stateless_normal([BATCH, weights[0].shape[0]], [11, ranks.rank()])
    with tf.GradientTape() as tape:
        for matrix, bias in zip(weights[::2], weights[1::2], strict=True):
            x = tf.nn.relu(x @ matrix + bias)
        loss = tf.reduce_mean(tf.square(x - 1.0))
    for weight, gradient in zip(weights, gradients_of(system, tape, loss, weights), strict=True):
        weight.assign_sub(LEARNING_RATE / ranks.size() * gradient)
    return loss


def _replicas_are_equal(weights: Sequence[tf.Variable]) -> bool:
    mine = [float(np.abs(weight.numpy()).sum(dtype=np.float64)) for weight in weights]
    return all(other == mine for other in ranks.gathered(mine))


# ---- saying ----


def _print(results: Sequence[dict[str, Any]], floats: int, tensors: int) -> None:
    facts = machine.describe()
    report.say(f"TensorFlow {tf.__version__}, {ranks.size()} ranks on {facts['cores']} cores ({facts['processor']})")
    gradients = [each for each in results if each["op"] == "gradients"]
    report.say(f"\n{floats} floats in {tensors} tensors; beyond: what it adds to the graph that adds up nothing")
    ours = _of(gradients, Ringtrain.name, "seconds_beyond_identity")
    rows = [
        [
            each["system"],
            report.seconds_text(each["seconds_median"]),
            report.seconds_text(each["seconds_beyond_identity"]),
            f"{each['seconds_beyond_identity'] / ours:.2f}",
            report.verdict(each),
        ]
        for each in gradients
    ]
    report.print_table(["system", "median", "beyond", "x ours", "result"], rows)
    steps = [each for each in results if each["op"] == "training step"]
    report.say(f"\na training step of {steps[0]['parameters']} parameters, {BATCH} samples a rank")
    ours = _of(steps, Ringtrain.name, "seconds_median")
    rows = [
        [
            each["system"],
            report.seconds_text(each["seconds_median"]),
            f"{each['seconds_median'] / ours:.2f}",
            report.verdict(each),
        ]
        for each in steps
    ]
    report.print_table(["system", "median", "x ours", "result"], rows)


def _of(results: Sequence[dict[str, Any]], system: str, what: str) -> float:
    return next(each[what] for each in results if each["system"] == system)
