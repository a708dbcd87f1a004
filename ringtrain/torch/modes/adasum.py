"""``DistributedOptimizer(op=Adasum)``: every rank steps by itself, and then the ranks' steps are combined.

The delta optimizer of Maleki et al. (arXiv:2006.02924): a step is the user's own step with this rank's gradients, the
change that it made to each parameter, the Adasum of these changes over the ranks, and the parameters that the step
began with plus that. So the learning rate is that of one process. Before ``step()`` the parameters are kept, after it
their changes combined. Any optimizer will do, one with a closure included; its momentum and the like stay this rank's own.

Where steps survive a change of the world the changes are kept until all ranks hold their Adasum, which is taken once more
over those that are left if not all come to hold it.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence

import torch

from ringtrain._runtime import operations as arrays
from ringtrain._runtime.context import Context
from ringtrain._runtime.operations import Adasum
from ringtrain._runtime.pending import Operation
from ringtrain._runtime.process_sets import ProcessSet
from ringtrain._runtime.submission import preparing
from ringtrain._training.adapter.numbering import Number
from ringtrain._training.session import NewWorld, Session
from ringtrain._training.step_guard import Part, StepGuard, awaited
from ringtrain.errors import RingtrainError
from ringtrain.torch.backward import OneByOne
from ringtrain.torch.compression import Compressor, compressed, compression_in_the_core
from ringtrain.torch.drift import StepComparison
from ringtrain.torch.eager import eager
from ringtrain.torch.hooks import Owner, dismiss, enlist
from ringtrain.torch.modes.base import AroundSteps
from ringtrain.torch.modes.wrapping import Wrapping
from ringtrain.torch.scaling import HeededScaler
from ringtrain.torch.tensors import writable

# Parameters travel in operations of about this size: large enough to be fast, small enough to overlap.
_GROUP_BYTES = 16 << 20
_Combined = list[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]  # parameters, and what becomes of their changes


class AdasumMode(AroundSteps):
    """What the steps of one optimizer change, and how that travels.

    Args:
        compression: as for ``DistributedOptimizer``, of the changes.
        process_set: the ranks that train together.
        compares: whether settings and parameters must be the same on all ranks.
    """

    averages = False  # which a constant batch needs
    unweighed = "adasum"
    begins_first = False  # but after hooks that may change parameters
    refuses_skip = "op must be Average or Sum, but is Adasum, whose step() always combines. Call step() alone."

    def __init__(self, compression: type[Compressor], process_set: ProcessSet, compares: bool):
        self._compares = compares
        self._compression = compression
        self._process_set = process_set
        self._session = Session(process_set)
        self._guard: StepGuard | None = None
        self._number = Number(self._session, "optimizer")
        self._parameters: list[torch.Tensor] = []
        self._starts: dict[torch.Tensor, torch.Tensor] = {}  # kept from step to step, to save allocating them
        self._scaler = HeededScaler()
        self._comparison: StepComparison | None = None
        enlist(self)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, wrapping: Wrapping) -> "AdasumMode":
        """Over all ranks of the process set."""
        return cls(wrapping.compressor, wrapping.process_set, wrapping.mode.compares)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Around its steps, which compare what ranks have of it; not where these survive a change of the world."""
        if self._compares:
            self._comparison = StepComparison(optimizer, self._session, self._number)
        super().attach(optimizer)

    def close(self) -> None:
        """Removes the hooks."""
        dismiss(self)
        super().close()

    @property
    def prefix(self) -> str:
        """Of all names that this optimizer submits."""
        return self._number.prefix

    @property
    def context(self) -> Context:
        """The rank that it acts for, in the current epoch."""
        return self._session.context

    def release(self, parameters: set[torch.Tensor], owner: Owner) -> None:
        """Has nothing to leave to an optimizer that was made later: there are no hooks."""

    # ---- steps that survive a change of the world ----

    @property
    def guarded(self) -> "AdasumMode":
        """What a guard of an elastic job releases."""
        return self

    def keep_inputs_for(self, guard: StepGuard, one_by_one: OneByOne | None = None) -> None:
        """Has a guard release each step."""
        self._guard = guard

    def is_kept_for(self, guard: StepGuard) -> bool:
        """Whether that guard is the one which releases each step."""
        return self._guard is guard

    def order(self) -> int:
        """Its place among the optimizers of its world."""
        return self._number.value

    def enter_world(self, change: NewWorld) -> None:
        """Goes on in the present world, under the name that ranks that join have for it."""
        self._session.follow(change)

    def note_between_steps(self) -> None:
        """All ranks are between two steps here."""

    # ---- a step ----

    def scales(self, by_itself: bool) -> bool:
        """True has ``GradScaler`` call ``step()`` where it found an infinity, too: the other ranks wait for this one."""
        return True

    @eager
    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, object]) -> None:
        """Remembers the parameters. Where a ``GradScaler`` found an infinity, this step shall change nothing."""
        self._session.follow()
        self._parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
        ]
        for parameter in self._parameters:
            start = self._starts.get(parameter)
            if (
                start is None
                or start.shape != parameter.shape
                or start.dtype != parameter.dtype
                or start.device != parameter.device
            ):
                self._starts[parameter] = parameter.detach().clone()
            else:
                start.copy_(parameter)
        self._scaler.before_step(optimizer, self._parameters, vars(optimizer).get("_step_supports_amp_scaling", False))

    @eager
    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Replaces this rank's changes by the Adasum of all ranks'. On an error the step is undone."""
        self._scaler.after_step()
        comparison = self._comparison if self._guard is None else None
        try:
            ends = None if comparison is None else comparison.begin()
            for parameter in self._parameters:
                parameter.sub_(self._starts[parameter])
            for parameters, results in self._survived():
                for parameter, result in zip(parameters, results, strict=True):
                    if result.data_ptr() != parameter.data_ptr():
                        parameter.copy_(result)
            for parameter in self._parameters:
                parameter.add_(self._starts[parameter])
            if ends is not None:
                ends()
        except BaseException:
            for parameter in self._parameters:
                parameter.copy_(self._starts[parameter])
            raise

    def _survived(self) -> _Combined:
        """The Adasum of all ranks' changes; with a guard when all ranks hold it."""
        if self._guard is None:
            return self._combined(keeps_inputs=False)

        def attempt() -> Generator[Operation, None, _Combined]:
            yield from ()
            return self._combined(keeps_inputs=True)

        return awaited(self._guard.run(attempt, lambda _: Part.STEP, lambda: None))

    def _combined(self, keeps_inputs: bool) -> _Combined:
        groups = list(_groups_of(self._parameters))
        by_core = compression_in_the_core(self._compression)
        if by_core is None:
            return [(group, self._by_compressor(group, index)) for index, group in enumerate(groups)]
        started: list[tuple[Sequence[torch.Tensor], list[torch.Tensor], arrays.Handle]] = []
        problem: RingtrainError | None = None
        for index, group in enumerate(groups):  # all of them, so that no name stays in flight on the others
            try:
                sent = [parameter.detach().contiguous() for parameter in group]
                if keeps_inputs:
                    sent = [each.clone() for each in sent]
                started.append((group, sent, self._start(sent, index, by_core)))
            except RingtrainError as refused:
                problem = problem or refused
        for _, _, handle in started:  # all of them, so that none writes to a parameter any more
            try:
                arrays.synchronize(handle)
            except RingtrainError as failed:
                problem = problem or failed
        if problem is not None:
            raise problem
        return [(group, results) for group, results, _ in started]

    def _start(self, group: Sequence[torch.Tensor], index: int, by_core: str) -> arrays.Handle:
        views = [writable(tensor) for tensor in group]
        return arrays.grouped_allreduce_async_(
            views, f"{self.prefix}.delta.{index}", Adasum, process_set=self._process_set, compression=by_core
        )

    def _by_compressor(self, group: Sequence[torch.Tensor], index: int) -> Sequence[torch.Tensor]:
        name = f"{self.prefix}.delta.{index}"

        def operate(sent: Sequence[torch.Tensor], by_core: str) -> Sequence[torch.Tensor]:
            return arrays.grouped_allreduce(sent, name, Adasum, process_set=self._process_set, compression=by_core)

        before = preparing("allreduce", name, self._process_set)
        return compressed(self._compression, [parameter.detach() for parameter in group], operate, before)


def _groups_of(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The parameters in runs that travel as one operation each, of one device."""
    run: list[torch.Tensor] = []
    room = _GROUP_BYTES
    for parameter in parameters:
        if run and (room <= 0 or parameter.device != run[0].device):
            yield run
            run, room = [], _GROUP_BYTES
        run.append(parameter)
        room -= parameter.numel() * parameter.element_size()
    if run:
        yield run
