"""``DistributedOptimizer``: the user's optimizer, which from then on steps with the gradients of all ranks.

The object stays the same one: its class becomes a subclass with a few methods more, and a step pre-hook waits for the
reductions. So its defaults, state, schedulers, hooks and pickles are what they were. ``window`` does the reducing.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ringtrain.context import current
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.gradient_arguments import check_passes, check_scaling
from ringtrain.operations import Adasum, Average
from ringtrain.process_sets import ProcessSet, global_process_set, id_of
from ringtrain.torch import parameters
from ringtrain.torch.accumulation import accumulating
from ringtrain.torch.coexistence import refuse_shared_parameters, refuse_wrapped_optimizer
from ringtrain.torch.compression import Compression, Compressor, compression_in_the_core
from ringtrain.torch.gradients import Reduction
from ringtrain.torch.numbering import next_number
from ringtrain.torch.tensors import buffer_of
from ringtrain.torch.window import GradientReduction


def DistributedOptimizer(  # noqa: N802 - the name that Horovod scripts call
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    average_aggregated_gradients: bool = False,
    gradient_as_bucket_view: bool = False,
) -> torch.optim.Optimizer:
    """Makes an optimizer step with the gradients of all ranks, and returns it.

    Each gradient starts to travel when ``backward()`` has computed it, and ``backward()`` returns when those of this
    pass have arrived: what clips or unscales them then has those of all ranks. N ranks with equal batches and a mean
    loss train as one process does with the N batches in one. A parameter that no rank used keeps the gradient ``None``;
    one that some ranks used counts zeros for the others. With a closure, ``step()`` reduces the loss too. In a world of
    one nothing changes.

    All ranks call ``step()``, ``synchronize()`` and ``zero_grad()`` equally often. A rank may run no backward pass at
    all before a step, but must come to ``step()`` without waiting for the others first.

    Args:
        optimizer: any ``torch.optim.Optimizer``; changed in place, so schedulers made before stay right.
        named_parameters: ``model.named_parameters()``: the names in error messages and traces. It may hold more
            parameters than the optimizer, not fewer. All ranks must use the same names.
        compression: ``Compression.fp16`` or ``bf16`` send dense gradients between hosts as 16 bits, added in float32;
            or a class of your own, derived from ``Compression.none``, which is called for each gradient.
        backward_passes_per_step: backward passes whose gradients are summed here before they travel. See ``no_sync``.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: with ``Average``, divides by this before the addition and by the rest after it.
        num_groups: Horovod's older spelling of ``groups`` with an int.
        groups: an int: that many groups of parameters, each reduced as one operation, all or nothing; or the groups
            themselves as lists of parameters; the parameters in none travel alone.
        sparse_as_dense: sends sparse gradients as dense ones.
        process_set: the ranks that train together. On another rank the optimizer stays as it is.
        average_aggregated_gradients: divides the sum of a window by ``backward_passes_per_step``, as Keras users know
            it; also where a window is cut short, so that every sample weighs the same.
        gradient_as_bucket_view: once a few steps were alike, gradients become views of a few flat tensors, which travel
            as they are, as DDP's option of this name does. Then do not keep ``p.grad`` from one step to the next.

    Raises:
        InvalidArgumentError: not an optimizer, or names, groups, ``op`` or a number that cannot be; or another library
            averages these gradients already.
        UnsupportedError: another library holds these parameters in shards; or ``op`` is ``Adasum``.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> loss(model(x), y).backward()
        >>> optimizer.step()
    """
    refuse_wrapped_optimizer(optimizer)
    _check_arguments(optimizer, backward_passes_per_step, op, gradient_predivide_factor)
    context = current()
    known = parameters.known_names(named_parameters)
    names = parameters.names_of(optimizer, known)
    groups = parameters.checked_groups(num_groups, groups, set(names))
    refuse_shared_parameters(names.keys())
    _make_distributed(optimizer)
    if process_set.size() == 1 or not process_set.included():
        return optimizer
    by_core = compression_in_the_core(compression)
    _check_buckets(gradient_as_bucket_view, by_core)
    how = Reduction(
        context=context,
        process_set=id_of(process_set),
        averages=op == Average,
        prescale=1.0 / gradient_predivide_factor,
        postscale=gradient_predivide_factor,
        compression=by_core or "none",
        compressor=None if by_core else compression,
        sparse_as_dense=sparse_as_dense,
    )
    # Optimizers are numbered, so that two that hold parameters of equal names never share a name.
    prefix = f"optimizer.{next_number(context, how.process_set, 'optimizer')}"
    reduction = GradientReduction(
        how, prefix, backward_passes_per_step, average_aggregated_gradients, gradient_as_bucket_view
    )
    reduction.add_names({**(known or {}), **names})
    reduction.add(parameters.grouped(list(names), groups))
    optimizer._gradient_reduction = reduction
    return optimizer


class _Distributed:
    """The methods that a distributed optimizer has beyond, or around, those of the user's class."""

    _gradient_reduction: GradientReduction | None = None  # None in a world of one, and in copies

    def synchronize(self) -> None:
        """Reduces what ``backward()`` has not, at the end of a window that is cut short for example.

        Then step within ``skip_synchronize()``.
        """
        if self._gradient_reduction is not None:
            self._gradient_reduction.synchronize()
            self._gradient_reduction.asked = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this block ``step()`` takes the gradients as they are, because ``synchronize()`` was called before."""
        reduction = self._gradient_reduction
        if reduction is None:
            yield
            return
        reduction.skipping = True
        try:
            yield
        finally:
            reduction.skipping = False

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
        reduction = self._gradient_reduction
        with accumulating(), reduction.silence() if reduction is not None else nullcontext():
            yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes the number of backward passes in a step, between two steps."""
        check_passes(passes)
        if self._gradient_reduction is not None:
            self._gradient_reduction.passes_per_step = passes

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The user's ``zero_grad``; a window starts anew, and if the one before came to no end, on all ranks together."""
        if self._gradient_reduction is not None:
            self._gradient_reduction.discard()
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The user's ``add_param_group``; the new parameters are reduced too, each alone."""
        super().add_param_group(param_group)
        reduction = self._gradient_reduction
        if reduction is not None:
            names = parameters.names_of_group(self, len(self.param_groups) - 1)
            reduction.add_names(names)
            reduction.add(parameters.grouped(list(names), None))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The user's ``load_state_dict``; a begun window starts anew."""
        if self._gradient_reduction is not None:
            self._gradient_reduction.restart()
        super().load_state_dict(state_dict)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """``GradScaler.step`` asks this of fused optimizers, before it looks at the gradients and perhaps does not step.

        A rank without a backward pass learns here that the others' gradients are there to be unscaled.
        """
        reduction = self._gradient_reduction
        if reduction is not None and not reduction.skipping:
            reduction.synchronize_unchanged()
        return vars(self).get("_step_supports_amp_scaling", False)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = supports

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Copies and pickles are plain optimizers of the user's class; wrap them again to distribute them."""
        _, _, *contents = super().__reduce_ex__(max(protocol, 2))
        return _empty_instance, (type(self).__bases__[1],), *contents


def _empty_instance(plain: type) -> torch.optim.Optimizer:
    """What copies and unpickled optimizers start from, before they get their state."""
    return plain.__new__(plain)


def _make_distributed(optimizer: torch.optim.Optimizer) -> None:
    """Gives the optimizer the methods and the pre-hook; one that has them is set back, to be wrapped anew."""
    if isinstance(optimizer, _Distributed):
        if optimizer._gradient_reduction is not None:
            optimizer._gradient_reduction.close()
            optimizer._gradient_reduction = None
        return
    plain = type(optimizer)
    described = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    optimizer.__class__ = type(plain.__name__, (_Distributed, plain), described)
    # A pre-hook rather than an override of step(): a scheduler made before has put its own step() on the object.
    # It goes first, so that hooks of the user see reduced gradients.
    hook = optimizer.register_step_pre_hook(_reduce_before_step)
    optimizer._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)


def _reduce_before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """Runs before every ``step()``; ``args`` starts with the optimizer itself, and a closure may follow."""
    reduction = getattr(optimizer, "_gradient_reduction", None)
    if reduction is None:
        return None
    if not reduction.stepped:
        refuse_shared_parameters([parameter for group in optimizer.param_groups for parameter in group["params"]])
        reduction.stepped = True
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None and not reduction.skipping:
        reducing = _closure_of_all(closure, reduction)
        return ((optimizer, reducing, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": reducing})
    if not reduction.before_step():
        warnings.warn(
            "step() after synchronize() reduces nothing again. Put it within optimizer.skip_synchronize().",
            stacklevel=3,
        )
    return None


def _closure_of_all(closure: Callable[[], Any], reduction: GradientReduction) -> Callable[[], Any]:
    """The user's closure with gradients and loss of all ranks, as one process with all batches has them."""

    def reducing_closure() -> Any:
        loss = closure()
        reduction.synchronize()
        return None if loss is None else _reduced(loss, reduction)

    return reducing_closure


def _reduced(loss: Any, reduction: GradientReduction) -> Any:
    # Line searches compare losses, and ranks that compare different ones would part.
    is_tensor = isinstance(loss, torch.Tensor)
    total = loss.detach().clone() if is_tensor else torch.tensor(float(loss), dtype=torch.float64)
    buffer, how = buffer_of(total), reduction.how
    how.context.submit(
        "allreduce", f"{reduction.prefix}.loss", [buffer], [buffer],
        reduction=how.name, process_set=how.process_set, waits=True,
    ).wait()  # fmt: skip
    return total if is_tensor else total.item()


# ---- arguments ----


def _check_arguments(optimizer: Any, passes: int, op: int, predivide: float) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"DistributedOptimizer: expected a torch.optim.Optimizer but found a {type(optimizer).__name__}."
        )
    check_passes(passes)
    if op == Adasum:
        raise UnsupportedError(
            "DistributedOptimizer: op must be Average or Sum, but is Adasum, which this release lacks."
        )
    check_scaling("DistributedOptimizer", op, predivide)


def _check_buckets(asked_for: bool, compression_by_core: str | None) -> None:
    if asked_for and compression_by_core is None:
        raise InvalidArgumentError(
            "DistributedOptimizer: gradient_as_bucket_view needs compression none, fp16 or bf16, but it is a class of your "
            "own, which takes gradients one by one."
        )
