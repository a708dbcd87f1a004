"""``DistributedOptimizer``: the user's optimizer, which from then on steps with the gradients of all ranks.

The object stays the same one: its class becomes a subclass with a few methods more, which ask its mode (``modes``), and
a hook before each step waits for the reductions. So its defaults, state, schedulers, hooks and pickles are what they were.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from ringtrain._bootstrap import membership
from ringtrain._runtime.arguments import check_kind
from ringtrain._runtime.operations import Adasum, Average, PerItem, Sum
from ringtrain._runtime.process_sets import ProcessSet, global_process_set
from ringtrain._training.mode import LocalSteps, Mode, OneStepLate, ShardedStep, Synchronous, checked_mode
from ringtrain._training.needs import check_needs
from ringtrain._training.optimizer_arguments import check_compressor, check_passes, check_scaling
from ringtrain._training.powersgd import PowerSGD
from ringtrain.errors import InvalidArgumentError
from ringtrain.torch import parameters
from ringtrain.torch.coexistence import refuse_shared_parameters, refuse_wrapped_optimizer
from ringtrain.torch.compression import Compression, Compressor
from ringtrain.torch.modes.base import Alone, OptimizerMode, State
from ringtrain.torch.modes.wrapping import Wrapping
from ringtrain.torch.no_sync import accumulating
from ringtrain.torch.shards import check_op_of_shards, is_shard, replicated

if TYPE_CHECKING:  # the user's class comes behind it
    from torch.optim import Optimizer as _Optimizer
else:
    _Optimizer = object


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] | PowerSGD = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    average_aggregated_gradients: bool = False,
    mode: Mode | None = None,
) -> torch.optim.Optimizer:
    """Makes an optimizer step with the gradients of all ranks, and returns it.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> loss(model(x), y).backward()
        >>> optimizer.step()

    Each gradient starts to travel when ``backward()`` has computed it, and ``backward()`` returns when those of this
    pass have arrived: what clips or unscales them then has those of all ranks. N ranks with equal batches and a mean
    loss train as one process does with the N batches in one. A parameter that no rank used keeps the gradient ``None``;
    one that some ranks used counts zeros for the others. With a closure, ``step()`` reduces the loss too. In a world of
    one nothing changes.

    The optimizer outlives its world: after ``shutdown()`` and ``init()`` it goes on in the new one, if all ranks use their
    optimizers first in one order there. Gradients that were under way stay those of this rank.

    All ranks call ``step()``, ``synchronize()`` and ``zero_grad()`` equally often. A rank may run no backward pass at
    all before a step, but must come to ``step()`` without waiting for the others first.

    Args:
        optimizer: any ``torch.optim.Optimizer``; changed in place, so schedulers made before stay right.
        named_parameters: ``model.named_parameters()``: the names in error messages and traces. It may hold more
            parameters than the optimizer, not fewer. All ranks must use the same names.
        compression: ``Compression.fp16`` or ``bf16`` send dense gradients between hosts as 16 bits, added in float32;
            ``int8`` and ``int4`` as 8 or 4 bits with a scale for each 256 or 128 elements, of gradients that have 4,096
            or more: what rounding loses of a gradient is added to the next one, and taken back if the step is skipped.
            ``powersgd(rank=2)`` sends matrices as two factors of low rank, with the same feedback (``PowerSGD``).
            Or a class of your own, derived from ``Compression.none``, which is called for each gradient.
        backward_passes_per_step: backward passes whose gradients are summed here before they travel. See ``no_sync``.
        op: ``Average`` or ``Sum``; or ``PerItem``, for losses that are sums over items, whose number ``count`` tells: gradients
            are those of the mean over the items of all ranks and passes. Or ``Adasum``: then each rank steps with its own
            gradients, with the learning rate of one process, and the changes of the parameters are combined (``adasum``).
            ``synchronize()`` does nothing then, and all that is about gradients on their way has nothing to say.
        gradient_predivide_factor: with ``Average``, divides by this before the addition and by the rest after it.
        num_groups: Horovod's older spelling of ``groups`` with an int.
        groups: an int: that many groups of parameters, each reduced as one operation, all or nothing; or the groups
            themselves as lists of parameters; the parameters in none travel alone.
        sparse_as_dense: sends sparse gradients as dense ones.
        process_set: the ranks that train together. On another rank the optimizer stays as it is.
        average_aggregated_gradients: divides the sum of a step's passes by ``backward_passes_per_step``, as Keras
            users know it; also where a step is cut short, so that every sample weighs the same.
        mode: when ranks exchange what: ``Synchronous()``, which is the default, ``LocalSteps(every=...)``, ``OneStepLate()`` or
            ``ShardedStep(model)``; each has its own arguments. docs/modes-together.md says which goes with what.

    Raises:
        InvalidArgumentError: not an optimizer, or names, groups, ``op`` or a number that cannot be; arguments that exclude each
            other; or another library averages these gradients already.
        UnsupportedError: another library holds these parameters in shards; or this optimizer, these parameters or this job
            cannot have the mode.
        MismatchError: with ``LocalSteps``, ranks have different arguments; the same text on all. ``backward()`` and ``step()``
            raise it where ranks have other settings, or replicas differ.
    """
    mode = checked_mode(mode)
    refuse_wrapped_optimizer(optimizer)
    _check_arguments(optimizer, process_set, backward_passes_per_step, op, gradient_predivide_factor)
    powersgd, compressor = (compression, Compression.none) if isinstance(compression, PowerSGD) else (None, compression)
    check_compressor(compressor)
    known = parameters.known_names(named_parameters)
    names = parameters.names_of(optimizer, known)
    groups = parameters.checked_groups(num_groups, groups, set(replicated(names)))
    refuse_shared_parameters(names.keys())
    wrapping = Wrapping(
        mode, process_set, op, compressor, powersgd, gradient_predivide_factor, sparse_as_dense,
        average_aggregated_gradients, groups, known, names, _plain_class(type(optimizer)),
    )  # fmt: skip
    kind = _kind_of(mode, op)
    _check_combination(optimizer, wrapping, kind)
    _make_distributed(optimizer)
    optimizer.op, optimizer.process_set = op, process_set
    optimizer.gradient_predivide_factor, optimizer.sparse_as_dense = gradient_predivide_factor, sparse_as_dense
    optimizer._parameter_names = dict(known or names)
    optimizer.mode, optimizer._passes = mode, backward_passes_per_step
    optimizer._mode = _mode_of(optimizer, wrapping, kind)
    optimizer._mode.attach(optimizer)
    return optimizer


_MODES = {  # by where each is: who does not train so does not load it
    Synchronous: "synchronous.SynchronousMode",
    LocalSteps: "local_steps.LocalStepsMode",
    OneStepLate: "one_step_late.OneStepLateMode",
    ShardedStep: "sharded_step.ShardedStepMode",
}


def _kind_of(mode: Mode, op: int) -> type[OptimizerMode]:
    """The class that trains so."""
    module, name = ("adasum.AdasumMode" if op == Adasum else _MODES[type(mode)]).split(".")
    kind: type[OptimizerMode] = getattr(importlib.import_module(f"ringtrain.torch.modes.{module}"), name)
    return kind


def _mode_of(optimizer: torch.optim.Optimizer, wrapping: Wrapping, kind: type[OptimizerMode]) -> OptimizerMode:
    """The mode, made for this optimizer; that of a rank without others where the mode has nothing to do."""
    process_set = wrapping.process_set
    works_alone = kind.works_alone(wrapping.mode) or wrapping.op == PerItem or wrapping.averages_passes
    in_one = process_set.size() == 1 and membership.current() is None and not works_alone
    return Alone(kind) if not process_set.included() or in_one else kind.of(optimizer, wrapping)


class _Distributed(_Optimizer):
    """The methods that a distributed optimizer has beyond, or around, those of the user's class: its mode's.

    Attributes, as Horovod's scripts read them:
        op, process_set, gradient_predivide_factor, sparse_as_dense, mode: the arguments.
        _parameter_names: the names by parameter, as the user gave them.
    """

    op: int
    process_set: ProcessSet
    gradient_predivide_factor: float
    sparse_as_dense: bool
    mode: Mode
    _parameter_names: dict[torch.Tensor, str]
    _passes: int = 1
    _mode: OptimizerMode = Alone()

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes whose gradients are summed before they travel; to be set between two steps."""
        return self._passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        check_passes(passes)
        self._mode.set_passes_per_step(passes)
        self._passes = passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes the number of backward passes in a step, between two steps."""
        self.backward_passes_per_step = passes

    # ---- a step ----

    def synchronize(self) -> None:
        """Returns when what ranks exchange up to here has arrived: then all have the same.

        Before a step these are the gradients that it is going to apply: clip or unscale them, and step within
        ``skip_synchronize()``. ``backward()`` and ``step()`` do this by themselves; a step that is cut short, or one that
        ``OneStepLate`` is going to make, needs it.

        With ``LocalSteps`` it averages what ranks have changed, as evaluating and saving need it. With ``op=Adasum`` there is
        nothing to wait for.

        Raises:
            MismatchError: ranks disagree about a gradient, have taken different numbers of local steps, or have other
                settings; the same on all.
        """
        self._mode.synchronize(self)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this block ``step()`` takes the gradients as they are, because ``synchronize()`` was called before.

        Raises:
            InvalidArgumentError: with ``LocalSteps`` and Adasum, which synchronize no gradients.
        """
        with self._mode.skip():
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this block gradients are only added up on this rank; the first backward pass after it reduces them.

        Example:
            >>> with optimizer.no_sync():
            ...     for x, y in micro_batches[:-1]:
            ...         loss(model(x), y).backward()
            >>> loss(model(micro_batches[-1][0]), micro_batches[-1][1]).backward()
            >>> optimizer.step()
        """
        with accumulating(), self._mode.silence():
            yield

    def zero_grad(self, *args: bool, **kwargs: bool) -> None:
        """The user's ``zero_grad``; a step starts anew, and if the one before came to no end, on all ranks together."""
        sets_to_none = args[0] if args else kwargs.get("set_to_none", True)
        self._mode.discard(zeros=not sets_to_none)
        super().zero_grad(*args, **kwargs)

    def flush(self) -> None:
        """With ``OneStepLate``: applies the gradients of the last step; on all ranks, between two steps.

        Before evaluating, and at the end. The next step has nothing to apply then, as the first one. With ``ShardedStep``
        this rank waits until the parameters have the values of the last step, for what modules do not read. Else does nothing.
        """
        self._mode.flush(self)

    def join(self) -> None:
        """With ``LocalSteps``: this rank has no more data, and averages with the others until all have called this.

        What this rank has changed since the last time counts once, and then it only takes what the others learn. When
        it returns all have the same parameters; training may go on then.

        Raises:
            InvalidArgumentError: in another mode, where ``ringtrain.torch.join()`` is for this.
        """
        self._mode.join(self)

    def count_samples(self, samples: int) -> None:
        """What this rank's next step weighs, such as the number of its samples; before each step on all ranks, or on none.

        For losses that are means over samples, of which ranks have different numbers: before the backward pass. With several
        passes of different numbers use ``op=PerItem`` and ``count``. With ``LocalSteps`` it is what the rank's changes weigh, too.

        Raises:
            InvalidArgumentError: no whole number from 0; or ``op``, mode or compression has no weights.
            UnsupportedError: the optimizer trains rows of a sharded embedding.
        """
        self._mode.count(samples, of_sums=False)

    def count(self, items: int) -> None:
        """With ``op=PerItem``: of how many items, such as tokens, the loss of the next backward pass is the sum on this rank.

        Example:
            >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.PerItem)
            >>> loss = torch.nn.functional.mse_loss(model(x), y, reduction="sum")
            >>> optimizer.count(len(x))
            >>> loss.backward()
            >>> optimizer.step()

        The step's gradient is that of the mean over the items of all ranks and all passes, however many each has. To be called
        before each backward pass, and with 0 by a rank that has none in a step.

        Args:
            items: a whole number from 0. Where a step has none on all ranks, gradients are sums.

        Raises:
            InvalidArgumentError: not such a number, or the optimizer has another ``op``.
        """
        self._mode.count(items, of_sums=True)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """``GradScaler.step`` asks this of fused optimizers, before it looks at the gradients and perhaps does not step."""
        return self._mode.scales(vars(self).get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports

    # ---- its parameters ----

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """The user's ``add_param_group``; the new parameters are reduced too, each alone."""
        self._mode.check_new_group()
        super().add_param_group(param_group)
        names = parameters.names_of_group(self, len(self.param_groups) - 1)
        self._parameter_names = {**names, **self._parameter_names}
        self._mode.add(names)

    # ---- what is saved ----

    def state_dict(self) -> State:
        """The user's ``state_dict``, and what belongs to the mode.

        Under ``compression`` what ``int8``, ``int4`` or ``powersgd`` has lost on this rank: where each rank saves and loads
        its own, as many ranks on as many hosts go on with the same bits. Under ``local_steps`` what the next average needs,
        under ``delayed`` the gradients that the next step applies. A plain optimizer loads it too.
        """
        return self._mode.state_dict(self, super().state_dict)

    def load_state_dict(self, state_dict: State) -> None:
        """The user's ``load_state_dict``; a begun step starts anew.

        What compression has lost of gradients before is forgotten. A state that this rank has saved, in a world of as many
        ranks and hosts, brings its own; for others load what ``compression_state`` has returned after this. All ranks call
        this where a mode has state of its own.
        """
        self._mode.load_state_dict(self, super().load_state_dict, state_dict)

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """With ``ShardedStep``: puts the shares of the optimizer's state together on rank ``to``, or on all with None.

        On all ranks together. ``state_dict()`` returns it there until the next step; any optimizer of this class loads it, on
        any number of ranks. In other modes each rank has all of it, and this does nothing.
        """
        self._mode.gather_state(to)

    def sharded_state_dict(self) -> State:
        """With ``ShardedStep``: this rank's share of the state, for ``torch.distributed.checkpoint`` to save or to load into.

        Example:
            >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), mode=hvd.ShardedStep(model))
            >>> loss_of(model(x), y).backward()
            >>> optimizer.step()
            >>> state = {"model": model.state_dict(), "optimizer": optimizer.sharded_state_dict()}

        ``torch.distributed.checkpoint.save(state, checkpoint_id="folder")`` writes it on all ranks together, and ``load`` reads
        into it; then comes ``load_sharded_state_dict(state["optimizer"])``. No rank needs memory for the whole. Names, shapes
        and places are those of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, so that any number of ranks
        loads it, in any mode. Before the first step it has the state that such a step makes, to be loaded into.

        Returns:
            ``state``, by the parameters' names, and ``param_groups``. Tensors with an element for each of a parameter's have
            its shape, and this rank's elements alone; the others are whole.

        Raises:
            InvalidArgumentError: in another mode, where each rank has all of the state.
        """
        state = self._mode.sharded_state(self)
        if state is None:
            raise InvalidArgumentError(
                "sharded_state_dict: the optimizer must have mode=ShardedStep(...), but each rank has all of its state. Use "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict()."
            )
        return state

    def load_sharded_state_dict(self, state_dict: State) -> None:
        """Goes on with what ``sharded_state_dict`` has returned on this rank, once a checkpoint was loaded into it.

        A begun step starts anew. Whole tensors under the same names will do, too. On all ranks together.

        Raises:
            InvalidArgumentError: it is of other parameters; or as for ``sharded_state_dict``.
        """
        self.sharded_state_dict()
        self._mode.load_sharded_state(self, state_dict)

    def compression_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What ``Compression.int8``, ``int4`` or ``powersgd`` has lost and makes up for in what is sent next.

        All ranks of the process set call this together, between two steps, and get the same: by name of gradient,
        ``sent`` and ``finished``, flat tensors of float32 (``ringtrain._training.residuals``); of PowerSGD ``residual``,
        a mean, and the right ``factor``. So one rank can save it, and a world of other hosts can go on with it. Empty
        where nothing is kept.
        """
        return self._mode.compression_state()

    def load_compression_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Goes on with what ``compression_state`` has returned, the same on all ranks, before the first step.

        Without it the first gradients make up for nothing, as in a new run.
        """
        self._mode.load_compression_state(state)

    def register_step_pre_hook(self, hook: Callable) -> torch.utils.hooks.RemovableHandle:
        """The user's ``register_step_pre_hook``."""
        handle = super().register_step_pre_hook(hook)
        self._mode.note_hook(self)
        return handle

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        """Copies and pickles are plain optimizers of the user's class; wrap them again to distribute them."""
        self._mode.check_copy()
        _, _, *contents = super().__reduce_ex__(max(int(protocol), 2))
        return _empty_instance, (_plain_class(type(self)),), *contents


_DistributedOptimizer = _Distributed  # Horovod's name, by which programs know a distributed optimizer


def _plain_class(distributed: type) -> type:
    """The user's class: what comes next to the methods that were put in front of it; of a plain class itself."""
    order = distributed.__mro__
    return order[order.index(_Distributed) + 1] if _Distributed in order else distributed


def _empty_instance(plain: Any) -> torch.optim.Optimizer:
    """What copies and unpickled optimizers start from, before they get their state."""
    return plain.__new__(plain)


def _make_distributed(optimizer: torch.optim.Optimizer) -> None:
    """Gives the optimizer the methods; one that has them ends its mode, to be wrapped anew."""
    if isinstance(optimizer, _Distributed):
        mode, optimizer._mode = optimizer._mode, Alone()
        mode.close()
        return
    plain = type(optimizer)
    described = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    distributing = type(plain.__name__, (_Distributed, plain), described)
    # Programs for Horovod take the class's only base for the optimizer's own: Lightning derives another class from it.
    optimizer.__class__ = type(plain.__name__, (distributing,), described)


# ---- arguments ----


def _check_arguments(
    optimizer: torch.optim.Optimizer, process_set: ProcessSet, passes: int, op: int, predivide: float
) -> None:
    check_kind("DistributedOptimizer: the optimizer must be a torch.optim.Optimizer", optimizer, torch.optim.Optimizer)
    check_kind("DistributedOptimizer: process_set must be a ringtrain.ProcessSet", process_set, ProcessSet)
    check_passes(passes)
    check_scaling("DistributedOptimizer", op, predivide, others={"Adasum": Adasum, "PerItem": PerItem})


def _check_combination(optimizer: torch.optim.Optimizer, wrapping: Wrapping, kind: type[OptimizerMode]) -> None:
    """Raises the error of a mode that cannot have what the script gives or has beside it."""
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    columns = [*wrapping.mode.columns, *{Adasum: ["op=Adasum"], PerItem: ["op=PerItem"]}.get(wrapping.op, [])]
    if wrapping.averages_passes:
        columns.append("average_aggregated_gradients")
    given = {
        "sum": wrapping.op == Sum,
        "adasum": wrapping.op == Adasum,
        "per item": wrapping.op == PerItem,
        "averaged passes": wrapping.averages_passes,
        "groups": wrapping.groups is not None,
        "own compression": wrapping.by_core is None,
        "int8": wrapping.by_core in ("int8", "int4"),
        "powersgd": wrapping.powersgd is not None,
        "process set": wrapping.process_set is not global_process_set,
        "sharded embedding": any(map(is_shard, trained)),
        "apex": hasattr(optimizer, "_amp_stash"),
        "elastic": membership.current() is not None,
        **kind.traits(optimizer, _plain_class(type(optimizer))),
    }
    check_needs(columns, given)
    check_op_of_shards(trained, wrapping.op)
