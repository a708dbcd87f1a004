"""Layers whose weights are dealt over the ranks.

Their rows are changed as soon as their gradients have come, before the model's optimizer has seen any: what that one would
do to all gradients together cannot be done to theirs. ``refuse_settings`` says so where a model is trained, whatever its
optimizer, and where a distributed one is applied.
"""

import functools
import os
from collections.abc import Iterable
from typing import Any

import keras

from ringtrain import membership
from ringtrain.embedding.initial import Initializer
from ringtrain.embedding.optimizers import SGD, Adagrad, RowOptimizer, RowWiseAdagrad, SparseAdam
from ringtrain.embedding.table import SelfUpdatingTable
from ringtrain.errors import UnsupportedError
from ringtrain.keras.backends import backend
from ringtrain.operations import Average
from ringtrain.process_sets import ProcessSet, global_process_set

__all__ = ["SGD", "Adagrad", "RowWiseAdagrad", "ShardedEmbedding", "SparseAdam"]


class ShardedEmbedding(keras.layers.Layer):
    """``keras.layers.Embedding`` for tables too large for a rank: the rows are dealt over the ranks of a process set.

    A call is collective, as is the gradient: all ranks call the same layers in the same order, each with ids of its own.
    The rows are changed where they live as soon as their gradients have come, by an optimizer of their own; so a model's
    optimizer that scales the loss, clips or accumulates gradients is refused: it could not do so with these.
    ``DistributedOptimizer`` trains the rest, with any batch size.

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
        arguments: those of ``keras.layers.Layer``; ``name`` must be the same on all ranks.

    Raises:
        InvalidArgumentError: an argument that cannot be; an id that is no row, when called: the same text on all ranks.
        UnsupportedError: ``mixed_float16``, whose loss is scaled, or an elastic job; when a model is trained, an optimizer
            that scales the loss, clips or accumulates gradients.

    Example:
        >>> model = keras.Sequential([hvd.layers.ShardedEmbedding(10**8, 64, optimizer="adagrad"), keras.layers.Dense(1)])
    """

    def __init__(
        self, input_dim: int, output_dim: int, optimizer: str | RowOptimizer = "adagrad", seed: int = 0,
        initializer: str | Initializer = "uniform", scale: float = 0.05, dealing: str = "modulo",
        storage: str = "memory", path: str | os.PathLike | None = None, resident_bytes: int = 1 << 30,
        op: int = Average, process_set: ProcessSet = global_process_set, **arguments: Any,
    ):  # fmt: skip
        super().__init__(**arguments)
        if self.compute_dtype == "float16":
            raise UnsupportedError(
                "ShardedEmbedding: dtype must not be mixed_float16, whose gradients are scaled where its rows are changed, but "
                "is. Give the layer dtype='float32', and use mixed_bfloat16 for the rest."
            )
        if membership.current() is not None:
            raise UnsupportedError(
                "ShardedEmbedding: tables need a world that stays, but this job is elastic: a rank that is lost takes its rows "
                "with it. Start the job without --elastic, and go on from a checkpoint after a loss."
            )
        self.input_dim, self.output_dim = input_dim, output_dim
        self.supports_jit = False  # XLA has no kernel for operations between ranks
        self._given: dict[str, Any] = {
            "optimizer": optimizer, "seed": seed, "initializer": initializer, "scale": scale, "dealing": dealing,
            "storage": storage, "path": path, "resident_bytes": resident_bytes, "op": op, "process_set": process_set,
        }  # fmt: skip
        self.table: SelfUpdatingTable | None = None

    def build(self, input_shape: Any = None) -> None:
        """Makes this rank's rows; collective."""
        # Gradients flow to variables alone: this one leads them to the table, and gets zeros itself.
        self.anchor = self.add_weight(shape=(), initializer="zeros", name="anchor")
        self.anchor.sharded_embedding = self.name
        self.table = SelfUpdatingTable(self.name, self.input_dim, self.output_dim, **self._given)

    def call(self, inputs: Any) -> Any:
        """Rows of ids, whole numbers of any shape: float32 of shape (\\*ids, output_dim)."""
        return backend.rows_of(self.table, inputs, self.anchor)

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        return (*input_shape, self.output_dim)

    def compute_output_spec(self, inputs: Any, *_: Any, **__: Any) -> Any:
        return keras.KerasTensor((*inputs.shape, self.output_dim), "float32")

    def save_table(self, folder: str | os.PathLike) -> None:
        """Writes the rows, and what their optimizer keeps, under the layer's name; no rank gathers them. Collective."""
        self._made().save(folder)

    def load_table(self, folder: str | os.PathLike) -> None:
        """Reads what any number of ranks has saved under the layer's name. Collective."""
        self._made().load(folder)

    def _made(self) -> SelfUpdatingTable:
        if self.table is None:
            self.build()
            self.built = True
        assert self.table is not None
        return self.table


# ---- what a model's optimizer must not do ----


def refuse_settings(optimizer: Any, name: str) -> None:
    """Raises UnsupportedError if a model's optimizer treats gradients in a way that those of a layer's rows have escaped."""
    reason = _reason(optimizer) or _reason(getattr(optimizer, "inner_optimizer", None))
    if reason is not None:
        raise UnsupportedError(
            f"ShardedEmbedding '{name}': the model's optimizer must {reason}, since rows are changed before it sees their "
            "gradients, which would be treated in another way than the rest."
        )


def refuse_settings_for(optimizer: Any, variables: Iterable[Any]) -> None:
    """``refuse_settings`` for the layers whose anchors are among the variables that an optimizer trains."""
    for variable in variables:
        if (name := getattr(variable, "sharded_embedding", None)) is not None:
            refuse_settings(optimizer, name)


def _reason(optimizer: Any) -> str | None:
    if optimizer is None:
        return None
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or getattr(optimizer, "loss_scale_factor", None):
        return "not scale the loss (use mixed_bfloat16, or float32)"
    if any(getattr(optimizer, name, None) for name in ("clipnorm", "global_clipnorm", "clipvalue")):
        return "not clip gradients (leave clipnorm, global_clipnorm and clipvalue out)"
    reduction = getattr(optimizer, "_gradient_reduction", None)
    passes = 1 if reduction is None else reduction.settings.backward_passes_per_step
    if passes > 1 or (getattr(optimizer, "gradient_accumulation_steps", None) or 1) > 1:
        return "not accumulate gradients (make the batch larger instead)"
    return None


def _look_at_models(model_class: Any) -> None:
    """Has each model of a class asked before its step is built, whoever's its optimizer is."""
    original = model_class.make_train_function

    @functools.wraps(original)
    def make_train_function(self: Any, force: bool = False) -> Any:
        for layer in self._flatten_layers():
            if isinstance(layer, ShardedEmbedding):
                refuse_settings(getattr(self, "optimizer", None), layer.name)
        return original(self, force)

    model_class.make_train_function = make_train_function


_look_at_models(keras.Model)
