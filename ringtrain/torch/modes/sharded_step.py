"""Each rank updates its share of the parameters, and has that share of the optimizer's state (ZeRO-1).

Gradients go the way of ``synchronous``, but for what travels: buckets, of which each rank gets its share of the sums.
``step()`` has the user's optimizer update that, bucket by bucket in the order of the parameters, and gathers the values
while it goes on with the next one; with a model, while the program goes on (``sharded_values``). It reads the share from
the parameters themselves, so it does not matter who has written them.
"""

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from ringtrain._binding import log
from ringtrain._runtime.arguments import check_kind
from ringtrain._runtime.process_sets import ranks_of
from ringtrain._training.adapter.checks import named_ranks
from ringtrain._training.drift import ComparedReplica
from ringtrain._training.mode import ShardedStep
from ringtrain._training.needs import check_needs
from ringtrain._training.shares import bucketed
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.torch.eager import eager
from ringtrain.torch.gradients import OptimizedParameter, ReductionSettings
from ringtrain.torch.modes.base import State, closure_of
from ringtrain.torch.modes.sharded_buckets import SharedBucket
from ringtrain.torch.modes.sharded_gradients import SentGradients
from ringtrain.torch.modes.sharded_state import SharedState
from ringtrain.torch.modes.sharded_values import Arrivals, compiles
from ringtrain.torch.modes.synchronous import SynchronousMode
from ringtrain.torch.modes.wrapping import Wrapping

BUCKET_BYTES = 4 << 20
UNDER_WAY = (
    2  # of the values: one bucket travels, the next one is agreed on; those ready together would arrive as a whole
)
ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip


class ShardedStepMode(SynchronousMode):
    """The steps of one optimizer.

    Args:
        user_class: the optimizer's class as the user made it.
        settings: how gradients are combined, the same on all ranks.
        names: its parameters with their names, in the order in which a forward pass is expected to need them.
        passes_per_step: backward passes that are summed here before their gradients travel.
        averages_passes: whether the sum is then divided by that.
        model: whose modules wait for values; None: ``step()`` waits.
    """

    begins_first = False  # hooks of the user come before the update
    refuses_join = (
        "join: this rank must go on updating its share of the parameters (ShardedStep), but would update none any more. Give "
        "all ranks as many steps, or use another mode."
    )

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, wrapping: Wrapping) -> "ShardedStepMode":
        """Over all ranks of the process set, in the order in which the user names the parameters."""
        order = {parameter: place for place, parameter in enumerate(wrapping.known or wrapping.names)}
        ordered = {parameter: wrapping.names[parameter] for parameter in sorted(wrapping.names, key=order.__getitem__)}
        model = wrapping.mode.model
        if model is not None:
            check_kind("ShardedStep: model must be a torch.nn.Module, or None", model, torch.nn.Module)
        settings, passes = wrapping.settings(optimizer, wrapping.process_set), optimizer.backward_passes_per_step
        return cls(wrapping.user_class, settings, ordered, passes, wrapping.averages_passes, model)

    @staticmethod
    def works_alone(described: ShardedStep) -> bool:
        """One rank has the whole of what checkpoints have shares of, under the same names."""
        return True

    @staticmethod
    def traits(optimizer: torch.optim.Optimizer, user_class: type) -> dict[str, object]:
        """Traits of ``needs`` of an optimizer whose parameters are to be shared out."""
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {
            "not elementwise": user_class not in ELEMENTWISE and user_class.__name__,
            "differentiable": any(group.get("differentiable") for group in optimizer.param_groups),
            "device": not all(
                each.is_cpu and each.is_floating_point() and each.layout is torch.strided for each in trained
            ),
        }

    def __init__(
        self, user_class: type, settings: ReductionSettings, names: Mapping[torch.Tensor, str],
        passes_per_step: int, averages_passes: bool, model: torch.nn.Module | None,
    ):  # fmt: skip
        self._update = _bare_step(user_class)
        groups = _grouped(names)
        make_replica = settings.make_replica and partial(_comparing_settings, settings.make_replica)
        settings = replace(settings, mode=_outline(settings.mode, names, groups), make_replica=make_replica)
        self._buckets: list[SharedBucket] = []
        super().__init__(settings, passes_per_step, averages_passes, makes_buckets=False, make_group=self._make_bucket)
        self._gradients = SentGradients(settings.session, self.prefix)
        self._world = self.context
        self._arrivals = Arrivals(model)
        self._sender = ThreadPoolExecutor(UNDER_WAY, "ringtrain.values")
        self._withheld: list[tuple[torch.Tensor, torch.Tensor]] = []  # while the user's step finds nothing to do
        self._failure: str | None = None
        self._has_warned = False
        self.add_names(names)
        self.add_groups(groups)
        self._world.unsettled.add(self)
        self._world.serving.add(self)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Around its steps."""
        self._state = SharedState(optimizer, self.settings.session, self.prefix, self._buckets)
        # A thread of the sender may have this mode for a moment longer than the optimizer lives.
        self._serve_no_more = weakref.finalize(optimizer, self._world.serving.discard, self)
        self._serve_no_more.atexit = False
        super().attach(optimizer)

    def _make_bucket(self, name: str, members: list[OptimizedParameter]) -> SharedBucket:
        self._buckets.append(SharedBucket(name, members, self.settings, self._gradients))
        return self._buckets[-1]

    def add(self, names: Mapping[torch.Tensor, str]) -> None:
        """Takes over parameters that were added to the optimizer, in buckets of their own."""
        self.flush()
        self.add_names(names)
        self.add_groups(_grouped(names))

    def close(self) -> None:
        """Gives back whole state, on all ranks together, and removes the hooks."""
        if self._world.usable:
            self.flush()
            if not self._state.is_whole:
                self._state.consolidate(None)
                self._state.make_whole()
            super().close()
        else:
            self._arrivals.give_up()
        self._sender.shutdown(wait=False)
        self._world.unsettled.discard(self)
        self._serve_no_more()
        for sent in self._gradients.in_place():
            sent.parameter.grad = None

    def note_hook(self, optimizer: torch.optim.Optimizer) -> None:
        """The user's hooks come before the update."""
        if self._handles:
            optimizer._optimizer_step_pre_hooks.move_to_end(self._handles[0].id)

    # ---- a step ----

    def flush(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Returns when the parameters have the values of the last step; on this rank alone, at any time."""
        self._arrivals.wait_for_all()

    def settle(self) -> None:
        """Before this rank leaves its world."""
        self.flush()

    def scales(self, by_itself: bool) -> bool:
        """False has ``GradScaler`` unscale the gradients itself, also where the user's class could."""
        super().scales(by_itself)
        return False

    def discard(self, zeros: bool = False) -> None:
        """Before gradients are set to zero: begins a new step."""
        super().discard(zeros)
        for bucket in self._buckets:
            bucket.has_sums = False

    @eager
    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, object]) -> None:
        """All of the user's step: it finds no gradients then."""
        if closure_of(args, kwargs) is not None:
            check_needs(["ShardedStep"], {"closure": True}, "step")
        self._require_world()
        self.flush()
        super().before_step(optimizer, args, kwargs)
        self._state.deal_out()
        due = [bucket for bucket in self._buckets if bucket.is_due()]
        awaited = self._arrivals.let_wait() if due else set()
        try:
            for bucket in due:
                self._step_with(optimizer, bucket.read())
                self._arrivals.expect(bucket.members, partial(_take, self._sender.submit(bucket.exchange_values)))
            trained = [parameter for bucket in self._buckets for parameter in bucket.parameters]
            for parameter in trained:
                if parameter not in awaited:
                    self._arrivals.wait_for(parameter)
        except BaseException as problem:
            self._failure = (
                f"step '{self.prefix}': expected the last step to have ended but found that it has failed: {problem} Start "
                "again from a checkpoint."
            )
            raise
        self._warn_of_compiler()
        self._withheld = [(each, each.grad) for each in trained if each.grad is not None]
        for parameter, _ in self._withheld:
            parameter.grad = None

    def _require_world(self) -> None:
        if self._failure is not None:
            raise InvalidArgumentError(self._failure)
        for bucket in self._buckets[:1]:
            bucket.require_world(self.settings)

    def _step_with(self, optimizer: torch.optim.Optimizer, parts: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """The user's own step, with parts in place of parameters, and without those that have none."""
        groups, state = optimizer.param_groups, optimizer.state
        optimizer.param_groups = [
            {**group, "params": [parts[p] for p in group["params"] if p in parts]} for group in groups
        ]
        optimizer.state = {part: state[parameter] for parameter, part in parts.items()}
        try:
            self._update(optimizer)
        finally:
            optimizer.param_groups, optimizer.state = groups, state

    def _warn_of_compiler(self) -> None:
        if compiles() and self._arrivals.model is not None and not self._has_warned:
            self._has_warned = True
            log.logger.warning(
                "ShardedStep: torch.compile is in use, whose code does not say which parameters it reads; so step() waits for "
                "all of them. Gradients still travel in the backward pass, and each rank updates its share"
            )

    @eager
    def after_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """The optimizer has stepped."""
        for parameter, gradient in self._withheld:
            parameter.grad = gradient
        self._withheld = []
        super().after_step(optimizer)

    # ---- what is saved ----

    def state_dict(self, optimizer: torch.optim.Optimizer, of_user: Callable[[], State]) -> State:
        """The user's, with the whole state; raises InvalidArgumentError where this rank has its share alone."""
        shares, optimizer.state = optimizer.state, self._state.whole()
        try:
            return of_user()
        finally:
            optimizer.state = shares

    def load_state_dict(self, optimizer: torch.optim.Optimizer, of_user: Callable[[State], None], state: State) -> None:
        """The user's, of whole state; each rank keeps its share from the first step on."""
        self._state.make_whole()
        super().load_state_dict(optimizer, of_user, state)

    def gather_state(self, to: int | None) -> None:
        """Puts the shares together on one rank, or on all with None."""
        members = ranks_of(self.context, self.settings.session.process_set_id) or []
        if to is not None and to not in members:
            raise InvalidArgumentError(
                f"consolidate_state_dict: to must be a rank of the process set, which has {named_ranks(members)}, or None, but is {to!r}."
            )
        self._state.consolidate(to)

    def sharded_state(self, optimizer: torch.optim.Optimizer) -> State:
        """This rank's share of the state, as ``torch.distributed.checkpoint`` takes it."""
        self._require_world()
        return self._state.shards(partial(self._step_with, optimizer))

    def load_sharded_state(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        """Goes on with it; a begun step starts anew."""
        super().load_state_dict(optimizer, self._state.take_shards, state)

    def share_with(self, root: int) -> None:
        """The root's state becomes whole, and others forget what they have."""
        self._state.consolidate(root)
        self._state.make_whole()

    def check_copy(self) -> None:
        """Raises UnsupportedError where this rank has its share alone."""
        if not self._state.is_whole:
            raise UnsupportedError(
                "copy of an optimizer: expected its whole state but found this rank's share of it (ShardedStep). Call "
                "consolidate_state_dict() on all ranks, and copy state_dict()."
            )


def _take(exchanged: "Future[Callable[[], None]]") -> None:
    exchanged.result()()


def _grouped(names: Mapping[torch.Tensor, str]) -> list[list[torch.Tensor]]:
    """Parameters by bucket: in order, those that are frozen apart, as their gradients would be waited for."""
    parameters = list(names)
    kinds = [(each.dtype, each.device, each.requires_grad) for each in parameters]
    places = bucketed(kinds, [each.nbytes for each in parameters], BUCKET_BYTES)
    return [[parameters[place] for place in bucket] for bucket in places]


def _outline(mode: str, names: Mapping[torch.Tensor, str], groups: Sequence[Sequence[torch.Tensor]]) -> str:
    """The mode's name, and how parameters are shared out: what must be the same on all ranks."""
    described = [[(names[each], tuple(each.shape), str(each.dtype)) for each in group] for group in groups]
    digest = hashlib.blake2b(repr(described).encode(), digest_size=6).hexdigest()
    return f"{mode} of {len(names)} parameters in {len(groups)} buckets ({digest})"


def _comparing_settings(make: Callable[[], ComparedReplica]) -> ComparedReplica:
    """What is compared, without the parameters: each step gives all ranks one value of each, which may be on its way."""
    replica = make()
    replica.compares = False
    return replica


def _bare_step(user_class: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], object]:
    """The step of an optimizer's class without what torch puts around it: hooks, and a range of the profiler."""
    step = user_class.step
    bare: Callable[[torch.optim.Optimizer], object] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return bare
