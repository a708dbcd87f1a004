"""What the TensorFlow benchmark compares: each adds up a list of gradients over the ranks, within a graph.

``open_systems`` makes them, in the order that TensorFlow needs: the strategy first, as it must be before anything runs.
"""

import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import tensorflow as tf

import ringtrain.tensorflow as hvd
from ringtrain.bench import ranks

Gradients = list[tf.Tensor]
TUNED_PACK_BYTES = 8 << 20  # the strategy's best of 1 to 64 MB on two cores


class System(Protocol):
    """What the benchmark needs from a system."""

    name: str
    sums: bool  # False for the floor

    def add_up(self, gradients: Gradients) -> Gradients:
        """Builds the sums into the graph."""

    def compile(self, step: Callable[[], tf.Tensor]) -> Callable[[], tf.Tensor]:
        """The step as a function of one graph."""


def gradients_of(system: System, tape: tf.GradientTape, loss: tf.Tensor, weights: Sequence[tf.Variable]) -> Gradients:
    """The sums of the gradients of all ranks, by a tape of the system's own if it has one."""
    own = getattr(system, "gradients_of", None)
    return system.add_up(tape.gradient(loss, list(weights))) if own is None else own(tape, loss, weights)


class Identity:
    """The floor: the same graph, which adds up nothing."""

    name = "identity"
    sums = False

    def add_up(self, gradients: Gradients) -> Gradients:
        return [tf.identity(gradient) for gradient in gradients]

    def compile(self, step: Callable[[], tf.Tensor]) -> Callable[[], tf.Tensor]:
        return tf.function(step, autograph=False)


class Ringtrain(Identity):
    """Ours: an operation for each gradient, as a tape makes them in a graph."""

    name = "ringtrain"
    sums = True

    def add_up(self, gradients: Gradients) -> Gradients:
        return [hvd.allreduce(each, op=hvd.Sum, name=f"bench.{index}") for index, each in enumerate(gradients)]


class RingtrainGrouped(Identity):
    """Ours, with all gradients in one operation."""

    name = "ringtrain-grouped"
    sums = True

    def add_up(self, gradients: Gradients) -> Gradients:
        return hvd.grouped_allreduce(gradients, op=hvd.Sum, name="bench.group")


class RingtrainTape(Ringtrain):
    """Ours: a distributed tape, which compares the variables of all ranks unless they may differ.

    Args:
        replicas: whether they may; ``"equal"`` or ``"differ"``.
    """

    def __init__(self, replicas: str = "equal"):
        self.name = "ringtrain-tape" if replicas == "equal" else "ringtrain-tape-uncompared"
        self._replicas = replicas

    def gradients_of(self, tape: tf.GradientTape, loss: tf.Tensor, weights: Sequence[tf.Variable]) -> Gradients:
        distributed = hvd.DistributedGradientTape(tape, op=hvd.Sum, mode=hvd.Synchronous(replicas=self._replicas))
        return distributed.gradient(loss, list(weights))


class Strategy:
    """MultiWorkerMirroredStrategy's own allreduce, by its ring over gRPC."""

    sums = True

    def __init__(self, strategy: tf.distribute.Strategy, pack_bytes: int):
        self.name = "mwms-tuned" if pack_bytes else "mwms"
        self._strategy = strategy
        self._options = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=pack_bytes, implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )

    def add_up(self, gradients: Gradients) -> Gradients:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, gradients, options=self._options)

    def compile(self, step: Callable[[], tf.Tensor]) -> Callable[[], tf.Tensor]:
        return tf.function(lambda: self._strategy.run(step), autograph=False)


def open_systems(peers: Sequence[str]) -> list[System]:
    """The systems of this rank, the floor first; gives each rank's TensorFlow its part of the machine's cores."""
    tf.config.threading.set_intra_op_parallelism_threads(max(len(os.sched_getaffinity(0)) // ranks.size(), 1))
    strategies: list[System] = []
    if "mwms" in peers:
        strategy = _open_strategy()
        strategies = [Strategy(strategy, 0), Strategy(strategy, TUNED_PACK_BYTES)]
    hvd.init()
    return [Identity(), Ringtrain(), RingtrainGrouped(), *strategies]


def _open_strategy() -> tf.distribute.Strategy:
    """Workers find each other by TF_CONFIG, on ports of this machine that are free."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        workers = ranks.gathered(f"127.0.0.1:{found.getsockname()[1]}")
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": ranks.rank()}}
    )
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    del os.environ["TF_CONFIG"]
    return strategy
