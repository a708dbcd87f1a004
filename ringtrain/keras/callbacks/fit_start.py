"""The start of ``fit``: the same model on all ranks, and what would go wrong later said before."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ringtrain._binding.log import logger
from ringtrain._runtime.arguments import check_kind
from ringtrain._runtime.context import current
from ringtrain._runtime.objects import allgather_object
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, members_of
from ringtrain._training.adapter.checks import require_alike
from ringtrain.elastic.followed import followed
from ringtrain.errors import InvalidArgumentError
from ringtrain.keras.compilation import switch_off
from ringtrain.keras.drift import ReplicaGuard, require_equal
from ringtrain.keras.optimizer import reduction_of, reduction_within
from ringtrain.keras.types import Logs, Model, Optimizer, Params, Variable
from ringtrain.keras.variables import broadcast_variables, build_optimizer, slots_of, variables_of_optimizer

if TYPE_CHECKING:  # loaded by those who average
    from ringtrain.keras.local_steps import AveragedVariables


class StartHooks:
    """Gives all ranks the root's model and optimizer when ``fit`` begins, and looks after what would go wrong later.

    Example:
        >>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

    It builds the optimizer if need be, so that its state is broadcast too; switches XLA off, which cannot compile the operations between
    ranks, where a training step of the user's own has them; refuses ranks that would take different numbers of steps;
    and compares the replicas after the first update. A model that only its first batch builds, as one without
    ``keras.Input``, has no variables before, and gets the root's after that batch. The ranks are those of the optimizer's process
    set; on another rank it does nothing.

    Args:
        root_rank: global rank of the root.
        device: accepted for Horovod's sake.
        local_variables: a variable, or several, that each rank keeps to itself, with what the optimizer keeps for them.
        check_replicas: whether the first update must be the same on all ranks.

    Raises:
        InvalidArgumentError: something else than variables.
        MismatchError: in ``fit``, on all ranks: they differ in their variables, in their steps, or after the update.
    """

    model: Model  # Keras sets these two
    params: Params | None

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        local_variables: Variable | Iterable[Variable] | None = None,
        check_replicas: bool = True,
    ):
        super().__init__()
        self._root_rank = root_rank
        self._local: dict[int, Variable] = {}  # by identity; Keras' variables have no hash of their own
        for variable in _listed(local_variables):
            self.register_local_var(variable)
        self._check_replicas = check_replicas
        self._guard: ReplicaGuard | None = None
        self._waits_for_variables = False
        self._begins = False  # whether the first epoch of this fit is still to come

    def register_local_var(self, variable: Variable) -> None:
        """Adds a variable that each rank keeps to itself."""
        demand = "BroadcastGlobalVariablesCallback: each of local_variables must be a variable"
        check_kind(demand, variable, ("assign",), "Pass layer.trainable_variables of the layers that stay local")
        self._local[id(variable)] = variable

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Prepares the model, and broadcasts."""
        if followed() is not None:
            raise InvalidArgumentError(
                "BroadcastGlobalVariablesCallback: it must not stand beside elastic.Elastic, which gives all ranks the state, "
                "but does: ranks that join would be alone in it. Leave it out."
            )
        model, process_set = self.model, self._process_set()
        if process_set.size() == 1 or not process_set.included():
            return
        self._begins = True
        self._prepare(model, process_set)
        _require_equal_lengths(self.params or {}, process_set)
        _require_equal_plans(model.optimizer, process_set)
        self._waits_for_variables = not model.built
        _ask_for_no_look(model.optimizer, self._waits_for_variables)
        if model.built:
            self._make_alike(model, process_set)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """At the first one, which other callbacks may have moved: refuses ranks that begin at different ones."""
        if self._begins:
            self._begins = False
            _require_equal_beginnings(epoch, self._process_set())

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Compares the replicas after the first update since they were made alike."""
        if not self._waits_for_variables and self._guard is None:
            return
        model = self.model  # of which variables have their values once a callback asks for it, with Keras on JAX
        if self._waits_for_variables:
            self._waits_for_variables = False
            self._make_alike(model, self._process_set())
        elif self._guard is not None and self._guard.passed():
            self._guard = None

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Gives up comparing: an epoch without an update has nothing to compare. After local steps, averages."""
        self._guard = None
        self._synchronize()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Says so where no epoch was left to train; after local steps, averages; with ``OneStepLate``, applies the last gradients."""
        if self._begins:  # others have begun one, and wait
            self._begins = False
            _require_equal_beginnings((self.params or {}).get("epochs"), self._process_set())
        if getattr(getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer), "use_ema", False):
            self._synchronize()  # Keras has put moving averages into the model, which are a worker's own
        if _is_late(self.model.optimizer):
            self.model.optimizer.flush()

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """After local steps, averages before the model is evaluated."""
        self._synchronize()

    def _synchronize(self) -> None:
        if _local_steps_of(self.model.optimizer) is not None:
            self.model.optimizer.synchronize()

    def _make_alike(self, model: Model, process_set: ProcessSet) -> None:
        if not getattr(model.optimizer, "built", False):
            build_optimizer(model.optimizer, model.trainable_variables)
        kept = {id(each) for each in slots_of(model.optimizer, list(self._local.values()))} if self._local else set()
        of_optimizer = [each for each in variables_of_optimizer(model.optimizer) if id(each) not in kept]
        shared = self._shared([*model.variables, *of_optimizer])
        broadcast_variables(shared, self._root_rank, process_set)
        _ask_for_no_look(model.optimizer, False)
        if _local_steps_of(model.optimizer) is not None:
            model.optimizer.average_also(model.non_trainable_variables)
        elif self._check_replicas:
            self._guard = ReplicaGuard(self._shared(model.trainable_variables), process_set)

    def _process_set(self) -> ProcessSet:
        reduction = reduction_within(self.model.optimizer)
        return global_process_set if reduction is None else reduction.settings.process_set

    def _shared(self, variables: Sequence[Variable]) -> list[Variable]:
        return [variable for variable in variables if id(variable) not in self._local]

    def _prepare(self, model: Model, process_set: ProcessSet) -> None:
        if switch_off(model, process_set) and getattr(model, "train_function", None) is not None:
            model.make_train_function(force=True)


def _listed(variables: Any) -> list[Variable]:
    if variables is None:
        return []
    return [variables] if hasattr(variables, "assign") else list(variables)


def _local_steps_of(optimizer: Optimizer) -> "AveragedVariables | None":
    """The local steps of a distributed optimizer; None for any other."""
    reduction = reduction_of(optimizer)
    return None if reduction is None else reduction.local_steps


def _ask_for_no_look(optimizer: Optimizer, muted: bool) -> None:
    """Whether a distributed optimizer leaves the variables alone, which are not those of the root yet."""
    reduction = reduction_of(optimizer)
    if reduction is not None and reduction.watching.watch is not None:
        reduction.watching.watch.mute(muted)


def _is_late(optimizer: Optimizer) -> bool:
    reduction = reduction_of(optimizer)
    return reduction is not None and reduction.settings.late


def _require_equal_plans(optimizer: Optimizer, process_set: ProcessSet) -> None:
    """A rank of local steps would wait for others of exact ones, and they for it."""
    reduction = reduction_of(optimizer)
    own = {"mode": None} if reduction is None else reduction.settings.terms()
    demand = "fit: arguments of DistributedOptimizer must be the same on all ranks"
    require_equal(own, "fit.local_steps", process_set, demand, "Pass the same arguments on every rank")


def _require_equal_beginnings(epoch: int | None, process_set: ProcessSet) -> None:
    """Ranks that began later would take fewer steps, and the schedules of others."""
    demand = "fit 'initial_epoch': the first epoch must be the same on all ranks"
    advice = "Pass one initial_epoch everywhere; what resumes, such as BackupAndRestore, does so on every rank, from one state"
    require_equal({"initial_epoch": epoch}, "fit.begins", process_set, demand, advice)


# What to do where ranks differ in it.
_ADVICE = {
    "epochs": "Pass one number of epochs everywhere",
    "steps": "Share the data out with ringtrain.shard, policy 'pad' or 'truncate', or pass steps_per_epoch",
}


def _require_equal_lengths(params: Params, process_set: ProcessSet) -> None:
    """Ranks that took more steps than others would wait for them at the end."""
    own = {name: params.get(name) for name in _ADVICE}
    everyone = allgather_object(own, "fit.lengths", process_set)
    for name, advice in _ADVICE.items():
        demand = f"fit '{name}': expected the same number on all ranks"
        require_alike(demand, [theirs[name] for theirs in everyone], process_set, advice)
    if own["steps"] is None and current().rank == members_of(process_set)[0]:
        logger.warning(
            "fit: the data do not say how many steps an epoch has. All ranks must take equally many, or the last ones "
            "wait for the others: pass steps_per_epoch, or shard data of known length."
        )
