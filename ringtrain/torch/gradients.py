"""Reduction of one optimizer's gradients: from autograd's hooks to submissions, agreement on what is used, the wait.

``optimizer.DistributedOptimizer`` owns one ``GradientReduction``. Its hooks run in autograd's threads and only submit;
``synchronize`` runs in the thread that steps, and returns with every gradient reduced.

Which parameters take part. Ranks may run different branches of a model, so a parameter may have a gradient on some
ranks only. Its average then counts zeros for the others, as the concatenated batch would; a parameter that no rank
used keeps ``None``, so that weight decay and momentum leave it alone. A rank cannot see alone whether others used what
it did not, and an operation needs every member, so in each step all ranks submit one byte per parameter under a max.
That costs one small allreduce. A rank whose hooks have all fired submits it from the last hook, where it hides behind
the gradients, and need not read the answer: nothing can be missing there.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ringtrain.context import Context, Operation
from ringtrain.errors import InvalidArgumentError, RingtrainError, UnsupportedError
from ringtrain.torch.compression import Compressor
from ringtrain.torch.tensors import buffer_of

UNUSED, DENSE, SPARSE = 0, 1, 2  # what a rank's byte says about a parameter's gradient


@dataclass(frozen=True)
class Reduction:
    """How gradients are combined: one value for all parameters of an optimizer."""

    context: Context
    process_set: int
    name: str
    prescale: float = 1.0
    postscale: float = 1.0
    compression: type[Compressor] = Compressor
    sparse_as_dense: bool = False


@dataclass(eq=False)
class Group:
    """Parameters that travel as one operation: usually one. The other fields are of the current window.

    Attributes:
        ready_count: members whose gradient is complete.
        submitted: whether the operation was submitted, or refused: then there is none.
    """

    name: str
    parameters: list[torch.Tensor]
    ready_count: int = 0
    submitted: bool = False
    operation: Operation | None = None
    travelling: "list[_Travelling]" = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Travelling:
    """A gradient on its way, and the tensor that is sent for it (itself, or a contiguous, compressed or dense copy)."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    sent: torch.Tensor
    compression_context: object

    def arrive(self, compression: type[Compressor]) -> None:
        """Brings the result from the tensor that was sent to the gradient."""
        if self.sent is self.gradient:
            return
        result = compression.decompress(self.sent, self.compression_context)
        if self.gradient.is_sparse:
            self.parameter.grad = result.to_sparse(self.gradient.sparse_dim())
        else:
            self.gradient.copy_(result)


@dataclass(eq=False)
class GradientReduction:
    """Hooks, pending operations and the window of one optimizer.

    Attributes:
        how: the settings, the same on all ranks.
        prefix: of all names that this optimizer submits; unique among the optimizers of the process set.
        passes_per_step: backward passes that are summed here before their gradients travel.
        skipping: True while the user's ``skip_synchronize`` block runs.
        names: of the parameters, prefix included, the same on all ranks; it may name more than were added.
        asked: True once the user has called ``synchronize()`` in this window.
    """

    how: Reduction
    prefix: str
    passes_per_step: int = 1
    skipping: bool = False
    names: dict[torch.Tensor, str] = field(default_factory=dict)
    asked: bool = False
    _groups: list[Group] = field(default_factory=list)
    _group_of: dict[torch.Tensor, Group] = field(default_factory=dict)
    _hooks: dict[torch.Tensor, object] = field(default_factory=dict)
    _passes: dict[torch.Tensor, int] = field(default_factory=dict)
    _full_count: int = 0
    _usage: "list[int] | None" = None  # what this rank announced in this step
    _usage_tensor: torch.Tensor | None = None
    _usage_operation: Operation | None = None
    _synchronized: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)  # hooks of several devices run in several threads

    def __reduce__(self) -> tuple:
        """Copies and pickles of an optimizer are plain optimizers: hooks and a world do not travel."""
        return type(None), ()

    def add(self, groups: Sequence[Group]) -> None:
        """Takes over further parameters, which have names, in an order that is the same on all ranks."""
        if self.pending:
            self.synchronize()
        for group in groups:
            self._groups.append(group)
            self._group_of.update(dict.fromkeys(group.parameters, group))
        self._usage_tensor = torch.zeros(len(self._group_of), dtype=torch.uint8)
        self._attach_hooks()

    def close(self) -> None:
        """Removes the hooks; what is pending is finished first."""
        if self.pending:
            self.synchronize()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    @property
    def pending(self) -> bool:
        """Whether gradients are travelling."""
        return self._usage is not None or any(group.submitted for group in self._groups)

    # ---- the way out: hooks ----

    def _attach_hooks(self) -> None:
        # A frozen parameter cannot have a hook. One that is unfrozen later travels from synchronize() until it has.
        on_gradient = weakref.WeakMethod(self._on_gradient)
        for parameter in self._group_of:
            if parameter.requires_grad and parameter not in self._hooks:
                hook = _calls(on_gradient)
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        with self._lock:
            self._synchronized = self.asked = False
            passes = self._passes.get(parameter, 0) + 1
            if passes > self.passes_per_step:
                raise InvalidArgumentError(
                    f"backward '{self.names[parameter]}': expected {self.passes_per_step} backward passes in a step "
                    f"but found another one. Call step() or zero_grad(), or raise backward_passes_per_step."
                )
            self._passes[parameter] = passes
            if passes < self.passes_per_step:
                return
            group = self._group_of[parameter]
            group.ready_count += 1
            if group.ready_count == len(group.parameters):
                self._submit(group, group.parameters)
            self._full_count += 1
            if self._full_count == len(self._hooks):
                self._announce_usage()

    def _submit(self, group: Group, parameters: Sequence[torch.Tensor]) -> None:
        how = self.how
        group.submitted = True
        try:
            group.travelling = [self._prepare(parameter) for parameter in parameters]
            buffers = [buffer_of(each.sent) for each in group.travelling]
        except RingtrainError as problem:  # seen by this rank alone: the others must not wait for it
            how.context.refuse("allreduce", group.name, how.process_set, problem)
        group.operation = how.context.submit(
            "allreduce", group.name, buffers, buffers,
            reduction=how.name, prescale=how.prescale, postscale=how.postscale, process_set=how.process_set,
        )  # fmt: skip

    def _prepare(self, parameter: torch.Tensor) -> _Travelling:
        gradient = parameter.grad
        dense = gradient.to_dense() if gradient.is_sparse and self.how.sparse_as_dense else gradient
        if dense.layout is not torch.strided:
            raise UnsupportedError(
                f"gradient of '{self.names[parameter]}': expected a dense one but found {gradient.layout}. "
                "Pass sparse_as_dense=True, or use dense gradients."
            )
        if self.how.compression is Compressor and dense.is_contiguous():
            return _Travelling(parameter, gradient, dense, None)
        with torch.no_grad():
            sent, compression_context = self.how.compression.compress(dense)
            return _Travelling(parameter, gradient, sent.contiguous(), compression_context)

    # ---- agreement on what is used ----

    def _announce_usage(self) -> None:
        self._usage = [_usage_of(parameter) for parameter in self._group_of]
        self._usage_tensor.copy_(torch.tensor(self._usage, dtype=torch.uint8))
        buffer = buffer_of(self._usage_tensor)
        how = self.how
        self._usage_operation = how.context.submit(
            "allreduce", f"{self.prefix}.used", [buffer], [buffer], reduction="max", process_set=how.process_set
        )

    def _agreed_usage(self) -> dict[torch.Tensor, int]:
        if UNUSED not in self._usage:
            return dict(zip(self._group_of, self._usage, strict=True))
        self._usage_operation.wait()
        return dict(zip(self._group_of, self._usage_tensor.tolist(), strict=True))

    # ---- the way back ----

    def synchronize(self) -> None:
        """Returns when every gradient that any rank has is reduced; all ranks must call it the same number of times.

        Raises:
            RingtrainError: ranks disagree about a gradient, or the world ended. Nothing is pending afterwards.
        """
        try:
            with self._lock:
                problems = self._submit_remaining()
        except BaseException:
            self.reset()  # the operations keep their tensors until they are done
            raise
        problems += self._wait_for_all()
        self.reset()
        if problems:
            raise problems[0]
        self._synchronized = True

    def _submit_remaining(self) -> list[RingtrainError]:
        """Submits what no hook has. Goes on after refusals, since other ranks wait for the rest, and returns them."""
        problems: list[RingtrainError] = []
        self._attach_hooks()
        if self._usage is None:
            self._announce_usage()
        used_here = dict(zip(self._group_of, self._usage, strict=True))
        for group in self._waiting_groups():  # complete ones need not await the others' answer
            if all(used_here[parameter] for parameter in group.parameters):
                self._submit_noting(group, group.parameters, problems)
        used = self._agreed_usage()
        for group in self._waiting_groups():
            members = [parameter for parameter in group.parameters if used[parameter]]
            for parameter in members:
                _fill_missing(parameter, used[parameter])
            if members:
                self._submit_noting(group, members, problems)
        return problems

    def _submit_noting(self, group: Group, parameters: Sequence[torch.Tensor], problems: list[RingtrainError]) -> None:
        try:
            self._submit(group, parameters)
        except RingtrainError as problem:
            problems.append(problem)

    def _waiting_groups(self) -> list[Group]:
        return [group for group in self._groups if not group.submitted]

    def _wait_for_all(self) -> list[RingtrainError]:
        problems: list[RingtrainError] = []
        for group in self._groups:
            if group.operation is not None:
                try:
                    group.operation.wait()
                    self._take_results(group)
                except RingtrainError as problem:
                    problems.append(problem)
        try:
            self._usage_operation.wait()
        except RingtrainError as problem:
            problems.append(problem)
        return problems

    @torch.no_grad()
    def _take_results(self, group: Group) -> None:
        for each in group.travelling:
            each.arrive(self.how.compression)

    def reset(self) -> None:
        """Starts a new window and forgets what was submitted in this one."""
        for group in self._groups:
            group.ready_count, group.submitted, group.operation, group.travelling = 0, False, None, []
        self._passes.clear()
        self._full_count = 0
        self._usage = self._usage_operation = None

    # ---- what the optimizer asks for ----

    def before_step(self) -> bool:
        """Reduces what is not reduced yet; returns False if the user had asked for that and forgot the skip block."""
        if self.skipping:
            self._require_nothing_pending()
        elif not self._synchronized:
            self.synchronize()
        forgotten = self.asked and not self.skipping
        self._synchronized = self.asked = False
        self.reset()
        return not forgotten

    def _require_nothing_pending(self) -> None:
        if self.pending:
            raise InvalidArgumentError(
                f"step '{self.prefix}': expected reduced gradients inside skip_synchronize() but found some still "
                "travelling. Call synchronize() before."
            )

    def discard(self) -> None:
        """Before gradients are set to zero: finishes what travels, on all ranks, and starts a new window."""
        if self.pending:
            self.synchronize()
        self._synchronized = self.asked = False
        self.reset()

    def closure_of_all(self, closure: Callable[[], object]) -> Callable[[], object]:
        """The user's closure with gradients and loss of all ranks, as one process with all batches has them."""

        def reducing_closure() -> object:
            loss = closure()
            self.synchronize()
            return None if loss is None else self._reduced_loss(loss)

        return reducing_closure

    def _reduced_loss(self, loss: object) -> object:
        # Line searches compare losses, and ranks that compare different ones would part.
        is_tensor = isinstance(loss, torch.Tensor)
        total = loss.detach().clone() if is_tensor else torch.tensor(float(loss), dtype=torch.float64)
        buffer = buffer_of(total)
        self.how.context.submit(
            "allreduce", f"{self.prefix}.loss", [buffer], [buffer],
            reduction=self.how.name, process_set=self.how.process_set, waits=True,
        ).wait()  # fmt: skip
        return total if is_tensor else total.item()


def _calls(method: weakref.WeakMethod) -> Callable[[torch.Tensor], None]:
    """A hook that does nothing once its optimizer is gone, and does not keep it alive."""

    def hook(parameter: torch.Tensor) -> None:
        on_gradient = method()
        if on_gradient is not None:
            on_gradient(parameter)

    return hook


def _usage_of(parameter: torch.Tensor) -> int:
    gradient = parameter.grad
    if gradient is None:
        return UNUSED
    return SPARSE if gradient.is_sparse else DENSE


def _fill_missing(parameter: torch.Tensor, usage: int) -> None:
    if parameter.grad is None:
        zeros = torch.zeros_like(parameter, requires_grad=False)
        parameter.grad = zeros.to_sparse(1) if usage == SPARSE else zeros
