"""Ways of training: what ranks exchange, and when. A user makes one, and gives it to ``DistributedOptimizer`` as ``mode``.

PyTorch, TensorFlow, Keras, Lightning and Hugging Face take the same objects. ``needs`` says what each cannot be combined
with; an adapter carries it out. Pure, but for the variable that is the default of ``replicas``.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ringtrain._binding import options
from ringtrain.errors import InvalidArgumentError

if TYPE_CHECKING:  # loaded by those who average
    from ringtrain._training.averaging.outer import Outer
    from ringtrain._training.averaging.period import Period


@dataclass(frozen=True)
class Mode:
    """What all ways of training have.

    Args:
        replicas: ``"equal"`` has ranks that train apart raise MismatchError: what each steps with is compared in each step, and
            the parameters after the first one and at most once a second; with ``LocalSteps`` where ranks average.
            ``"differ"`` compares nothing. By default what ``RINGTRAIN_REPLICAS`` says, for scripts that nobody changes,
            or ``"equal"``.

    Raises:
        InvalidArgumentError: an argument that cannot be.
    """

    replicas: str = field(default_factory=options.replicas, kw_only=True)

    def __post_init__(self) -> None:
        if self.replicas not in ("equal", "differ"):
            raise InvalidArgumentError(
                f'{self.name}: replicas must be "equal" or "differ", but is {self.replicas!r}. "equal" has ranks that train '
                'apart raise an error; "differ" compares nothing.'
            )

    @property
    def name(self) -> str:
        """As a script writes it."""
        return type(self).__name__

    @property
    def compares(self) -> bool:
        """Whether ranks compare what they have."""
        return self.replicas == "equal"

    @property
    def columns(self) -> list[str]:
        """Of the table of ``needs``, those that hold for it."""
        return [self.name]

    def terms(self) -> dict[str, object]:
        """What all ranks must have alike of it, beside its name."""
        return {"replicas": self.replicas}


@dataclass(frozen=True)
class Synchronous(Mode):
    """Gradients of each step are reduced over the ranks before it: N ranks train as one process with all batches. The default.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), mode=hvd.Synchronous(replicas="differ"))

    Args:
        gradient_as_bucket_view: PyTorch: once a few steps were alike, gradients become views of a few flat tensors, which travel
            as they are, as DDP's option of this name does. Then do not keep ``p.grad`` from one step to the next.
        replicas: as for all modes; ``"equal"`` or ``"differ"``.
    """

    gradient_as_bucket_view: bool = False

    @property
    def columns(self) -> list[str]:
        """With that of views."""
        return [self.name, *(["gradient_as_bucket_view"] if self.gradient_as_bucket_view else [])]


@dataclass(frozen=True)
class LocalSteps(Mode):
    """Ranks step with their own gradients, and average what they have changed after so many steps (Stich, arXiv:1805.09767).

    Example:
        >>> mode = hvd.LocalSteps(every=32, outer=hvd.Outer(0.7, 0.9))
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), mode=mode)

    ``compression`` is then that of the changes. ``synchronize()`` averages at once, as evaluating and saving need it, on all
    ranks after the same step; ``join()`` is for a rank that has no more data; ``count_samples(n)`` before a step says what
    that weighs. All ranks wrap their optimizers together, and hear whether they have the same arguments.
    docs/local-steps.md says more.

    Args:
        every: steps from one average to the next.
        outer: the outer optimizer of DiLoCo (arXiv:2311.08105); None averages plainly.
        within: ``"host"`` makes a host one worker: gradients of its ranks are averaged in each step. ``"site"`` makes a site one,
            as the hosts' option ``site`` names it.
        warmup: exact steps before the first local one (post-local SGD, arXiv:1808.07217).
        fragments: parts that the parameters are averaged in, one after another and evenly spread over the period, at most
            ``every`` (Streaming DiLoCo, arXiv:2501.18512). Buffers wait for ``synchronize()``.
        overlap: steps, less than ``every``, for which what was changed travels while training goes on.
        merge: with ``overlap``, what becomes of a value x, x' when it was sent, when the new common value X has come:
            ``"additive"``, x + (X - x'), or ``"half"``, (x + X) / 2, which suits an outer momentum.
        named_buffers: PyTorch: ``model.named_buffers()``: running statistics are averaged with the parameters, counters become
            the maximum. Keras finds them in the model that is fitted.
        replicas: as for all modes; ``"equal"`` or ``"differ"``.
    """

    every: int
    outer: "Outer | None" = None
    within: str | None = None
    warmup: int = 0
    fragments: int = 1
    overlap: int = 0
    merge: str = "additive"
    named_buffers: Iterable[tuple[str, Any]] = ()

    def __post_init__(self) -> None:
        from ringtrain._training.averaging.outer import checked_outer

        super().__post_init__()
        object.__setattr__(self, "outer", checked_outer(self.outer))
        if not isinstance(self.named_buffers, Iterable):
            raise InvalidArgumentError(
                f"LocalSteps: named_buffers must be what model.named_buffers() returns, but is {self.named_buffers!r}."
            )
        object.__setattr__(self, "named_buffers", tuple(self.named_buffers))
        if self.within not in (None, "host", "site"):
            raise InvalidArgumentError(f"LocalSteps: within must be None, 'host' or 'site', but is {self.within!r}.")
        self.period()

    def terms(self) -> dict[str, object]:
        """Its numbers and words."""
        outer = None if self.outer is None else [self.outer.rate, self.outer.momentum]
        plain = ("every", "within", "warmup", "fragments", "overlap", "merge")
        return {**{name: getattr(self, name) for name in plain}, "outer": outer, **super().terms()}

    def period(self) -> "Period":
        """Counts the steps of one worker."""
        from ringtrain._training.averaging.period import Period

        return Period(self.every, self.warmup, self.fragments, self.overlap, self.merge)

    @property
    def columns(self) -> list[str]:
        """With those of hosts as workers, and of buffers."""
        options = {"within": self.within is not None, "named_buffers": bool(self.named_buffers)}
        return [self.name, *(option for option, is_given in options.items() if is_given)]


@dataclass(frozen=True)
class OneStepLate(Mode):
    """Each step applies the gradients of the step before, which travel while those of this step are computed.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), mode=hvd.OneStepLate())

    So a step takes the longer of computing and sending. ``step()`` does all of it; ``flush()`` applies what is left, before
    the model is evaluated or saved; ``synchronize()`` before a step puts what it is going to apply into the gradients, to be
    clipped. docs/one-step-late.md says more.

    Args:
        replicas: as for all modes; ``"equal"`` or ``"differ"``.
    """


@dataclass(frozen=True)
class ShardedStep(Mode):
    """PyTorch: each rank updates its share of the parameters, and holds that share of the optimizer's state (ZeRO-1).

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), mode=hvd.ShardedStep(model))

    Sums of gradients travel in the backward pass, new values during the next forward pass: each module waits for its own.
    The results are those of ``Synchronous``. For SGD, Adam, AdamW and others of torch.optim that update each element by
    itself. ``consolidate_state_dict()`` comes before ``state_dict()``. docs/training.md says more.

    Args:
        model: whose modules wait for their parameters, as does all that reads these through a module; before other uses call
            ``flush()``. None: ``step()`` waits for all values.
        replicas: as for all modes; ``"equal"`` or ``"differ"``.
    """

    model: Any = None


SYNCHRONOUS = Synchronous()


def checked_mode(mode: object, owner: str = "DistributedOptimizer") -> Mode:
    """The argument ``mode``; None is ``Synchronous()``. Raises InvalidArgumentError for what is no mode."""
    if mode is None:
        return SYNCHRONOUS
    if isinstance(mode, Mode):
        return mode
    found = f"the class {mode.__name__}" if isinstance(mode, type) else repr(mode)
    raise InvalidArgumentError(
        f"{owner}: mode must be one of Synchronous(), LocalSteps(every=...), OneStepLate() and ShardedStep(...), but is {found}."
    )
