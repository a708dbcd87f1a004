"""Steps whose communication goes on in the next forward pass: each rank updates a share, and values come when needed.

``modes.sharded_step`` makes one ``Ahead``. In the backward pass a bucket of gradients
that is full is scattered as sums (``reducescatter``); ``step()`` has the user's optimizer update this rank's share of
each bucket, in the order of the parameters, and gathers its values (``allgather``) while it goes on with the next one.
Whoever uses a parameter then waits for its bucket (``arrivals``). The state of the optimizer is that of the share.

``step()`` reads the share from the parameters themselves, so it does not matter who has written them. What ranks have of
each gradient is agreed on in one round of each step, as elsewhere.
"""

import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch

from ringtrain import log, ranges
from ringtrain.buffers import as_buffer
from ringtrain.context import Context
from ringtrain.errors import InvalidArgumentError, RingtrainError, UnsupportedError
from ringtrain.gradients.differences import waited
from ringtrain.gradients.presence import DENSE, MISSING, SETTLED, is_there
from ringtrain.gradients.rounds import Rounds, Stage
from ringtrain.gradients.shares import bucketed, laid_out
from ringtrain.numbering import next_number
from ringtrain.torch import whole_state
from ringtrain.torch.ahead_buckets import SentGradient, SharedBucket
from ringtrain.torch.arrivals import Arrivals, compiles
from ringtrain.torch.backward import PassPart
from ringtrain.torch.gradients import ReductionSettings
from ringtrain.torch.hooks import Hooks, dismiss, enlist, others
from ringtrain.torch.outbox import Outbox
from ringtrain.torch.passes import Passes

BUCKET_BYTES = 4 << 20


class Ahead:
    """The steps of one optimizer.

    Args:
        optimizer: whose steps these are.
        user_class: its class as the user made it.
        settings: how gradients are combined, the same on all ranks.
        names: its parameters with their names, in the order in which a forward pass is expected to need them.
        passes_per_step: backward passes that are summed here before their gradients travel.
        averages_passes: whether the sum is then divided by that.
    """

    def __init__(
        self, optimizer: Any, user_class: type, settings: ReductionSettings, names: Mapping[torch.Tensor, str],
        passes_per_step: int, averages_passes: bool,
    ):  # fmt: skip
        self._settings, self._session = settings, settings.session
        self._update = _bare_step(user_class)
        self.passes = Passes(self.look, self._end_pass, passes_per_step, averages_passes)
        self._parameters, self._names = list(names), list(names.values())
        context = self._session.context
        self.prefix = f"optimizer.{next_number(context, self._session.process_set_id, 'optimizer')}"
        members = context.process_set_ranks(self._session.process_set_id) or []
        self._buckets = list(self._made_buckets(len(members), members.index(context.rank)))
        self._bucket_of = [bucket for bucket in self._buckets for _ in bucket.parameters]
        self._parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        self._names = [name for bucket in self._buckets for name in bucket.names]
        self._sent = [SentGradient.of(*pair) for pair in zip(self._parameters, self._names, strict=True)]
        self._taken = bytearray(len(self._parameters))
        self._open = dict.fromkeys(self._buckets, 0)  # gradients that a bucket waits for
        terms = settings.terms | {"layout": self._outline()}
        replica = settings.replica()
        if replica is not None:
            replica.compares = (
                False  # each step gives all ranks one value of each parameter, and whoever reads it waits
            )
        self._rounds = Rounds(self._session, f"{self.prefix}.used", terms, replica, comes_alike=True)
        self._agreed: bytes | None = None  # which gradients there are; None until this step is closed
        self._arrived = False
        self._unended = True  # whether a rank may have sent something that no step has used; the same on all ranks
        self._lock = threading.Lock()
        self._arrivals, self._outbox = Arrivals(), Outbox()
        self._spare = torch.nn.Parameter(torch.zeros(1), requires_grad=False)  # brings a scaler the news of all ranks
        self._failure: str | None = None
        self.state = whole_state.SharedState(optimizer, self._settings, self.prefix, self._buckets)
        self._has_warned = False
        self.passes.add(len(self._parameters))
        self._hooks = Hooks()
        for other in others(self):
            other.release(set(self._parameters), self)
        for index, parameter in enumerate(self._parameters):
            self._hooks.attach(self, parameter, index)
        enlist(self)
        context.unsettled.add(self)
        context.serving.add(self)
        self._begin()

    def __reduce__(self) -> tuple:
        """Copies and pickles of an optimizer are plain optimizers: hooks and a world do not travel."""
        return type(None), ()

    def _made_buckets(self, members: int, member: int) -> Iterator[SharedBucket]:
        parameters = self._parameters
        kinds = [(parameter.dtype, parameter.device) for parameter in parameters]
        sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        first = 0
        for places in bucketed(kinds, sizes, BUCKET_BYTES):
            chosen, names = [parameters[place] for place in places], [self._names[place] for place in places]
            layout = laid_out([parameter.numel() for parameter in chosen], members)
            yield SharedBucket(chosen, names, first, layout, member)
            first += len(places)

    def _outline(self) -> str:
        described = [
            (name, tuple(p.shape), str(p.dtype)) for name, p in zip(self._names, self._parameters, strict=True)
        ]
        digest = hashlib.blake2b(repr(described).encode(), digest_size=6).hexdigest()
        return f"{len(described)} parameters in {len(self._buckets)} buckets ({digest})"

    # ---- who it is ----

    @property
    def context(self) -> Context:
        """The rank that this optimizer acts for."""
        return self._session.context

    @property
    def number(self) -> int:
        """Its place among the optimizers of its world."""
        return int(self.prefix.rpartition(".")[2])

    def release(self, parameters: set[torch.Tensor], owner: Any) -> None:
        """Leaves parameters to an optimizer that was made later: two would reduce one gradient twice."""
        if self._hooks.has_any(parameters):
            self.settle()
            self._hooks.release(parameters, owner.prefix)

    def close(self) -> None:
        """Gives back whole state, on all ranks together, and removes the hooks."""
        if not self.context.usable:
            self._arrivals.give_up()
            self._outbox.clear()
            self.state.forget()
        else:
            self.settle()
            if not self.state.is_whole:
                self.state.consolidate(None)
                self.state.take_whole()
        self._hooks.remove()
        dismiss(self)
        self.context.unsettled.discard(self)
        self.context.serving.discard(self)
        for parameter in self._parameters:
            if isinstance(parameter.grad, SentGradient):
                parameter.grad = None

    def settle(self) -> None:
        """Waits for the values of all parameters; while they are on their way, every use of one does it for that one."""
        self._arrivals.watch_no_more()

    @property
    def refuses_join(self) -> str:
        """Why this rank cannot leave the others alone."""
        return (
            "join: this rank must go on updating its share of the parameters (ShardedStep), but would update none any "
            "more. Give all ranks as many steps, or choose another mode."
        )

    def _require_world(self) -> None:
        if self._failure is not None:
            raise InvalidArgumentError(self._failure)
        if not self.context.usable and not self.state.is_whole:
            raise InvalidArgumentError(
                f"step '{self.prefix}': expected the world in which ranks took shares of the optimizer's state but found that it has "
                "ended, and the shares with it. In the new world wrap a new optimizer, and load a state that was consolidated."
            )
        if self._session.has_moved():
            raise InvalidArgumentError(
                f"step '{self.prefix}': expected the world in which ShardedStep was chosen but found another one. Wrap the "
                "optimizer again after init()."
            )

    # ---- gradients: hooks ----

    @property
    def parts(self) -> dict[int, PassPart]:
        """For the hooks: those of the pass under way."""
        return self.passes.parts

    def begin_part(self) -> PassPart:
        """For the hooks: the first one of a part runs; each of them asks to look."""
        with self._lock:
            if not self.passes.parts:
                self._count_open()
            self._unended |= not self.passes.silent
            return self.passes.enter()

    def look(self, part: PassPart) -> None:
        """For the hooks: a backward pass has added to gradients."""
        with self._lock:
            for index in part.unseen():
                parameter = self._parameters[index]
                if self._taken[index] or self._agreed is not None:
                    raise InvalidArgumentError(self._too_many(index))
                if self._bucket_of[index].is_sent:
                    raise InvalidArgumentError(self._too_late(index))
                if self.passes.count(index, parameter.grad, part.nested):
                    self._take(index)

    def _end_pass(self) -> None:
        """What parts of the pass within others have completed leaves now."""
        with self._lock:
            for index, parameter in enumerate(self._parameters):
                if not self._taken[index] and parameter.grad is not None and self.passes.has_all(index):
                    self._take(index)

    def _too_many(self, index: int) -> str:
        return (
            f"backward '{self._names[index]}': expected {self.passes.per_step} backward passes in a step but found another "
            f"one. {self.passes.instead_of_another()}."
        )

    def _take(self, index: int) -> None:
        """Puts a gradient into its bucket, which leaves when it is full."""
        bucket, parameter = self._bucket_of[index], self._parameters[index]
        try:
            bucket.take_in(index - bucket.first, self._dense(index))
        except RingtrainError as problem:  # the peers hear of it when their shares of this bucket fail
            bucket.refuse(problem)
        parameter.grad = self._sent[index]
        self._taken[index] = True
        self._open[bucket] -= bool(parameter.requires_grad)
        if self._open[bucket] == 0 and not bucket.is_sent:
            self._fill_and_send(bucket)

    def _dense(self, index: int) -> torch.Tensor:
        gradient = self._parameters[index].grad
        assert gradient is not None  # it was completed
        if gradient.is_sparse and self._settings.sparse_as_dense:
            return gradient.detach().to_dense()
        if gradient.layout is not torch.strided:
            bucket = self._bucket_of[index]
            problem = UnsupportedError(
                f"gradient of '{self._names[index]}': expected a dense one, as ShardedStep needs it, but found "
                f"{gradient.layout}. Set sparse_as_dense, or choose another mode."
            )
            name = f"{self.prefix}.{bucket.names[0]}"
            self.context.refuse("reducescatter", name, self._session.process_set_id, problem)
        return gradient.detach()

    def _fill_and_send(self, bucket: SharedBucket) -> None:
        for place in bucket.places:
            if not self._taken[place]:
                bucket.take_in(place - bucket.first, None)
        bucket.send_gradients(self.prefix, self._settings, self.passes.divisor)

    # ---- a step ----

    def _begin(self) -> None:
        """A new step: everything is open."""
        for bucket in self._buckets:
            bucket.end_step()
        self._taken = bytearray(len(self._parameters))
        self._agreed, self._arrived = None, False
        self.passes.begin_step(list(range(len(self._parameters))))

    def _count_open(self) -> None:
        """Before the first gradient of a pass: which ones may come in it. Parameters may have been frozen or unfrozen since."""
        for bucket in self._buckets:
            self._open[bucket] = sum(
                self._parameters[place].requires_grad and not self._taken[place] for place in bucket.places
            )

    def _close(self, stage: Stage) -> bytes:
        """Agrees on which gradients there are, and sends the rest of them; on all ranks together."""
        if self._agreed is not None:
            return self._agreed
        self._require_world()
        lost = self._hooks.lost
        if lost is not None:
            raise InvalidArgumentError(
                f"step '{self.prefix}': expected to reduce a parameter of its own but '{lost.owner}' does, which was made later "
                "over the same one. Give each parameter to one distributed optimizer."
            )
        try:
            with self._lock, ranges.around("ringtrain.synchronize"):
                own = bytes(self._code_of(index, stage) for index in range(len(self._parameters)))
                self._rounds.announce(own, stage)
                agreed = self._rounds.wait_for_answer().codes
                waited(self._rounds.require_equal())
                self._rounds.succeed()
                for bucket in self._buckets:
                    if not bucket.is_sent and any(is_there(agreed[place]) for place in bucket.places):
                        self._fill_and_send(bucket)
        except RingtrainError:
            self._rounds.forget()
            self._rounds.forget_steps()
            raise
        self._agreed = agreed
        return agreed

    def _code_of(self, index: int, stage: Stage) -> int:
        parameter, bucket = self._parameters[index], self._bucket_of[index]
        gradient = parameter.grad
        if stage is Stage.DISCARDING:
            return DENSE if bucket.is_sent else MISSING
        if self._taken[index]:
            if gradient is None:
                return MISSING  # the user has dropped it, on all ranks
            if gradient is not self._sent[index]:
                raise InvalidArgumentError(
                    f"gradient of '{self._names[index]}': expected it as backward() left it, since it has been sent, but found another "
                    "one in its place. Change gradients with optimizer.clip_grad_norm_(), or choose another mode."
                )
            return DENSE
        if gradient is None:
            return MISSING if parameter.requires_grad else SETTLED
        if not bucket.is_sent:
            try:
                bucket.take_in(index - bucket.first, self._dense(index))
            except RingtrainError as problem:
                bucket.refuse(problem)
            self._taken[index] = True
            return DENSE
        raise InvalidArgumentError(self._too_late(index))

    def _too_late(self, index: int) -> str:
        return (
            f"gradient of '{self._names[index]}': expected it before those of its bucket were sent but found it after, as of a "
            "parameter that was frozen in the backward pass. Unfreeze parameters before backward()."
        )

    def _await_shares(self) -> None:
        """Returns when this rank has its share of all gradients."""
        agreed = self._close(Stage.CLOSING)
        if not self._arrived:
            self._each_bucket(lambda bucket: bucket.await_share(self._there(bucket, agreed)))
            self._arrived = True

    def _there(self, bucket: SharedBucket, agreed: bytes) -> list[bool]:
        return [is_there(agreed[place]) for place in bucket.places]

    def _each_bucket(self, function: Callable[[SharedBucket], None]) -> None:
        """Calls a function for all buckets, also behind one that fails, so that no name stays in flight."""
        problem: RingtrainError | None = None
        for bucket in self._buckets:
            try:
                function(bucket)
            except RingtrainError as failed:
                problem = problem or failed
        if problem is not None:
            raise problem

    def before_step(self, optimizer: Any) -> None:
        """All of the user's step: it finds no gradients then."""
        self.settle()
        agreed = self._close(Stage.CLOSING)
        self.state.deal_out()
        try:
            for bucket in self._buckets:
                there = self._there(bucket, agreed)
                if any(there):
                    if not self._arrived:
                        bucket.await_share(there)
                    bucket.read_values()
                    self._update_share(optimizer, bucket)
                    self._send_values(bucket)
        except BaseException as problem:
            self._failure = (
                f"step '{self.prefix}': expected the last step to have ended but found that it has failed: {problem} Start "
                "again from a checkpoint."
            )
            raise
        if self._waits_at_once():
            self.settle()
        for parameter in self._parameters:
            parameter.grad = None

    def _send_values(self, bucket: SharedBucket) -> None:
        """Sends this rank's share of the values when those before have arrived, and has whoever uses one wait for all shares."""
        send = functools.partial(bucket.send_values, self.prefix, self._settings)

        def take() -> None:
            self._outbox.send_until(send)
            bucket.take_values()

        self._arrivals.expect(bucket.parameters, take)
        self._outbox.offer(send)

    def _update_share(self, optimizer: Any, bucket: SharedBucket) -> None:
        """The user's own step, over this rank's pieces of one bucket."""
        pieces = {bucket.parameters[piece.tensor]: parameter for piece, parameter in bucket.pieces}
        groups = optimizer.__dict__["param_groups"]
        shared = [{**group, "params": [pieces[p] for p in group["params"] if p in pieces]} for group in groups]
        optimizer.__dict__["param_groups"] = shared
        try:
            self._update(optimizer)
        finally:
            optimizer.__dict__["param_groups"] = groups

    def _waits_at_once(self) -> bool:
        if not compiles():
            return False
        if not self._has_warned:
            self._has_warned = True
            log.logger.warning(
                "ShardedStep: torch.compile is in use, whose code does not say which parameters it reads; so step() waits for "
                "all of them. Gradients still travel in the backward pass, and each rank updates its share"
            )
        return True

    def after_step(self) -> None:
        """The optimizer has stepped."""
        for index, taken in enumerate(self._taken):
            if taken and self._parameters[index].grad is None:
                self._parameters[index].grad = self._sent[index]
        self._rounds.note_step()
        self._unended = False
        self._begin()

    def discard(self, zeros: bool) -> None:
        """Before gradients are set to zero: a new step begins. Ranks give up one that came to no end together."""
        if self._agreed is None and self._unended:
            self._close(Stage.DISCARDING)
        self._each_bucket(SharedBucket.await_all)
        for parameter in self._parameters:
            if isinstance(parameter.grad, SentGradient):
                parameter.grad = torch.zeros_like(parameter.detach()) if zeros else None
        self.passes.forget()
        self._begin()
        self._unended = True

    # ---- what is done with gradients before a step ----

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """``clip_grad_norm_`` over the shares of all ranks."""
        self._await_shares()
        shares = [share for bucket in self._buckets for share in bucket.share_of_gradients()]
        p = float(norm_type)
        infinite = p == float("inf")
        powers = [share.detach().abs().double() for share in shares]
        own = max((float(each.max()) for each in powers), default=0.0) if infinite else float(
            sum((each.pow(p).sum() for each in powers), torch.zeros((), dtype=torch.float64))
        )  # fmt: skip
        total = self._of_all_ranks("norm", own, "max" if infinite else "sum")
        norm = torch.tensor(total if infinite else total ** (1 / p), dtype=torch.float64)
        if error_if_nonfinite and not norm.isfinite():
            raise InvalidArgumentError(
                f"clip_grad_norm_: the norm of the gradients must be finite, but is {norm.item()}."
            )
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for share in shares:
            share.mul_(factor.to(share.dtype))
        return norm

    def _of_all_ranks(self, what: str, own: float, reduction: str) -> float:
        value = np.array([own])
        buffer, session = as_buffer(value), self._session
        session.context.submit(
            "allreduce", f"{self.prefix}.{what}", [buffer], [buffer],
            reduction=reduction, process_set=session.process_set_id, waits=True,
        ).wait()  # fmt: skip
        return float(value[0])

    def groups_to_unscale(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """For a ``GradScaler``: the param groups with this rank's pieces; it finds an infinity where any rank has one."""
        self._await_shares()
        shares = [share for bucket in self._buckets for share in bucket.share_of_gradients()]
        own = not all(bool(share.isfinite().all()) for share in shares)
        found = self._of_all_ranks("found_inf", float(own), "max")
        self._spare.grad = torch.full((1,), float("inf") if found else 0.0)
        pieces = [piece for bucket in self._buckets for _, piece in bucket.pieces]
        return [{**groups[0], "params": [*pieces, self._spare]}]


def _bare_step(user_class: Any) -> Callable[[Any], Any]:
    """The step of an optimizer's class without what torch puts around it: hooks, and a range of the profiler."""
    step = user_class.step
    bare: Callable[[Any], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return bare


def is_unscaling(caller: FrameType) -> bool:
    """Whether a ``GradScaler`` asks for param groups because it looks at the gradients."""
    return caller.f_code is torch.amp.GradScaler._unscale_grads_.__code__
