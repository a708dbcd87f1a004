"""Batch normalisation over the batches of all ranks: as ``torch.nn.BatchNorm`` computes it on the concatenated batch.

Forward, each rank sends its count, mean and variance for every channel in one allgather, and all combine them in rank
order and float64 (Chan, Golub and LeVeque, 1979: "Updating formulae and a pairwise algorithm for computing sample
variances"). Backward, the two sums over the batch that the gradient of the input needs are added in one allreduce.

In an elastic job whose steps survive, both are done again among those that are left. So in the step in which a rank dies
some layers have the statistics of its batch, and others do not; but all ranks have the same.
"""

import weakref
from collections.abc import Callable, Generator
from typing import NamedTuple, NoReturn

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ringtrain._runtime.context import Context, current
from ringtrain._runtime.pending import Operation
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, id_of, size_of
from ringtrain._training.adapter.numbering import next_number
from ringtrain._training.step_guard import StepGuard, require_all_ranks, under_way
from ringtrain.errors import InvalidArgumentError, RingtrainError
from ringtrain.torch.eager import eager
from ringtrain.torch.tensors import buffer_of, finish, received


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation with the statistics of all ranks' batches, which may differ in size; one may be empty.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), hvd.SyncBatchNorm(8), torch.nn.Linear(8, 1))
        >>> model(x).mean().backward()

    In evaluation, in a world of one and on ranks outside of the process set it is plain batch normalisation.

    Args:
        num_features: C of an input of shape (N, C, ...), of any floating-point dtype.
        eps: added to the variance.
        momentum: weight of the newest batch in the running statistics; None for their plain average.
        affine: whether there are a weight and a bias.
        track_running_stats: whether there are running statistics.
        process_set: the ranks that share their statistics.

    Raises:
        InvalidArgumentError: an input of fewer than 2 dimensions, or no more than one value for each channel on all
            ranks together.
        UnsupportedError: a process set, in a training whose steps survive a change of the world.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """The module with every ``BatchNorm`` in it, of any number of dimensions, replaced by a ``SyncBatchNorm``.

        Example:
            >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
            >>> model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)

        Parameters and buffers stay the same objects, so an optimizer made before still steps them.
        """
        replaced = {each: cls._like(each, process_set) for each in module.modules() if _is_plain(each)}
        for parent in list(module.modules()):
            for name, child in list(parent._modules.items()):  # named_children() would hide a second name
                if child in replaced:
                    setattr(parent, name, replaced[child])
        return replaced.get(module, module)

    @classmethod
    def _like(cls, plain: _BatchNorm, process_set: ProcessSet) -> "SyncBatchNorm":
        settings = plain.eps, plain.momentum, plain.affine, plain.track_running_stats
        module = cls(plain.num_features, *settings, process_set)
        module._parameters, module._buffers = plain._parameters, plain._buffers
        return module.train(plain.training)

    @eager
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises ``input`` of shape (N, C, ...); the result has its shape and dtype.

        Raises:
            UnsupportedError: on a process set, in a training by ``elastic.State``.
        """
        if under_way() is not None:
            require_all_ranks("SyncBatchNorm", self.process_set, "TorchState")
        if not (self.training and self.process_set.included() and size_of(self.process_set) > 1):
            return super().forward(input)
        ranks = _Ranks(self)
        try:
            self._check_input_dim(input)
        except RingtrainError as problem:
            if under_way() is not None:  # the others do the step without this rank
                raise
            ranks.refuse(problem)
        moments = _moments(input.detach(), ranks)
        self._update_running_statistics(moments)
        return _Normalize.apply(input, self.weight, self.bias, self.eps, moments, ranks)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise InvalidArgumentError(
                f"SyncBatchNorm: expected an input of shape (N, C, ...) but found {tuple(input.shape)}. Reshape it."
            )

    @torch.no_grad()
    def _update_running_statistics(self, moments: "_Moments") -> None:
        if not self.track_running_stats:
            return
        self.num_batches_tracked.add_(1)
        newest = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        unbiased = moments.variance * (moments.count / (moments.count - 1))
        self.running_mean.lerp_(moments.mean.to(self.running_mean.dtype), newest)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), newest)


class _Moments(NamedTuple):
    """Of each channel over all ranks: number of values, mean and biased variance, in float64."""

    count: float  # type: ignore[assignment]  # tuple has a method of that name
    mean: torch.Tensor
    variance: torch.Tensor


class _Ranks:
    """Those who share a module's statistics, in whatever world is open."""

    def __init__(self, module: SyncBatchNorm):
        self._module = module

    def weight(self) -> int | None:
        """What this rank's loss counts in that of the step; None if all count alike."""
        transaction = self._transaction()
        return None if transaction is None else transaction.weight()

    def rows(self, row: torch.Tensor) -> torch.Tensor:
        """Everyone's row, stacked in rank order."""
        sent = row.unsqueeze(0)
        operation = self._released(lambda: self._submit("allgather", "moments", sent, None))
        finish(operation, sent)
        return received(operation, sent)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of everyone's gradients of its own loss, in units of this rank's, whose weight may be another one."""
        weight = self.weight()
        sent = tensor if weight is None else tensor * weight
        result = torch.empty_like(tensor)
        finish(self._released(lambda: self._submit("allreduce", "gradient", sent, result)), result)
        return result / weight if weight else result

    def refuse(self, problem: RingtrainError) -> NoReturn:
        """Raises what is wrong with this rank's input on all of them, in place of the moments."""
        context, identity = current(), id_of(self._module.process_set)
        context.refuse("allgather", self._name(context, identity, "moments"), identity, problem)

    def _submit(self, kind: str, part: str, tensor: torch.Tensor, result: torch.Tensor | None) -> Operation:
        context, identity = current(), id_of(self._module.process_set)
        into = [None if result is None else buffer_of(result)]
        name = self._name(context, identity, part)
        return context.submit(kind, name, [buffer_of(tensor)], into, process_set=identity, waits=True)

    def _name(self, context: Context, process_set: int, part: str) -> str:
        return f"{_name_of(self._module, context, process_set)}.{part}"

    def _released(self, submit: Callable[[], Operation]) -> Operation:
        """The operation, or the one that was submitted anew in another world; others of the step may be."""
        transaction = self._transaction()
        if transaction is None:
            return submit()

        def attempt() -> Generator[Operation, None, Operation]:
            operation = submit()
            while not operation.finished():
                yield operation
            operation.wait()
            return operation

        return transaction.use_within(attempt)

    def _transaction(self) -> StepGuard | None:
        """The one that the step is; its members are all ranks."""
        return under_way() if self._module.process_set is global_process_set else None


_names: "weakref.WeakKeyDictionary[Context, weakref.WeakKeyDictionary[SyncBatchNorm, str]]"
_names = weakref.WeakKeyDictionary()


def _name_of(module: SyncBatchNorm, context: Context, process_set: int) -> str:
    """Modules are named in the order of their first use in a world, which is the same on all ranks, so copies differ."""
    names = _names.setdefault(context, weakref.WeakKeyDictionary())
    if module not in names:
        names[module] = f"sync_batch_norm.{next_number(context, process_set, 'sync_batch_norm')}"
    return names[module]


def _moments(input: torch.Tensor, ranks: _Ranks) -> _Moments:
    channels = input.shape[1]
    row = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=input.device)
    if input.numel() > 0 and ranks.weight() != 0:
        variance, mean = torch.var_mean(_wide(input), _batch_dimensions(input), correction=0)
        row[0], row[1 : 1 + channels], row[1 + channels :] = input.numel() / channels, mean, variance
    rows = ranks.rows(row)
    counts, means, variances = rows[:, :1], rows[:, 1 : 1 + channels], rows[:, 1 + channels :]
    count = counts.sum().item()
    if count <= 1:
        raise InvalidArgumentError(
            f"SyncBatchNorm: expected more than one value for each channel on all ranks together but found "
            f"{count:.0f}. Make the batch larger, or call eval()."
        )
    mean = (counts * means).sum(0) / count
    return _Moments(count, mean, (counts * (variances + (means - mean) ** 2)).sum(0) / count)


class _Normalize(torch.autograd.Function):
    """weight * (input - mean) / sqrt(variance + eps) + bias, where mean and variance depend on all ranks' inputs."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
        moments: _Moments, ranks: _Ranks,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(input, weight)
        ctx.eps, ctx.moments, ctx.ranks = eps, moments, ranks
        wide = torch.promote_types(input.dtype, torch.float32)
        mean, variance = moments.mean.to(wide), moments.variance.to(wide)
        return torch.nn.functional.batch_norm(input, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple:
        input, weight = ctx.saved_tensors
        dimensions = _batch_dimensions(input)
        wide = _wide(gradient)
        count, mean, variance = ctx.moments

        def by_channel(values: torch.Tensor) -> torch.Tensor:
            return values.to(wide.dtype).view(1, -1, *[1] * (input.dim() - 2))

        inverse_deviation = torch.rsqrt(variance + ctx.eps)
        normalized = (_wide(input) - by_channel(mean)) * by_channel(inverse_deviation)
        of_bias, of_weight = wide.sum(dimensions), (wide * normalized).sum(dimensions)
        of_input = None
        if ctx.needs_input_grad[0]:
            sums = ctx.ranks.sum(torch.stack([of_bias, of_weight]).double()) / count
            scale = inverse_deviation if weight is None else inverse_deviation * weight
            of_input = (wide - by_channel(sums[0]) - normalized * by_channel(sums[1])) * by_channel(scale)
            of_input = of_input.to(input.dtype)
        if weight is None:
            return of_input, None, None, None, None, None
        return of_input, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None, None


def _is_plain(module: torch.nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)


def _batch_dimensions(input: torch.Tensor) -> list[int]:
    return [dimension for dimension in range(input.dim()) if dimension != 1]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """16-bit floats as float32; float32 and float64 as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
