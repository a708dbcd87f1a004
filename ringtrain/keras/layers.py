"""Layers whose weights are dealt over the ranks.

Their rows have an optimizer of their own, which changes them in the step of the model's: ``ringtrain.keras.rows`` says how
they share in what that one does to all gradients.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import keras

from ringtrain._runtime.operations import Average
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain._training.needs import check_needs
from ringtrain.embedding.initial import Initializer
from ringtrain.embedding.row_rules import BY_NAME, SGD, Adagrad, RowOptimizer, RowWiseAdagrad, SparseAdam, checked
from ringtrain.embedding.table import SelfUpdatingTable
from ringtrain.errors import UnsupportedError
from ringtrain.keras.backends import backend
from ringtrain.keras.rows import check
from ringtrain.keras.types import Tensor

__all__ = ["SGD", "Adagrad", "RowWiseAdagrad", "ShardedEmbedding", "SparseAdam"]

_RULES = {kind.__name__: kind for kind in BY_NAME.values()}  # as files have them


@keras.saving.register_keras_serializable("ringtrain")
class ShardedEmbedding(keras.layers.Layer):
    """``keras.layers.Embedding`` for tables too large for a rank: the rows are dealt over the ranks of a process set.

    Example:
        >>> model = keras.Sequential([hvd.layers.ShardedEmbedding(10**8, 64, optimizer="adagrad"), keras.layers.Dense(1)])

    A call is collective, as is the gradient: all ranks call the same layers in the same order, each with ids of its own.
    The rows are changed where they live, by an optimizer of their own, in the step of the model's: with it their gradients
    are scaled, clipped and accumulated, and with it they skip a step. ``DistributedOptimizer`` trains the rest, with any
    batch size.

    Args:
        input_dim: rows of the whole table.
        output_dim: numbers in a row.
        optimizer: of the rows: ``"sgd"``, ``"adagrad"``, ``"rowwise_adagrad"``, ``"sparse_adam"``, or one of this module's
            classes, such as ``SGD(lr=0.1, momentum=0.9)``; rows that get no gradient stay as they are.
        seed: of the first values, functions of (seed, row).
        initializer: ``"uniform"``, ``"normal"``, ``"zeros"``, or a function of rows, int64 (n,), to values (n, dim).
        scale: of the first values: bound, or standard deviation.
        dealing: ``"modulo"``, row i at rank i % N, or ``"blocks"``.
        storage: ``"memory"``, or ``"file"`` in ``path``.
        path: folder for ``"file"``, on a disk with room for this rank's rows.
        resident_bytes: of the file, about how many may be in memory.
        op: ``Average`` or ``Sum`` of the ranks' gradients.
        process_set: the ranks that share the table.
        replicas: 2 has each row kept a second time in an elastic job, on another host, or by another rank if there is one
            host; elsewhere nothing could use it, and it is not.
        arguments: those of ``keras.layers.Layer``; ``name`` must be the same on all ranks.

    Raises:
        InvalidArgumentError: an argument that cannot be; an id that is no row, when called: the same text on all ranks.
        RowsLostError: in an elastic job, when called or trained: the ranks that kept some rows are gone; the same text on all
            ranks. In a graph of TensorFlow it is a ``tf.errors.UnknownError`` with that text.
        UnsupportedError: when a model is trained, an optimizer that scales the loss or clips by the norm of all gradients
            where these differ from rank to rank, or that does more to gradients than to delay them. In an elastic job a
            process set, and a call that is neither in ``fit`` with ``elastic.Elastic`` nor in the loop of an ``elastic.State``.
    """

    def __init__(
        self, input_dim: int, output_dim: int, optimizer: str | RowOptimizer = "adagrad", seed: int = 0,
        initializer: str | Initializer = "uniform", scale: float = 0.05, dealing: str = "modulo",
        storage: str = "memory", path: str | os.PathLike | None = None, resident_bytes: int = 1 << 30,
        op: int = Average, process_set: ProcessSet = global_process_set, replicas: int = 1, **arguments: object,
    ):  # fmt: skip
        super().__init__(**arguments)
        self.input_dim, self.output_dim = input_dim, output_dim
        self.supports_jit = False  # XLA has no kernel for operations between ranks
        self._given: dict[str, Any] = {
            "optimizer": optimizer, "seed": seed, "initializer": initializer, "scale": scale, "dealing": dealing,
            "storage": storage, "path": path, "resident_bytes": resident_bytes, "op": op, "process_set": process_set,
            "replicas": replicas,
        }  # fmt: skip
        self.table: SelfUpdatingTable | None = None

    def build(self, input_shape: tuple | None = None) -> None:
        """Makes this rank's rows; collective, but for an elastic job, where the first use does."""
        check_needs(backend.columns, {"ShardedEmbedding": True}, f"ShardedEmbedding '{self.name}'")
        self.table = SelfUpdatingTable(self.name, self.input_dim, self.output_dim, **self._given)
        # Gradients flow to variables alone: this one leads them to the table, and its optimizer to the table's step.
        self.anchor = self.add_weight(shape=(), initializer="zeros", name="anchor", dtype="float32", autocast=False)
        self.anchor.sharded_table = self.table

    def call(self, inputs: Tensor) -> Tensor:
        """Rows of ids, whole numbers of any shape: of shape (\\*ids, output_dim), in the dtype that the layer computes in."""
        return keras.ops.cast(backend.rows_of(self.table, inputs, self.anchor), self.compute_dtype)

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        return (*input_shape, self.output_dim)

    def compute_output_spec(self, inputs: keras.KerasTensor, *_: object, **__: object) -> keras.KerasTensor:
        return keras.KerasTensor((*inputs.shape, self.output_dim), self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """What makes the layer again, which Keras' files of models have; the rows are not in it.

        Raises:
            UnsupportedError: a process set, which files do not have.
        """
        given = dict(self._given)
        if given.pop("process_set") is not global_process_set:
            raise UnsupportedError(
                f"ShardedEmbedding '{self.name}': process_set must be that of all ranks where the model is saved, but is another one. "
                "Save its weights instead."
            )
        rule = checked(given["optimizer"])
        given["optimizer"] = {"class_name": type(rule).__name__, "config": dataclasses.asdict(rule)}
        given["path"] = None if given["path"] is None else os.fspath(given["path"])
        if not isinstance(given["initializer"], str):
            given["initializer"] = keras.saving.serialize_keras_object(given["initializer"])
        return {**super().get_config(), "input_dim": self.input_dim, "output_dim": self.output_dim, **given}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ShardedEmbedding":
        """The layer of a ``get_config``, with rows as at first: ``load_table`` gives it those that were saved."""
        given = dict(config)
        rule, initializer = given["optimizer"], given["initializer"]
        if isinstance(rule, dict):
            kind = _RULES.get(rule["class_name"]) or keras.saving.get_registered_object(rule["class_name"])
            given["optimizer"] = kind(**rule["config"])
        if isinstance(initializer, dict):
            given["initializer"] = keras.saving.deserialize_keras_object(initializer)
        return cls(**given)

    def save_table(self, folder: str | os.PathLike) -> None:
        """Writes the rows, and what their optimizer keeps, under the layer's name; no rank gathers them. Collective."""
        self._made().save(folder)

    def load_table(self, folder: str | os.PathLike, lost_only: bool = False) -> None:
        """Reads what any number of ranks has saved under the layer's name. Collective.

        In an elastic job it asks no other rank, and may stand before ``fit``: rows are read where they are next used, and a
        rank that joins takes over those of the others instead.

        Args:
            folder: with the files of all ranks that wrote.
            lost_only: in an elastic job, names the folder from which rows come that are lost later, with all ranks that
                kept them; nothing is read until then. It holds until another one is named.

        Raises:
            InvalidArgumentError: there is no whole table that fits; on all ranks, in an elastic job on that rank.
        """
        self._made().load(folder, lost_only)

    def _made(self) -> SelfUpdatingTable:
        if self.table is None:
            self.build()
            self.built = True
        assert self.table is not None
        return self.table


def _look_at_models(model_class: type[keras.Model]) -> None:
    """Has each model of a class asked before its step is built whether its optimizer can train the layers' rows."""
    original = model_class.make_train_function

    @functools.wraps(original)
    def make_train_function(self: keras.Model, force: bool = False) -> Callable:
        for layer in self._flatten_layers():
            if isinstance(layer, ShardedEmbedding):
                check(getattr(self, "optimizer", None), layer.name, layer._given["process_set"])
        return original(self, force)

    model_class.make_train_function = make_train_function


_look_at_models(keras.Model)


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
