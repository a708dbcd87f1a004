"""What the JAX benchmark compares: each adds up a list of gradients over the ranks, within a compiled program."""

import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ringtrain.jax as hvd
from ringtrain.bench import ranks

Gradients = list[jax.Array]


class System(Protocol):
    """What the benchmark needs from a system."""

    name: str
    sums: bool  # False for the floor

    def place(self, values: np.ndarray) -> jax.Array:
        """This rank's values as an array that the program takes."""

    def add_up(self, gradients: Gradients) -> Gradients:
        """Traces the sums into the program."""

    def compile(self, step: Callable[[Gradients], Gradients]) -> Callable[[Gradients], Gradients]:
        """The step as a compiled program."""

    def taken(self, result: jax.Array) -> np.ndarray:
        """The values of a result on this rank, flat."""

    def close(self) -> None:
        """Gives back what it holds."""


class Identity:
    """The floor: the same program, which adds up nothing."""

    name = "identity"
    sums = False

    def place(self, values: np.ndarray) -> jax.Array:
        return jax.device_put(values, jax.local_devices()[0])

    def add_up(self, gradients: Gradients) -> Gradients:
        return gradients

    def compile(self, step: Callable[[Gradients], Gradients]) -> Callable[[Gradients], Gradients]:
        return jax.jit(step)

    def taken(self, result: jax.Array) -> np.ndarray:
        return np.asarray(result)

    def close(self) -> None:
        pass


class Ringtrain(Identity):
    """Ours: an operation for each gradient."""

    name = "ringtrain"
    sums = True

    def __init__(self) -> None:
        hvd.init()

    def add_up(self, gradients: Gradients) -> Gradients:
        return hvd.allreduce_gradients(gradients, op=hvd.Sum)

    def close(self) -> None:
        hvd.shutdown()


class Psum:
    """JAX's own: one ``psum`` of all gradients in a ``shard_map`` over the processes, which gloo carries between CPUs.

    Each process has one device and a row of every array.
    """

    name = "psum"
    sums = True

    def __init__(self) -> None:
        self._rows = NamedSharding(Mesh(np.array(jax.devices()), ("ranks",)), PartitionSpec("ranks"))

    def place(self, values: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(self._rows, values[np.newaxis], (ranks.size(), values.size))

    def add_up(self, gradients: Gradients) -> Gradients:
        return jax.lax.psum(gradients, "ranks")

    def compile(self, step: Callable[[Gradients], Gradients]) -> Callable[[Gradients], Gradients]:
        specs = PartitionSpec("ranks"), PartitionSpec()
        return jax.jit(jax.shard_map(step, mesh=self._rows.mesh, in_specs=specs[:1], out_specs=specs[1]))

    def taken(self, result: jax.Array) -> np.ndarray:
        return np.asarray(result.addressable_shards[0].data).ravel()

    def close(self) -> None:
        jax.distributed.shutdown()


def open_systems(peers: Sequence[str]) -> list[Any]:
    """The systems of this rank, the floor first. JAX learns of other processes before it has made any array."""
    if "psum" in peers:
        _meet()
    return [Identity(), Ringtrain(), *([Psum()] if "psum" in peers else [])]


def _meet() -> None:
    """Has JAX's processes find each other, on a port of this machine that is free."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = ranks.gathered(f"127.0.0.1:{found.getsockname()[1]}")[0]
    jax.distributed.initialize(address, ranks.size(), ranks.rank(), cluster_detection_method="deactivate")
