"""``KerasState``: a model and its optimizer in an elastic job, for Keras 3 and for tf_keras."""

import numpy as np

from ringtrain._training.needs import check_needs
from ringtrain._training.session import NewWorld
from ringtrain.elastic import ObjectState
from ringtrain.embedding.committed_rows import CommittedRows
from ringtrain.embedding.table import SelfUpdatingTable
from ringtrain.errors import InvalidArgumentError
from ringtrain.keras.backends import backend
from ringtrain.keras.optimizer import hoist, reduction_of
from ringtrain.keras.reduction import KerasReducer
from ringtrain.keras.types import Model, Optimizer, Variable
from ringtrain.keras.variables import broadcast_variables, build_optimizer, variables_of_optimizer


class KerasState(ObjectState):
    """A built model, its optimizer, and plain objects, each an attribute.

    Example:
        >>> state = hvd.elastic.KerasState(model, epoch=0, batch=0)
        >>> state.register_reset_callbacks([lambda: model.optimizer.learning_rate.assign(0.001 * hvd.size())])

    The optimizer's variables are made here if they are not there yet, so that a rank that joins has the same ones.

    Args:
        model: of Keras, built: its variables are kept, seeds of random layers included.
        optimizer: distributed or not; by default that of the compiled model.
        kwargs: plain objects by name, such as ``epoch=0`` and ``batch=0`` for the callbacks; they are copied.

    Raises:
        InvalidArgumentError: a model without variables yet; it is a ValueError.
        UnsupportedError: an optimizer with ``LocalSteps`` or ``OneStepLate``, or Keras on JAX.
    """

    def __init__(self, model: Model, optimizer: Optimizer | None = None, **kwargs: object):
        if not getattr(model, "built", False):
            raise InvalidArgumentError(
                f"{type(self).__name__}: the model must be built before, but is not. Call model.build(input_shape), or "
                "begin it with keras.Input."
            )
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        reduction = self._reduction()
        if reduction is not None:
            check_needs(reduction.settings.mode.columns, {"KerasState": True}, type(self).__name__)
        check_needs(backend.columns, {"KerasState": True}, type(self).__name__)
        if self.optimizer is not None:
            if hoist(self.optimizer) and getattr(model, "train_function", None) is not None:
                model.make_train_function(force=True)
            if not getattr(self.optimizer, "built", False):
                build_optimizer(self.optimizer, model.trainable_variables)
        self._kept: list[tuple[Variable, np.ndarray]] = []
        self._tables = _elastic_tables(model)
        self._rows = CommittedRows(self._tables)
        super().__init__(**kwargs)
        self._save_the_rest()

    def save(self) -> None:
        """Keeps a copy of everything, in the host's memory; with tables of an elastic job all ranks call it."""
        with self._rows.committing():
            self._save_the_rest()

    def restore(self) -> None:
        """Goes back to it, bit for bit."""
        self._restore_the_rest()
        self._rows.restore()

    def sync(self) -> None:
        """Takes everything from rank 0, and keeps a copy of it; seeds follow from those of rank 0, but differ.

        A distributed optimizer enters the world with it, without gradients that it has begun to add up. Rows of tables stay
        each rank's own.
        """
        if self._rows.sync():
            self._restore_the_rest()
        for table in self._tables:
            table.drop()
        if (reduction := self._reduction()) is not None:
            reduction.enter_world(NewWorld.ANEW)
        broadcast_variables(self._variables(), root_rank=0)
        super().sync()
        self.save()

    def _save_the_rest(self) -> None:
        self._kept = [(variable, np.array(variable.numpy())) for variable in self._variables()]
        super().save()

    def _restore_the_rest(self) -> None:
        for variable, value in self._kept:
            variable.assign(value)
        super().restore()

    def _variables(self) -> list[Variable]:
        return [*self.model.variables, *([] if self.optimizer is None else variables_of_optimizer(self.optimizer))]

    def _reduction(self) -> KerasReducer | None:
        """That of the distributed optimizer, which may be within a LossScaleOptimizer."""
        return reduction_of(self.optimizer) or reduction_of(getattr(self.optimizer, "inner_optimizer", None))


def _elastic_tables(model: Model) -> list[SelfUpdatingTable]:
    """Tables whose rows come and go with ranks."""
    found = [getattr(each, "sharded_table", None) for each in model.variables]
    return [table for table in found if table is not None and table.is_elastic]
