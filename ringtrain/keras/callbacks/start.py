"""The start of ``fit``: the same model on all ranks, and what would go wrong later said before."""

from collections.abc import Sequence
from typing import Any

from ringtrain.context import current
from ringtrain.errors import MismatchError
from ringtrain.keras.optimizer import hoist, reduction_of
from ringtrain.keras.replicas import ReplicaGuard
from ringtrain.keras.variables import broadcast_variables
from ringtrain.log import logger
from ringtrain.objects import allgather_object
from ringtrain.process_sets import ProcessSet, global_process_set


class StartHooks:
    """Gives all ranks the root's model and optimizer when ``fit`` begins, and looks after what would go wrong later.

    It builds the optimizer if need be, so that its state is broadcast too; puts a ``LossScaleOptimizer`` that
    ``compile`` made inside the distributed optimizer; switches XLA off, which cannot compile the operations between
    ranks; refuses ranks that would take different numbers of steps; and compares the replicas after the first update.
    A model that only its first batch builds, as one without ``keras.Input``, has no variables before, and gets the root's
    after that batch.

    Args:
        root_rank: global rank of the root.
        device: accepted for Horovod's sake.
        local_variables: variables that each rank keeps to itself.
        check_replicas: whether the first update must be the same on all ranks.

    Raises:
        MismatchError: in ``fit``, on all ranks: they differ in their variables, in their steps, or after the update.

    Example:
        >>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    """

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        local_variables: Sequence[Any] | None = None,
        check_replicas: bool = True,
    ):
        super().__init__()
        self._root_rank = root_rank
        self._local = {id(variable) for variable in local_variables or ()}
        self._check_replicas = check_replicas
        self._guard: ReplicaGuard | None = None
        self._waits_for_variables = False

    def register_local_var(self, variable: Any) -> None:
        """Adds a variable that each rank keeps to itself."""
        self._local.add(id(variable))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Prepares the model, and broadcasts."""
        model, process_set = self.model, self._process_set()
        if process_set.size() == 1:
            return
        self._prepare(model)
        _require_equal_lengths(self.params or {}, process_set)
        self._waits_for_variables = not model.built
        if model.built:
            self._make_alike(model, process_set)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares the replicas after the first update since they were made alike."""
        if self._waits_for_variables:
            self._waits_for_variables = False
            self._make_alike(self.model, self._process_set())
        elif self._guard is not None and self._guard.passed():
            self._guard = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Gives up comparing: an epoch without an update has nothing to compare."""
        self._guard = None

    def _make_alike(self, model: Any, process_set: ProcessSet) -> None:
        if not getattr(model.optimizer, "built", False):
            model.optimizer.build(model.trainable_variables)
        shared = self._shared([*model.variables, *_variables_of(model.optimizer)])
        broadcast_variables(shared, self._root_rank, process_set)
        if self._check_replicas:
            self._guard = ReplicaGuard(self._shared(model.trainable_variables), process_set)

    def _process_set(self) -> ProcessSet:
        inner = getattr(self.model.optimizer, "inner_optimizer", None)
        reduction = reduction_of(self.model.optimizer) or reduction_of(inner)
        return global_process_set if reduction is None else reduction.settings.process_set

    def _shared(self, variables: Sequence[Any]) -> list[Any]:
        return [variable for variable in variables if id(variable) not in self._local]

    def _prepare(self, model: Any) -> None:
        hoisted = hoist(model.optimizer)
        uncompiled = bool(model.jit_compile)
        if uncompiled:
            model.jit_compile = False
            if current().rank == self._root_rank:
                logger.warning(
                    "fit: jit_compile is switched off, since XLA cannot compile the operations between ranks."
                )
        if (hoisted or uncompiled) and getattr(model, "train_function", None) is not None:
            model.make_train_function(force=True)


def _variables_of(optimizer: Any) -> list[Any]:
    """A list in Keras 3, a method too in tf_keras."""
    return list(optimizer.variables() if callable(optimizer.variables) else optimizer.variables)


def _require_equal_lengths(params: dict[str, Any], process_set: ProcessSet) -> None:
    """Ranks that took more steps than others would wait for them at the end."""
    own = {name: params.get(name) for name in ("epochs", "steps")}
    everyone = allgather_object(own, "fit.lengths", process_set)
    for name in own:
        for rank, theirs in zip(process_set.ranks, everyone, strict=True):
            if theirs[name] != everyone[0][name]:
                raise MismatchError(
                    f"fit '{name}': expected the same number on all ranks but found {everyone[0][name]} on rank "
                    f"{process_set.ranks[0]} and {theirs[name]} on rank {rank}. Share the data out with "
                    "ringtrain.shard, policy 'pad' or 'truncate', or pass steps_per_epoch."
                )
    if own["steps"] is None and current().rank == process_set.ranks[0]:
        logger.warning(
            "fit: the data do not say how many steps an epoch has. All ranks must take equally many, or the last ones "
            "wait for the others: pass steps_per_epoch, or shard data of known length."
        )
