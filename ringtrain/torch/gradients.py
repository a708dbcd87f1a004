"""One gradient's way to the other ranks and back: what is sent for it, by which operation, and where the result goes.

``exchange`` decides when a group of parameters is sent and calls ``Group.submit`` and ``Group.take_results``.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ringtrain._binding import tables
from ringtrain._binding.tensor_memory import Buffer
from ringtrain._runtime.operations import Average
from ringtrain._runtime.pending import Operation
from ringtrain._training.drift import ComparedReplica
from ringtrain._training.powersgd import Approximation, Memory, PowerSGD
from ringtrain._training.presence import SETTLED
from ringtrain._training.session import Session
from ringtrain.errors import RingtrainError, UnsupportedError
from ringtrain.torch.buckets import Bucket
from ringtrain.torch.compression import Compressor
from ringtrain.torch.sparse import SparseAllreduce
from ringtrain.torch.tensors import finish, holds_its_values, lent_buffer, values_of


@dataclass(frozen=True)
class ReductionSettings:
    """How gradients are combined: one value for all parameters of an optimizer, the same on all ranks.

    Attributes:
        session: the rank, and the process set.
        mode: the name of the way of training.
        op: ``Average``, ``Sum`` or ``PerItem``.
        prescale: factor on each contribution.
        postscale: factor on the result.
        compression: what the core does to narrow the wire; a row of ``tables.COMPRESSIONS``.
        compressor: a user's own, whose methods are called here.
        sparse_as_dense: sends sparse gradients as dense ones.
        powersgd: how gradients are approximated; None if they are not.
        make_replica: makes what is compared among the ranks of a world; None if replicas may differ.
    """

    session: Session
    mode: str
    op: int
    prescale: float = 1.0
    postscale: float = 1.0
    compression: str = "none"
    compressor: type[Compressor] | None = None
    sparse_as_dense: bool = False
    powersgd: PowerSGD | None = None
    make_replica: Callable[[], ComparedReplica] | None = None

    def replica(self) -> ComparedReplica | None:
        """What is compared among the ranks of a world that is entered; None if replicas may differ."""
        return None if self.make_replica is None else self.make_replica()

    @property
    def terms(self) -> dict[str, str]:
        """What ranks cannot tell from the gradients that they reduce, and must have set alike."""
        return {
            "compression": "other" if self.powersgd is None else repr(self.powersgd),
            "mode": self.mode,
            "replicas": "differ" if self.make_replica is None else "equal",
        }

    @functools.cached_property
    def keeps_residuals(self) -> bool:
        """Whether the core makes up for what compression has lost of the gradients before."""
        return self.compression in tables.WITHOUT_FEEDBACK

    @property
    def makes_up_for_losses(self) -> bool:
        """Whether anything is kept of the gradients before: by the core, or by PowerSGD."""
        return self.keeps_residuals or self.powersgd is not None

    @functools.cached_property
    def name(self) -> str:
        """The row of ``tables.REDUCTIONS``."""
        return tables.REDUCTION_BY_ID[self.op]

    @property
    def averages(self) -> bool:
        """Whether the sum is divided by the number of ranks, so that what is equal on all of them stays what it is."""
        return self.op == Average


@dataclass(eq=False, slots=True)
class OptimizedParameter:
    """A parameter of the optimizer, and what was reduced of it last.

    Attributes:
        name: identity among the ranks.
        index: place among the optimizer's parameters.
        group: what it travels in; a ``Group`` that takes it over says so.
        twin: memory for the result, where the gradient itself is kept until that is released.
        memory: of PowerSGD; None where gradients travel as they are.
    """

    parameter: torch.Tensor
    name: str
    index: int
    group: "Group" = field(init=False)
    twin: torch.Tensor | None = None
    memory: Memory | None = None
    _result: "weakref.ref[torch.Tensor] | None" = None
    _result_version: int = 0

    def note_result(self) -> None:
        """Remembers the gradient as a reduced one."""
        gradient = self.parameter.grad
        self._result, self._result_version = weakref.ref(gradient), gradient._version

    def holds_result(self, additions: int = 0) -> bool:
        """Whether the gradient is still the reduced one, to which so many in-place operations were applied since."""
        gradient = self.parameter.grad
        return (
            gradient is not None
            and self._result is not None
            and gradient._version == self._result_version + additions
            and self._result() is gradient
        )

    def is_result(self) -> bool:
        """Whether the gradient is the tensor that was reduced, whatever was done to it since."""
        return self._result is not None and self._result() is self.parameter.grad

    def has_lost_result(self) -> bool:
        """Whether the gradient was reduced and then dropped, as ``zero_grad`` does."""
        return self._result is not None and self.parameter.grad is None

    def make_twin(self, gradient: torch.Tensor) -> torch.Tensor:
        """Memory of the kind of the gradient; that of the last step, if it fits."""
        twin = self.twin
        if (
            twin is None
            or twin.shape != gradient.shape
            or twin.dtype != gradient.dtype
            or twin.device != gradient.device
        ):
            twin = self.twin = torch.empty_like(gradient, requires_grad=False)
        return twin

    def lie_in(self, view: torch.Tensor) -> None:
        """Makes a view of a bucket, which holds the gradient already, the parameter's gradient."""
        self.parameter.grad = view

    def fill(self, sparse: bool) -> None:
        """Gives the parameter a gradient of zeros, for ranks that did not use what others did."""
        if self.parameter.grad is None:
            self.parameter.grad = _sparse_zeros(self.parameter) if sparse else torch.zeros_like(self.parameter.detach())


@dataclass(eq=False, slots=True)
class _Dense:
    """A gradient on its way, and the tensor that is sent for it (itself, or a contiguous, compressed or dense copy).

    Attributes:
        twin: where the result of what is sent goes; None if it takes its place.
        approximation: of which a factor is sent; None if the gradient itself is.
    """

    member: OptimizedParameter
    gradient: torch.Tensor
    sent: torch.Tensor
    compression_context: object
    twin: torch.Tensor | None = None
    approximation: Approximation | None = None

    def go_on(self) -> torch.Tensor | None:
        """What is to be sent next, now that what was sent has arrived; None if nothing is."""
        if self.approximation is None:
            return None
        self.sent = self.approximation.go_on()
        return self.sent

    def keep(self) -> torch.Tensor:
        """Has the gradient stay as it is until ``arrive``; returns where the result goes: a copy that is sent may change."""
        if self.sent is self.gradient:
            self.twin = self.member.make_twin(self.gradient)
            return self.twin
        return self.sent

    def arrive(self, compressor: type[Compressor] | None) -> None:
        """Brings the result from the tensor that was sent to the gradient."""
        if self.twin is not None:
            self.member.twin = take_place(self.gradient, self.twin)
        elif self.approximation is not None:
            dense = torch.empty_like(self.member.parameter.detach()) if self.gradient.is_sparse else self.gradient
            self.approximation.write(dense)
            self._take(dense)
        elif self.sent is not self.gradient:
            result = self.sent if compressor is None else compressor.decompress(self.sent, self.compression_context)
            self._take(result)
        if self.approximation is None and self.member.memory is not None:
            self.member.memory.keep(None, self.member.memory.factor)
        self.member.note_result()

    def _take(self, result: torch.Tensor) -> None:
        if self.gradient.is_sparse:
            self.member.parameter.grad = result.to_sparse(self.gradient.sparse_dim())
        elif result is not self.gradient:
            self.gradient.copy_(result)


@dataclass(eq=False)
class Group:
    """Parameters that travel as one operation: usually one. The other fields are of the current step.

    Attributes:
        bucket: where the gradients go to before they travel, if all of them do; in any step.
        submitted: whether the operation was submitted, or refused: then there is none.
    """

    name: str
    members: list[OptimizedParameter]
    bucket: Bucket | None = None
    submitted: bool = False
    _open_count: int = 0  # members that are not settled
    _ready_count: int = 0  # of these, members whose gradient is complete here
    _operation: Operation | None = None
    _dense: list[_Dense] = field(default_factory=list)
    _sparse: list[tuple[OptimizedParameter, SparseAllreduce]] = field(default_factory=list)
    _sparse_results: list[tuple[OptimizedParameter, torch.Tensor]] = field(default_factory=list)

    def take_over(self) -> None:
        """Has the members travel in this group from now on."""
        for member in self.members:
            member.group = self
        self.reopen()

    def reopen(self) -> None:
        """A new step: what was settled is open again."""
        self._open_count = len(self.members)

    def gather(self) -> bool:
        """Notes that the gradient of one more member is complete here; returns whether those of all are.

        A group of which a part is settled waits for the round: another rank may have opened that part again.
        """
        self._ready_count += 1
        return self._ready_count == self._open_count == len(self.members)

    def unsettled(self, codes: bytes | bytearray) -> list[OptimizedParameter]:
        """The members that are still to be reduced, by the codes of the step."""
        if self._open_count == len(self.members):
            return self.members
        return [member for member in self.members if codes[member.index] != SETTLED]

    def note_settled(self, codes: bytes | bytearray) -> None:
        """Counts the members that are still to be reduced, by the codes of the step."""
        self._open_count = sum(codes[member.index] != SETTLED for member in self.members)

    def submit(
        self,
        members: Sequence[OptimizedParameter],
        how: ReductionSettings,
        postscale: float,
        weight: int | None = None,
        keeps_inputs: bool = False,
        waits: bool = False,
    ) -> None:
        """Starts the operations of some members; sparse gradients travel apart from the others.

        ``weight`` is what they count in an average, None on all ranks to count alike; ``keeps_inputs`` leaves the gradients
        as they are until ``release``; ``waits`` if this thread waits for them next.
        Raises RingtrainError for a gradient that this rank must refuse; its peers' operation fails with the same text.
        """
        self.submitted = True
        sparse = [] if how.sparse_as_dense else [member for member in members if member.parameter.grad.is_sparse]
        for member in sparse:
            self._submit_sparse(member, how, postscale, weight)
        if len(sparse) < len(members):
            dense = [member for member in members if member not in sparse] if sparse else members
            self._submit_dense(dense, how, postscale, weight, keeps_inputs, waits)

    def waiting(self) -> Iterator[Operation]:
        """The operations under way."""
        if self._operation is not None:
            yield self._operation
        for _, sparse in self._sparse:
            yield from sparse.waiting()

    @property
    def goes_on(self) -> bool:
        """Whether something is to be sent when what was sent has arrived."""
        return any(each.approximation is not None for each in self._dense)

    def go_on(self, how: ReductionSettings, postscale: float, weight: int | None = None) -> None:
        """Waits for what was sent first, and sends what follows from it.

        Raises RingtrainError where the first has failed, on all ranks, or this rank must refuse the second.
        """
        first, self._operation = self._operation, None
        if first is None:
            return
        try:
            finish(first, self._dense[0].sent)
        except RingtrainError:
            self._dense = []
            raise
        name = f"{self.name} (right factor)"
        try:
            with torch.no_grad():
                sent = [each for each in (dense.go_on() for dense in self._dense) if each is not None]
            buffers = [lent_buffer(tensor) for tensor in sent]
        except Exception as problem:  # seen by this rank alone: the others must not wait for it
            self._dense = []
            how.session.context.refuse("allreduce", name, how.session.process_set_id, problem)
        self._operation = self._submit_buffers(name, buffers, buffers, how, postscale, weight)

    def take_results(self, compressor: type[Compressor] | None) -> None:
        """Puts the results of finished operations into the gradients; raises the first error after the others."""
        problem = self.hold()
        self.release(compressor)
        if problem is not None:
            raise problem

    def hold(self) -> RingtrainError | None:
        """Waits for the operations; returns the first error."""
        problem: RingtrainError | None = None
        if self._operation is not None:
            try:
                finish(self._operation, self._dense[0].sent)
            except RingtrainError as failed:
                problem, self._dense = failed, []
        for member, operation in self._sparse:
            try:
                self._sparse_results.append((member, operation.wait()))
            except RingtrainError as failed:
                problem = problem or failed
        return problem

    def release(self, compressor: type[Compressor] | None) -> None:
        """Puts what is held into the gradients."""
        for each in self._dense:
            each.arrive(compressor)
        for member, result in self._sparse_results:
            member.parameter.grad = result
            member.note_result()
        self.forget()

    def forget(self) -> None:
        """Lets go of what was submitted; operations under way keep their tensors until they are done."""
        self._ready_count, self.submitted, self._operation, self._dense, self._sparse = 0, False, None, [], []
        self._sparse_results = []

    def _submit_dense(
        self,
        members: Sequence[OptimizedParameter],
        how: ReductionSettings,
        postscale: float,
        weight: int | None,
        keeps_inputs: bool,
        waits: bool,
    ) -> None:
        try:
            sent = self._fill_bucket() if self._all_in_bucket(members) else self._prepare(members, how)
            buffers = results = [lent_buffer(tensor) for tensor in sent]
            if keeps_inputs:
                results = [lent_buffer(each.keep()) for each in self._dense]
        except Exception as problem:  # seen by this rank alone: the others must not wait for it
            self._dense = []
            how.session.context.refuse("allreduce", self.name, how.session.process_set_id, problem)
        self._operation = self._submit_buffers(self.name, buffers, results, how, postscale, weight, waits)

    @staticmethod
    def _submit_buffers(
        name: str,
        buffers: Sequence[Buffer],
        results: Sequence[Buffer],
        how: ReductionSettings,
        postscale: float,
        weight: int | None,
        waits: bool = False,
    ) -> Operation:
        return how.session.context.submit(
            "allreduce", name, buffers, results,
            reduction=how.name, prescale=how.prescale, postscale=postscale, process_set=how.session.process_set_id,
            compression=how.compression, weight=weight, waits=waits,
        )  # fmt: skip

    def _all_in_bucket(self, members: Sequence[OptimizedParameter]) -> bool:
        """Whether the bucket can travel as a whole: not if some of it is settled, or comes on no rank in this step."""
        return self.bucket is not None and len(members) == len(self.members)

    def _fill_bucket(self) -> list[torch.Tensor]:
        bucket = self.bucket
        assert bucket is not None
        bucket.take_in([member.parameter.grad for member in self.members], [member.name for member in self.members])
        for member, view in zip(self.members, bucket.views, strict=True):
            member.lie_in(view)
        self._dense = [_Dense(member, member.parameter.grad, member.parameter.grad, None) for member in self.members]
        return [bucket.flat]

    def _prepare(self, members: Sequence[OptimizedParameter], how: ReductionSettings) -> list[torch.Tensor]:
        self._dense = [_prepare(member, how) for member in members]
        return [each.sent for each in self._dense]

    def _submit_sparse(
        self, member: OptimizedParameter, how: ReductionSettings, postscale: float, weight: int | None
    ) -> None:
        operation = SparseAllreduce(
            how.session.context,
            member.parameter.grad,
            member.name,
            how.op,
            how.session.process_set_id,
            how.prescale,
            postscale,
            weight,
        )
        self._sparse.append((member, operation))


def dense_gradient(gradient: torch.Tensor, name: str, how: ReductionSettings) -> torch.Tensor:
    """A gradient for a mode that sends dense ones alone. Raises UnsupportedError for another, unless it is to be made one."""
    if gradient.is_sparse and how.sparse_as_dense:
        return gradient.detach().to_dense()
    if gradient.layout is not torch.strided:
        raise UnsupportedError(
            f"gradient of '{name}': expected a dense one, as {how.mode.partition(' ')[0]} sends it, but found {gradient.layout}. "
            "Set sparse_as_dense, or use another mode."
        )
    return gradient.detach()


def _prepare(member: OptimizedParameter, how: ReductionSettings) -> _Dense:
    gradient = member.parameter.grad
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    if dense.layout is not torch.strided:
        raise UnsupportedError(
            f"gradient of '{member.name}': expected a dense or a sparse COO one but found {gradient.layout}. "
            "Use dense gradients."
        )
    if member.memory is not None:
        return _approximated(member, member.memory, gradient, dense)
    if how.compressor is None and holds_its_values(dense):
        return _Dense(member, gradient, dense, None)
    with torch.no_grad():
        sent, compression_context = (dense, None) if how.compressor is None else how.compressor.compress(dense)
        return _Dense(member, gradient, values_of(sent), compression_context)


def _approximated(member: OptimizedParameter, memory: Memory, gradient: torch.Tensor, dense: torch.Tensor) -> _Dense:
    with torch.no_grad():
        if not memory.is_exact:
            approximation = Approximation(memory, dense)
            return _Dense(member, gradient, approximation.left, None, approximation=approximation)
        if memory.residual is None and dense.is_contiguous():
            return _Dense(member, gradient, dense, None)
        return _Dense(member, gradient, memory.added_to(dense).to(dense.dtype).view(dense.shape), None)


def take_place(gradient: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """Gives a gradient its twin's values; returns memory that is free for the next twin.

    The two exchange their memory, so that nothing is copied, unless other tensors may lie in the gradient's.
    """
    if gradient._is_view() or gradient.untyped_storage().nbytes() != gradient.nbytes:
        with torch.no_grad():
            gradient.copy_(twin)
        return twin
    spare = torch.empty(0, dtype=gradient.dtype, device=gradient.device).set_(gradient.detach())
    gradient.data = twin
    return spare


def _sparse_zeros(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient without entries, of the kind that ``torch.nn.Embedding(sparse=True)`` makes."""
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64),
        parameter.new_empty((0, *parameter.shape[1:])),
        parameter.shape,
        check_invariants=False,
        is_coalesced=True,
    ).detach()
