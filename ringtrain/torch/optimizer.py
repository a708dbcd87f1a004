"""``DistributedOptimizer``: the user's optimizer, which from then on steps with the gradients of all ranks.

The object stays the same one: its class becomes a subclass with a few methods more, and a step pre-hook waits for the
reductions. So its defaults, state, schedulers, hooks and pickles are what they were. ``gradients`` does the reducing.
"""

import itertools
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ringtrain.context import Context, current
from ringtrain.errors import InvalidArgumentError
from ringtrain.operations import Average, Sum
from ringtrain.process_sets import ProcessSet, global_process_set, id_of
from ringtrain.torch.compression import Compression, Compressor
from ringtrain.torch.gradients import GradientReduction, Group, Reduction

# Optimizers of one process set are numbered in the order of their making, which is the same on all its members;
# two that hold parameters of equal names then never share a name.
_optimizer_counts: "weakref.WeakKeyDictionary[Context, dict[int, itertools.count]]" = weakref.WeakKeyDictionary()


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
) -> torch.optim.Optimizer:
    """Makes an optimizer step with the gradients of all ranks, and returns it.

    Each gradient starts to travel when ``backward()`` has computed it; ``step()`` waits for all of them. N ranks with
    equal batches and a mean loss then train as one process does with the N batches in one. A parameter that no rank
    used keeps the gradient ``None``; one that some ranks used counts zeros for the others. With a closure, ``step()``
    reduces the loss too. In a world of one nothing changes.

    Args:
        optimizer: any ``torch.optim.Optimizer``; changed in place, so schedulers made before stay right.
        named_parameters: ``model.named_parameters()``: the names in error messages and traces. It may hold more
            parameters than the optimizer, not fewer. All ranks must use the same names.
        compression: how gradients travel: ``Compression.none``, ``fp16``, ``bf16`` or a class like them.
        backward_passes_per_step: backward passes whose gradients are summed here before they travel.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: with ``Average``, divides by this before the addition and by the rest after it.
        num_groups: Horovod's older spelling of ``groups`` with an int.
        groups: an int: that many groups of parameters, each reduced as one operation, all or nothing; or the groups
            themselves as lists of parameters; the parameters in none travel alone.
        sparse_as_dense: sends sparse gradients as dense ones.
        process_set: the ranks that train together. On another rank the optimizer stays as it is.

    Raises:
        InvalidArgumentError: not an optimizer, or names, groups, ``op`` or a number that cannot be.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> loss(model(x), y).backward()
        >>> optimizer.step()
    """
    _check_arguments(optimizer, backward_passes_per_step, op, gradient_predivide_factor)
    context = current()
    known = _known_names(named_parameters)
    names = _names_of(optimizer, known)
    groups = _checked_groups(num_groups, groups, set(names))
    _make_distributed(optimizer)
    if process_set.size() == 1 or not process_set.included():
        return optimizer
    averaging = op == Average
    how = Reduction(
        context=context,
        process_set=id_of(process_set),
        name="average" if averaging else "sum",
        prescale=1.0 / gradient_predivide_factor,
        postscale=gradient_predivide_factor,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
    )
    reduction = GradientReduction(how, f"optimizer.{_next_number(how)}", backward_passes_per_step)
    reduction.names = {
        parameter: f"{reduction.prefix}.{name}" for parameter, name in {**(known or {}), **names}.items()
    }
    reduction.add(_grouped(list(names), groups, reduction))
    optimizer._gradient_reduction = reduction
    return optimizer


class _Distributed:
    """The methods that a distributed optimizer has beyond, or around, those of the user's class."""

    _gradient_reduction: GradientReduction | None = None  # None in a world of one, and in copies

    def synchronize(self) -> None:
        """Waits until all gradients are reduced, to clip them for example; then step within ``skip_synchronize()``."""
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

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes the number of backward passes in a step, between two steps."""
        _check_passes(passes)
        if self._gradient_reduction is not None:
            self._gradient_reduction.passes_per_step = passes

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The user's ``zero_grad``; gradients that still travel arrive first, and a begun window starts anew."""
        if self._gradient_reduction is not None:
            self._gradient_reduction.discard()
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The user's ``add_param_group``; the new parameters are reduced too, each alone."""
        super().add_param_group(param_group)
        reduction = self._gradient_reduction
        if reduction is not None:
            _name_last_group(self.param_groups, reduction)
            reduction.add(_grouped(self.param_groups[-1]["params"], None, reduction))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The user's ``load_state_dict``; a begun window starts anew."""
        if self._gradient_reduction is not None:
            self._gradient_reduction.discard()
        super().load_state_dict(state_dict)

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
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None and not reduction.skipping:
        reducing = reduction.closure_of_all(closure)
        return ((optimizer, reducing, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": reducing})
    if not reduction.before_step():
        warnings.warn(
            "step() after synchronize() reduces nothing again. Put it within optimizer.skip_synchronize().",
            stacklevel=3,
        )
    return None


# ---- names ----


def _names_of(optimizer: torch.optim.Optimizer, known: dict[torch.Tensor, str] | None) -> dict[torch.Tensor, str]:
    """The optimizer's parameters in its order, with the names that all ranks know them by."""
    names = {}
    for group_index, group in enumerate(optimizer.param_groups):
        own_names = group.get("param_names")  # torch keeps them when it was given named parameters
        for index, parameter in enumerate(group["params"]):
            if known is None:
                names[parameter] = own_names[index] if own_names else f"noname.{group_index}.{index}"
            elif parameter in known:
                names[parameter] = known[parameter]
            else:
                raise InvalidArgumentError(
                    f"DistributedOptimizer: named_parameters must name every parameter of the optimizer, but lacks "
                    f"number {index} of group {group_index}, of shape {tuple(parameter.shape)}. "
                    "Pass the model's named_parameters()."
                )
    _require_unique(names.values())
    return names


def _known_names(named_parameters: Iterable[tuple[str, torch.Tensor]] | None) -> dict[torch.Tensor, str] | None:
    if named_parameters is None:
        return None
    pairs = list(named_parameters)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise InvalidArgumentError(
                f"DistributedOptimizer: named_parameters must be (name, parameter) tuples, but holds a "
                f"{type(pair).__name__}. Pass model.named_parameters()."
            )
    _require_unique(name for name, _ in pairs)
    return {parameter: name for name, parameter in pairs}


def _require_unique(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidArgumentError(
                f"DistributedOptimizer: names of parameters must be unique, but '{name}' comes twice. "
                "Put the model's name in front."
            )
        seen.add(name)


def _name_last_group(param_groups: list[dict[str, Any]], reduction: GradientReduction) -> None:
    """Names parameters that were added later: as ``named_parameters`` did, else as torch does, else by number."""
    last = len(param_groups) - 1
    own_names = param_groups[last].get("param_names")
    for index, parameter in enumerate(param_groups[last]["params"]):
        name = own_names[index] if own_names else f"noname.{last}.{index}"
        reduction.names.setdefault(parameter, f"{reduction.prefix}.{name}")


def _next_number(how: Reduction) -> int:
    counts = _optimizer_counts.setdefault(how.context, {})
    return next(counts.setdefault(how.process_set, itertools.count()))


# ---- groups ----


def _checked_groups(
    num_groups: int, groups: Any, parameters: set[torch.Tensor]
) -> int | list[list[torch.Tensor]] | None:
    if num_groups:
        warnings.warn("num_groups has become groups.", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1:
            raise InvalidArgumentError(f"DistributedOptimizer: groups must be at least 1, but is {groups}.")
        return groups
    if not (isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups)):
        raise InvalidArgumentError(
            f"DistributedOptimizer: groups must be an int or lists of parameters, but is {groups!r}."
        )
    _check_members(groups, parameters)
    return [list(group) for group in groups if group]


def _grouped(
    parameters: list[torch.Tensor], groups: int | list[list[torch.Tensor]] | None, reduction: GradientReduction
) -> list[Group]:
    """The parameters in groups, in an order that is the same on all ranks."""
    if groups is None:
        members = []
    elif isinstance(groups, int):
        count = min(groups, len(parameters))
        bounds = [len(parameters) * index // count for index in range(count + 1)]
        members = [parameters[start:end] for start, end in itertools.pairwise(bounds)]
    else:
        members = groups
    taken = {parameter for group in members for parameter in group}
    alone = [Group(reduction.names[parameter], [parameter]) for parameter in parameters if parameter not in taken]
    return [Group(f"{reduction.prefix}.group.{index}", group) for index, group in enumerate(members)] + alone


def _check_members(groups: Sequence[Sequence[torch.Tensor]], parameters: set[torch.Tensor]) -> None:
    seen: set[torch.Tensor] = set()
    for index, group in enumerate(groups):
        for parameter in group:
            if parameter not in parameters or parameter in seen:
                found = "one twice" if parameter in seen else "one that is not the optimizer's"
                raise InvalidArgumentError(
                    f"DistributedOptimizer: groups must hold the optimizer's parameters, each once, but group {index} "
                    f"holds {found}."
                )
            seen.add(parameter)


# ---- arguments ----


def _check_arguments(optimizer: Any, passes: int, op: int, predivide: float) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"DistributedOptimizer: expected a torch.optim.Optimizer but found a {type(optimizer).__name__}."
        )
    _check_passes(passes)
    if op not in (Average, Sum):
        raise InvalidArgumentError(
            f"DistributedOptimizer: op must be Average ({Average}) or Sum ({Sum}), but is {op!r}."
        )
    if predivide != 1.0 and op != Average:
        raise InvalidArgumentError("DistributedOptimizer: gradient_predivide_factor needs op=Average, but op is Sum.")
    if not predivide > 0:
        raise InvalidArgumentError(
            f"DistributedOptimizer: gradient_predivide_factor must be above 0, but is {predivide!r}."
        )


def _check_passes(passes: Any) -> None:
    if not isinstance(passes, int) or passes < 1:
        raise InvalidArgumentError(
            f"DistributedOptimizer: backward_passes_per_step must be at least 1, but is {passes!r}."
        )
