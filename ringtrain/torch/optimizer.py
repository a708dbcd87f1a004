"""``DistributedOptimizer``: the user's optimizer, which from then on steps with the gradients of all ranks.

The object stays the same one: its class becomes a subclass with a few methods more, and a step pre-hook waits for the
reductions. So its defaults, state, schedulers, hooks and pickles are what they were. ``reducer`` does the reducing.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from numbers import Real
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from ringtrain import membership
from ringtrain.averaging.arrays import checked_outer
from ringtrain.averaging.fragments import Streaming
from ringtrain.averaging.neighbours import set_of_this_host
from ringtrain.averaging.outer import Outer
from ringtrain.averaging.worker import ComparedSettings, Plan, Worker
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.gradients.arguments import check_compressor, check_delay, check_kept_equal, check_passes, check_scaling
from ringtrain.gradients.powersgd import PowerSGD, check_powersgd
from ringtrain.gradients.session import Session
from ringtrain.operations import Adasum, Average
from ringtrain.process_sets import ProcessSet, global_process_set
from ringtrain.torch import parameters
from ringtrain.torch.accumulation import accumulating
from ringtrain.torch.adasum import distribute, refuse_adasum
from ringtrain.torch.ahead import Ahead, check_overlap, is_unscaling
from ringtrain.torch.coexistence import refuse_shared_parameters, refuse_wrapped_optimizer
from ringtrain.torch.compression import Compression, Compressor, compression_in_the_core
from ringtrain.torch.delayed import Delayed, refuse_unscaling
from ringtrain.torch.feedback import Feedback
from ringtrain.torch.gradients import ReductionSettings
from ringtrain.torch.periodic import Periodic, check_settings, checked_period
from ringtrain.torch.reducer import Reducer
from ringtrain.torch.replica import CALLED, replicas_of, settings_of
from ringtrain.torch.shards import check_shards, replicated
from ringtrain.torch.tensors import buffer_of

if TYPE_CHECKING:  # the user's class comes behind it
    _Optimizer: Any
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
    gradient_as_bucket_view: bool = False,
    every: int | None = None,
    outer: Outer | None = None,
    within_host: str | None = None,
    warmup: int = 0,
    named_buffers: Iterable[tuple[str, torch.Tensor]] = (),
    delay: int = 0,
    fragments: int = 1,
    overlap: int = 0,
    merge: str = "additive",
    overlap_forward: bool = False,
    replicas: str = "equal",
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
        op: ``Average`` or ``Sum``; or ``Adasum``: then each rank steps with its own gradients, with the learning rate
            of one process, and the changes of the parameters are combined (``adasum``). ``synchronize()`` does nothing
            then, and all that is about gradients on their way has nothing to say.
        gradient_predivide_factor: with ``Average``, divides by this before the addition and by the rest after it.
        num_groups: Horovod's older spelling of ``groups`` with an int.
        groups: an int: that many groups of parameters, each reduced as one operation, all or nothing; or the groups
            themselves as lists of parameters; the parameters in none travel alone.
        sparse_as_dense: sends sparse gradients as dense ones.
        process_set: the ranks that train together. On another rank the optimizer stays as it is.
        average_aggregated_gradients: divides the sum of a step's passes by ``backward_passes_per_step``, as Keras
            users know it; also where a step is cut short, so that every sample weighs the same.
        gradient_as_bucket_view: once a few steps were alike, gradients become views of a few flat tensors, which travel
            as they are, as DDP's option of this name does. Then do not keep ``p.grad`` from one step to the next.
        every: local steps: ranks step with their own gradients, and average what they have changed after so many steps
            (Stich, arXiv:1805.09767). ``compression`` is then that of the changes, and the optimizer has further
            methods: ``synchronize()`` averages at once, as evaluating and saving need it, on all ranks after the same
            step; ``join()`` is for a rank that has no more data; ``count_samples(n)`` before a step says what that
            weighs. Its state may be saved at any step. All ranks call this function together then, and hear whether
            they have the same arguments. docs/slow-networks.md says more.
        outer: with ``every``, the outer optimizer of DiLoCo (arXiv:2311.08105); None averages plainly.
        within_host: with ``every``, ``"exact"`` makes a host one worker: gradients of its ranks are averaged in each
            step, as without ``every``.
        warmup: with ``every``, exact steps before the first local one (post-local SGD, arXiv:1808.07217).
        named_buffers: with ``every``, ``model.named_buffers()``: running statistics are averaged with the parameters,
            counters become the maximum.
        delay: 1: each step applies the gradients of the step before, which have travelled while these were computed; so a
            step takes the longer of both. ``step()`` does all of it, and the optimizer has two methods more or other:
            ``flush()`` applies what is left, before the model is evaluated or saved; ``synchronize()`` before a step
            puts what it is going to apply into the gradients, to be clipped. docs/slow-networks.md says more.
        fragments: with ``every``, parts that the parameters are averaged in, one after another and evenly spread over the
            period, at most ``every`` (Streaming DiLoCo, arXiv:2501.18512). Buffers wait for ``synchronize()``.
        overlap: with ``every``, steps, less than ``every``, for which what was changed travels while training goes on.
        merge: with ``overlap``, what becomes of a value x, x' when it was sent, when the new common value X has come:
            ``"additive"``, x + (X - x'), or ``"half"``, (x + X) / 2, which suits an outer momentum.
        overlap_forward: sums of gradients travel in the backward pass, each rank updates a share of the parameters, and
            the values travel while the next forward pass runs: whoever uses a parameter waits for it. The results are
            those without it; each rank holds its share of the optimizer's state. For SGD, Adam, AdamW and others of
            torch.optim that update each element by itself, and parameters on the CPU. Beyond others the optimizer has
            ``clip_grad_norm_(max_norm)``, as gradients cannot be looked at, ``consolidate_state_dict(to=0)`` before
            ``state_dict()``, and its ``synchronize()`` waits for all parameters. docs/training.md says more.
        replicas: ``"equal"`` compares what each rank steps with, in each step, and the parameters, after the first step
            and at most once a minute: ranks that train apart raise MismatchError. ``"differ"`` compares nothing.

    Raises:
        InvalidArgumentError: not an optimizer, or names, groups, ``op`` or a number that cannot be; or another library
            averages these gradients already.
        UnsupportedError: another library holds these parameters in shards; or this optimizer, these parameters or this
            job cannot have ``overlap_forward``.
        MismatchError: with ``every``, ranks have different arguments; the same text on all. ``backward()`` and ``step()``
            raise it where ranks have other settings, or replicas differ.
    """
    refuse_wrapped_optimizer(optimizer)
    refuse_adasum(optimizer)
    _check_arguments(optimizer, backward_passes_per_step, op, gradient_predivide_factor)
    powersgd, compressor = (compression, Compression.none) if isinstance(compression, PowerSGD) else (None, compression)
    if powersgd is not None:
        unlike = {
            "op=Adasum": op == Adasum,
            "every": every is not None,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        check_powersgd(powersgd, unlike)
    check_compressor(compressor)
    check_kept_equal(replicas)
    known = parameters.known_names(named_parameters)
    names = parameters.names_of(optimizer, known)
    groups = parameters.checked_groups(num_groups, groups, set(replicated(names)))
    refuse_shared_parameters(names.keys())
    named_buffers, outer, by_core = list(named_buffers), checked_outer(outer), compression_in_the_core(compressor)
    streaming = Streaming(fragments, overlap, merge)
    local = checked_period(optimizer, every, outer, within_host, warmup, named_buffers, streaming)
    given = {
        "op=Adasum": op == Adasum,
        "every": every is not None,
        "groups": groups is not None,
        "gradient_as_bucket_view": gradient_as_bucket_view,
        "PowerSGD": powersgd is not None,
        "a compression of your own": by_core is None,
    }
    check_delay(delay, given)
    user_class = _plain_class(type(optimizer)) if isinstance(optimizer, _Distributed) else type(optimizer)
    unlike_overlap = {name: is_given for name, is_given in given.items() if "compression" not in name}
    check_overlap(overlap_forward, optimizer, user_class, {**unlike_overlap, "delay": bool(delay)}, by_core)
    check_shards(optimizer, op, average_aggregated_gradients, local is not None, delay, overlap_forward)
    if local is not None:
        check_settings(op, process_set, within_host, by_core, average_aggregated_gradients)
    if op == Adasum:
        _check_adasum(optimizer, average_aggregated_gradients)
        optimizer = distribute(optimizer, compressor, process_set, compares=replicas == "equal")
    else:
        late = _OneStepLate if delay else _OverlapForward if overlap_forward else _Distributed
        _make_distributed(optimizer, _Local if local is not None else late)
    optimizer.op, optimizer.process_set = op, process_set
    optimizer.gradient_predivide_factor, optimizer.sparse_as_dense = gradient_predivide_factor, sparse_as_dense
    optimizer._parameter_names = dict(known or names)
    if op == Adasum:
        optimizer.backward_passes_per_step = backward_passes_per_step
        return optimizer
    optimizer._passes_alone = backward_passes_per_step
    stays_alone = process_set.size() == 1 and outer is None and not delay and membership.current() is None
    if not process_set.included() or stays_alone:
        return optimizer
    _check_buckets(gradient_as_bucket_view, by_core)

    def settings_over(
        members: ProcessSet, by_core: str | None, compressor: type[Compressor] | None
    ) -> ReductionSettings:
        return ReductionSettings(
            session=Session(members),
            averages=op == Average,
            prescale=1.0 / gradient_predivide_factor,
            postscale=gradient_predivide_factor,
            compression=by_core or "none",
            compressor=compressor,
            sparse_as_dense=sparse_as_dense,
            powersgd=powersgd,
            delay=delay,
            overlap_forward=overlap_forward,
            make_replica=replicas_of(optimizer) if replicas == "equal" else None,
        )

    def reducer_over(members: ProcessSet, by_core: str | None, compressor: type[Compressor] | None) -> Reducer:
        settings = settings_over(members, by_core, compressor)
        passes = optimizer.backward_passes_per_step
        reducer = Reducer(settings, passes, average_aggregated_gradients, gradient_as_bucket_view)
        current_names = parameters.names_of(optimizer, {**optimizer._parameter_names})
        reducer.add_names({**(known or {}), **current_names})
        reducer.add(parameters.grouped(replicated(current_names), groups))
        return reducer

    if delay:
        settings = settings_over(process_set, by_core, None)
        optimizer._delayed = Delayed(optimizer, settings, average_aggregated_gradients)
        return optimizer
    if overlap_forward:
        settings = settings_over(process_set, by_core, None)
        order = {parameter: place for place, parameter in enumerate(known or names)}
        ordered = {parameter: names[parameter] for parameter in sorted(names, key=order.__getitem__)}
        optimizer._ahead = Ahead(
            optimizer, user_class, settings, ordered, backward_passes_per_step, average_aggregated_gradients
        )
        return optimizer
    if local is None:
        optimizer._reducer = reducer_over(process_set, by_core, None if by_core else compressor)
        return optimizer
    compared = ComparedSettings(settings_of(optimizer), CALLED) if replicas == "equal" else None
    worker = Worker(Session(process_set), local, Plan(outer, by_core or "none", within_host), "optimizer", compared)
    worker.compare_terms()  # before a rank waits for what others of other terms never do
    neighbours = set_of_this_host() if within_host is not None else None

    def make_reducer(warms_up: bool) -> Reducer | None:
        members = process_set if warms_up else neighbours
        return None if members is None or members.size() == 1 else reducer_over(members, "none", None)

    optimizer._periodic = Periodic(optimizer, worker, named_buffers, make_reducer)
    return optimizer


class _Distributed(_Optimizer):
    """The methods that a distributed optimizer has beyond, or around, those of the user's class.

    Attributes, as Horovod's scripts read them:
        op, process_set, gradient_predivide_factor, sparse_as_dense: the arguments.
        _parameter_names: the names by parameter, as the user gave them.
    """

    op: int
    process_set: ProcessSet
    gradient_predivide_factor: float
    sparse_as_dense: bool
    _parameter_names: dict[torch.Tensor, str]
    _passes_alone: int = 1
    _reducer: Reducer | None = None  # None in a world of one, and in copies

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes whose gradients are summed before they travel; to be set between two steps."""
        reducer = self._reducer
        return self._passes_alone if reducer is None else reducer.passes_per_step

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        check_passes(passes)
        self._passes_alone = passes
        if self._reducer is not None:
            self._reducer.set_passes_per_step(passes)

    def synchronize(self) -> None:
        """Reduces what ``backward()`` has not, at the end of a step that is cut short for example.

        Then step within ``skip_synchronize()``.
        """
        if self._reducer is not None:
            self._reducer.synchronize_as_asked()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this block ``step()`` takes the gradients as they are, because ``synchronize()`` was called before."""
        reducer = self._reducer
        if reducer is None:
            yield
            return
        with reducer.skip():
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
        reducer = self._reducer
        with accumulating(), reducer.silence() if reducer is not None else nullcontext():
            yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes the number of backward passes in a step, between two steps."""
        self.backward_passes_per_step = passes

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The user's ``zero_grad``; a step starts anew, and if the one before came to no end, on all ranks together."""
        if self._reducer is not None:
            self._reducer.discard()
        super().zero_grad(*args, **kwargs)

    def compression_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What ``Compression.int8``, ``int4`` or ``powersgd`` has lost of the gradients and makes up for in the next step.

        All ranks of the process set call this together, between two steps, and get the same: by name of gradient,
        ``sent`` and ``finished``, flat tensors of float32 (``ringtrain.gradients.residuals``); of PowerSGD ``residual``,
        a mean, and the right ``factor``. So one rank can save it, and a world of other hosts can go on with it. Empty
        where nothing is kept.
        """
        feedback = self._feedback()
        return {} if feedback is None else feedback.of_all_ranks()

    def load_compression_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Goes on with what ``compression_state`` has returned, the same on all ranks, before the first step.

        Without it the first gradients make up for nothing, as in a new run.
        """
        feedback = self._feedback()
        if feedback is not None:
            feedback.load(state)

    @property
    def _sender(self) -> Reducer | Delayed | None:
        """Who sends the gradients, and knows what compression has lost of them; None in a world of one, and in copies."""
        return self._reducer

    def _feedback(self) -> Feedback | None:
        """What compression has lost of the gradients; None if nothing is kept of them."""
        sender = self._sender
        return None if sender is None else sender.feedback()

    def state_dict(self) -> dict[str, Any]:
        """The user's ``state_dict``; under ``compression`` what ``int8``, ``int4`` or ``powersgd`` has lost on this rank.

        Where each rank saves and loads its own, as many ranks on as many hosts go on with the same bits.
        """
        state, sender = super().state_dict(), self._sender
        feedback = sender.feedback() if sender is not None and sender.context.usable else None
        kept = None if feedback is None else feedback.of_this_rank()
        return {**state, "compression": kept} if kept else state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The user's ``add_param_group``; the new parameters are reduced too, each alone."""
        super().add_param_group(param_group)
        names = parameters.names_of_group(self, len(self.param_groups) - 1)
        self._parameter_names = {**names, **self._parameter_names}
        reducer = self._reducer
        if reducer is not None:
            reducer.add_names(names)
            reducer.add(parameters.grouped(replicated(names), None))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The user's ``load_state_dict``; a begun step starts anew.

        What compression has lost of gradients before is forgotten. A state that this rank has saved, in a world of as many
        ranks and hosts, brings its own; for others load what ``compression_state`` has returned after this.
        """
        if self._reducer is not None:
            self._reducer.restart()
        super().load_state_dict(state_dict)
        feedback = self._feedback()
        if feedback is not None:
            feedback.take(state_dict.get("compression"))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """``GradScaler.step`` asks this of fused optimizers, before it looks at the gradients and perhaps does not step.

        A rank without a backward pass learns here that the others' gradients are there to be unscaled.
        """
        reducer = self._reducer
        if reducer is not None:
            reducer.before_unscaling()
        return vars(self).get("_step_supports_amp_scaling", False)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        """Copies and pickles are plain optimizers of the user's class; wrap them again to distribute them."""
        _, _, *contents = super().__reduce_ex__(max(int(protocol), 2))
        return _empty_instance, (_plain_class(type(self)),), *contents


_DistributedOptimizer = _Distributed  # Horovod's name, by which programs know a distributed optimizer


class _Local(_Distributed):
    """What an optimizer of local steps has beyond, or in place of, that."""

    _periodic: Periodic | None = None  # None in a world of one without an outer optimizer, and in copies

    def synchronize(self) -> None:
        """Averages what the ranks have changed since the last time: before evaluating and saving.

        All ranks call it after the same step. Then all have the same parameters and buffers, bit by bit.

        Raises:
            MismatchError: ranks have taken different numbers of steps, or disagree otherwise; the same on all. All
                parameters are those of the last synchronisation then.
        """
        if self._periodic is not None:
            self._periodic.synchronize(self)

    def join(self) -> None:
        """Says that this rank has no more data: averages with the others until all ranks have called this.

        What this rank has changed since the last time counts once, and then it only takes what the others learn. When
        it returns all have the same parameters; training may go on then.
        """
        if self._periodic is not None:
            self._periodic.join(self)

    def count_samples(self, samples: int) -> None:
        """Says what the next step weighs, such as the number of its samples; before each step on all ranks, or never."""
        if self._periodic is not None:
            self._periodic.count_samples(samples)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises InvalidArgumentError: ``synchronize()`` averages parameters here, and not gradients before a step."""
        raise InvalidArgumentError(
            "skip_synchronize: every must not be set where a script synchronizes gradients, but is: synchronize() averages "
            "the parameters. Clip and unscale right after backward(), and call step() alone."
        )
        yield

    def state_dict(self) -> dict[str, Any]:
        """The user's ``state_dict``, and under ``local_steps`` what the next synchronisation needs.

        To be saved by each rank, or by one after ``synchronize()``. An optimizer without local steps loads it too.
        """
        state = super().state_dict()
        return state if self._periodic is None else {**state, "local_steps": self._periodic.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The user's ``load_state_dict``; all ranks call it. Without ``local_steps`` in it a period begins."""
        super().load_state_dict(state_dict)
        if self._periodic is not None:
            self._periodic.load(self, state_dict.get("local_steps"))

    def compression_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What ``Compression.int8`` or ``int4`` has lost of the changes so far; collective, the same on all ranks."""
        return {} if self._periodic is None else self._periodic.compression_state()

    def load_compression_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Goes on with what ``compression_state`` has returned, the same on all ranks, before the first step."""
        if self._periodic is not None:
            self._periodic.load_compression_state(state)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True has ``GradScaler`` call ``step()`` where it found an infinity, too: all ranks count the same steps."""
        return super()._step_supports_amp_scaling or self._periodic is not None

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports


class _OneStepLate(_Distributed):
    """What an optimizer has beyond, or in place of, that if it applies the gradients of the step before."""

    _delayed: Delayed | None = None  # None outside of the process set, and in copies

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's; a ``GradScaler`` that comes to them too late to unscale is refused."""
        if self._delayed is not None and self._delayed.has_exchanged:
            refuse_unscaling(sys._getframe(1))
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def synchronize(self) -> None:
        """Before a step: sends this rank's gradients, and puts those that the step is going to apply into their place.

        Then clip these, and step within ``skip_synchronize()``. Unscale before it, where a ``GradScaler`` is in use.
        """
        if self._delayed is not None:
            self._delayed.exchange(self)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The user's ``zero_grad``; what ``synchronize()`` has put there, and no step has applied, is given up."""
        if self._delayed is not None:
            self._delayed.discard()
        super().zero_grad(*args, **kwargs)

    def flush(self) -> None:
        """Applies the gradients of the last step; on all ranks, between two steps.

        Before evaluating, and at the end. The next step has nothing to apply then, as the first one.
        """
        if self._delayed is not None:
            self._delayed.flush(self)

    def state_dict(self) -> dict[str, Any]:
        """The user's ``state_dict``, and under ``delayed`` the gradients that the next step applies, by name.

        They are the same on all ranks, so any may save it, at any step, and a world of any size go on with it.
        """
        state = super().state_dict()
        return state if self._delayed is None else {**state, "delayed": self._delayed.state(self)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The user's ``load_state_dict``; all ranks call it. Without ``delayed`` in it the next step applies nothing."""
        if self._delayed is not None:
            self._delayed.load(self, state_dict.get("delayed"))
        super().load_state_dict(state_dict)

    @property
    def _sender(self) -> Reducer | Delayed | None:
        """In place of the reducer."""
        return self._delayed

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True has ``GradScaler`` call ``step()`` where it found an infinity, too: what is applied is of the step before."""
        return super()._step_supports_amp_scaling or self._delayed is not None

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports


class _OverlapForward(_Distributed):
    """What an optimizer has beyond, or in place of, that if ranks update shares and values come when they are needed."""

    _ahead: Ahead | None = None  # None in a world of one, outside of the process set, and in copies

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's; a ``GradScaler`` that looks at gradients finds this rank's share of them."""
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        if self._ahead is not None and is_unscaling(sys._getframe(1)):
            return self._ahead.groups_to_unscale(groups)
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes whose gradients are summed before they travel; to be set between two steps."""
        return self._passes_alone if self._ahead is None else self._ahead.passes.per_step

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        check_passes(passes)
        self._passes_alone = passes
        if self._ahead is not None:
            self._ahead.passes.set_per_step(passes)

    def synchronize(self) -> None:
        """Waits until the parameters have the values of the last step; on this rank alone, at any time.

        Needed only where a parameter is used by what torch does not see, such as memory that NumPy shares, an extension
        in C++ or another thread: all else waits by itself.
        """
        if self._ahead is not None:
            self._ahead.settle()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this block gradients are only added up on this rank; the first backward pass after it sends them."""
        ahead = self._ahead
        with accumulating(), ahead.passes.silence() if ahead is not None else nullcontext():
            yield

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over all gradients of this optimizer; on all ranks, before ``step()``.

        Returns:
            The norm before, the same on all ranks; float64, a scalar.

        Raises:
            InvalidArgumentError: the norm is not finite, and that was to be said.
        """
        if self._ahead is not None:
            return self._ahead.clip(max_norm, norm_type, error_if_nonfinite)
        trained = [parameter for group in self.param_groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(trained, max_norm, norm_type, error_if_nonfinite).double()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The user's ``zero_grad``; a step starts anew, and if the one before came to no end, on all ranks together."""
        if self._ahead is not None:
            sets_to_none = args[0] if args else kwargs.get("set_to_none", True)
            self._ahead.discard(zeros=not sets_to_none)
        super().zero_grad(*args, **kwargs)

    def register_step_pre_hook(self, hook: Callable) -> Any:
        """The user's ``register_step_pre_hook``; its hooks come before the update."""
        handle = super().register_step_pre_hook(hook)
        if self._ahead is not None:
            self._optimizer_step_pre_hooks.move_to_end(self._ahead.step_hook)
        return handle

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Puts the shares of the optimizer's state together on rank ``to``, or on all with None; on all ranks together.

        ``state_dict()`` returns it there until the next step; any optimizer of this class loads it, on any number of ranks.
        """
        if self._ahead is not None:
            self._ahead.state.consolidate(to)

    def state_dict(self) -> dict[str, Any]:
        """The user's ``state_dict``, with the whole state: after ``consolidate_state_dict``, or before the first step.

        Raises:
            InvalidArgumentError: this rank has its share alone.
        """
        if self._ahead is None:
            return super().state_dict()
        with self._ahead.state.shown_whole("state_dict"):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The user's ``load_state_dict`` of whole state, on all ranks; each keeps its share from the first step on."""
        if self._ahead is not None:
            self._ahead.state.forget()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UnsupportedError: shares are dealt out when the optimizer is wrapped."""
        if self._ahead is not None:
            raise UnsupportedError(
                "add_param_group: expected all parameters when the optimizer was wrapped with overlap_forward, which dealt them "
                "out, but found new ones. Add them before, or wrap the optimizer again without overlap_forward."
            )
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False has ``GradScaler`` unscale the gradients itself, also where the user's class could."""
        return self._ahead is None and super()._step_supports_amp_scaling

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        """As of any distributed optimizer, as long as the state is whole."""
        if self._ahead is not None and not self._ahead.state.is_whole:
            raise UnsupportedError(
                "copy of an optimizer: expected its whole state but found this rank's share of it (overlap_forward). Call "
                "consolidate_state_dict() on all ranks, and copy state_dict()."
            )
        return super().__reduce_ex__(protocol)


def _plain_class(distributed: type) -> type:
    """The user's class: what comes next to the methods that were put in front of it."""
    order = distributed.__mro__
    return order[order.index(_Distributed) + 1]


def _empty_instance(plain: Any) -> torch.optim.Optimizer:
    """What copies and unpickled optimizers start from, before they get their state."""
    return plain.__new__(plain)


def _make_distributed(optimizer: torch.optim.Optimizer, methods: type[_Distributed]) -> None:
    """Gives the optimizer the methods and the pre-hook; one that has them is set back, to be wrapped anew."""
    was_distributed = isinstance(optimizer, _Distributed)
    if was_distributed:
        _set_back(optimizer)
        kinds = (_Local, _OneStepLate, _OverlapForward, _Distributed)
        if next(kind for kind in type(optimizer).__mro__ if kind in kinds) is methods:
            return
    plain = _plain_class(type(optimizer)) if was_distributed else type(optimizer)
    described = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    distributing = type(plain.__name__, (methods, plain), described)
    # Programs for Horovod take the class's only base for the optimizer's own: Lightning derives another class from it.
    optimizer.__class__ = type(plain.__name__, (distributing,), described)
    if was_distributed:
        return
    # A pre-hook rather than an override of step(): a scheduler made before has put its own step() on the object.
    # It goes first, so that hooks of the user see reduced gradients.
    hook = optimizer.register_step_pre_hook(_reduce_before_step)
    optimizer._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)
    optimizer.register_step_post_hook(_after_step)


def _set_back(optimizer: Any) -> None:
    """Ends what was made for a distributed optimizer before."""
    if optimizer._reducer is not None:
        optimizer._reducer.close()
        optimizer._reducer = None
    for part in ("_periodic", "_delayed"):
        if getattr(optimizer, part, None) is not None:
            getattr(optimizer, part).close()
            setattr(optimizer, part, None)
    if getattr(optimizer, "_ahead", None) is not None:
        ahead, optimizer._ahead = optimizer._ahead, None
        ahead.close()


def _reduce_before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """Runs before every ``step()``; ``args`` starts with the optimizer itself, and a closure may follow."""
    reducer = getattr(optimizer, "_reducer", None)
    if reducer is None:
        return None
    reducer.refuse_sharing(optimizer.param_groups)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None:
        reducing = _closure_of_all(closure, reducer)
        return ((optimizer, reducing, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": reducing})
    if not reducer.before_step():
        warnings.warn(
            "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): nothing is reduced "
            "again. Put the step within that block.",
            stacklevel=3,
        )
    return None


def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    """Runs after every ``step()`` that did not fail."""
    reducer = getattr(optimizer, "_reducer", None)
    if reducer is not None:
        reducer.after_step()


def _closure_of_all(closure: Callable[[], Any], reducer: Reducer) -> Callable[[], Any]:
    """The user's closure with gradients and loss of all ranks, as one process with all batches has them."""

    def reducing_closure() -> Any:
        loss = closure()
        reducer.after_evaluation()
        return _reduced(loss, reducer)

    return reducing_closure


def _reduced(loss: Any, reducer: Reducer) -> Any:
    # Line searches compare losses, and ranks that compare different ones would part.
    is_tensor = isinstance(loss, torch.Tensor)
    if not (loss.is_floating_point() if is_tensor else isinstance(loss, Real)):
        return loss  # None, or what no optimizer compares
    total = loss.detach().clone() if is_tensor else torch.tensor(float(loss), dtype=torch.float64)
    buffer, settings = buffer_of(total), reducer.settings
    settings.session.context.submit(
        "allreduce", f"{reducer.prefix}.loss", [buffer], [buffer],
        reduction=settings.name, process_set=settings.session.process_set_id, waits=True,
    ).wait()  # fmt: skip
    return total if is_tensor else total.item()


# ---- arguments ----


def _check_arguments(optimizer: Any, passes: int, op: int, predivide: float) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"DistributedOptimizer: expected a torch.optim.Optimizer but found a {type(optimizer).__name__}."
        )
    check_passes(passes)
    check_scaling("DistributedOptimizer", op, predivide, adasum=True)


def _check_adasum(optimizer: torch.optim.Optimizer, averages_passes: bool) -> None:
    if averages_passes:
        raise InvalidArgumentError(
            "DistributedOptimizer: average_aggregated_gradients must be False with op=Adasum, which sends no gradients, but "
            "is True. Leave it out."
        )
    if isinstance(optimizer, _Distributed):
        raise InvalidArgumentError(
            "DistributedOptimizer: expected a plain optimizer for op=Adasum but found a distributed one. Make a new one, and "
            "load its state."
        )


def _check_buckets(asked_for: bool, compression_by_core: str | None) -> None:
    if asked_for and compression_by_core is None:
        raise InvalidArgumentError(
            "DistributedOptimizer: gradient_as_bucket_view needs compression none, fp16, bf16, int8 or int4, but it is a class of "
            "own, which takes gradients one by one."
        )
