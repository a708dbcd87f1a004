"""What the leaders of replicas do together: a leader is a rank of the job, and speaks for its replica.

Steps survive by the transaction of all elastic jobs (``ringtrain.elastic.transaction``). What follows for the samples and the
state of each process, the leader has its replica do.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ringtrain._bootstrap import membership, start
from ringtrain._runtime import context as contexts
from ringtrain._runtime.context import current
from ringtrain._runtime.objects import allgather_object
from ringtrain._training.step_guard import Part
from ringtrain.elastic.balance import ShareRules
from ringtrain.elastic.likeness import refusal, unlike
from ringtrain.elastic.lossless import say_joined
from ringtrain.elastic.transaction import Transaction
from ringtrain.errors import MismatchError, UnsupportedError
from ringtrain.torch import reductions
from ringtrain.torch.distributed.replica import Replica
from ringtrain.torch.distributed.replica_sampler import ReplicaSampler
from ringtrain.torch.distributed.replica_state import ReplicaState

Result = TypeVar("Result")
_GRADIENTS = "ringtrain.replicas.gradients"
_OBJECTS = "ringtrain.replicas.objects"
_OUTLINE = "ringtrain.replicas.outline"
_DRAWN = "ringtrain.replicas.drawn"


class Replicas:
    """All of them, as one leader sees them. Its methods are for leaders, in ``Replica.together``.

    Args:
        replica: its own.
        sampler: of its process.
        state: what replicas that join take over.
        step: how many updates were made.

    Attributes:
        has_updated: an optimizer has, since the last step was ended.
    """

    def __init__(self, replica: Replica, sampler: ReplicaSampler, state: ReplicaState, step: Callable[[], int]) -> None:
        self._replica, self._sampler, self._state, self._step = replica, sampler, state, step
        self._transaction: Transaction | None = None  # None in a job of a fixed size
        self.has_updated = False

    def join(self) -> None:
        """Becomes a rank of the job, if there are others.

        Raises:
            UnsupportedError: ``--batch constant`` or ``balanced``.
        """
        if self._replica.is_alone:
            return
        if not contexts.is_initialized():
            start.init()
        member = membership.current()
        if member is None:
            return
        if member.planned:
            raise UnsupportedError(
                "ShardedGuard: replicas must have as many samples each, but the job has --batch constant or balanced. Leave the flag out."
            )
        self._transaction = Transaction(
            member, _ReplicatedTraining(self._replica, self._sampler, self._state, self.drawn)
        )

    @property
    def place(self) -> tuple[int, int]:
        """The number of this replica, and how many there are."""
        return (0, 1) if self._replica.is_alone else (current().rank, current().size)

    # ---- the loop ----

    def enter(self) -> None:
        """The loop begins, with the state of the first replica."""
        if self._transaction is not None:
            joins = current().takes_over
            self._transaction.enter()
            if joins:
                say_joined(self._step())
            return
        if not self._replica.is_alone:
            self._refuse_unlike()
            self._state.exchange(self._replica)
        number, count = self.place
        self._replica.tell("deal", count, number)

    def _refuse_unlike(self) -> None:
        outlines = allgather_object(self._state.outline(self._replica.size), _OUTLINE)
        if different := unlike(outlines):
            raise MismatchError(refusal(outlines, different[0]))

    def pause(self) -> None:
        """Between two steps: lets replicas join and leave, if all have agreed on it."""
        self._end_step()
        if self._transaction is not None:
            self._transaction.close()
            self._transaction.pause()

    def begin(self) -> None:
        """The next step begins."""
        self.pause()
        if self._transaction is not None:
            self._transaction.begin()

    def end_epoch(self) -> None:
        """Has the next epoch begin between two steps: the draw that has found nothing left was for none."""
        self._end_step()
        if self._transaction is not None and not self._sampler.has_drawn:
            self._transaction.close(is_empty=True)

    def finish(self) -> None:
        """Returns when all replicas have the last step."""
        if self._transaction is not None:
            self._transaction.finish()

    def _end_step(self) -> None:
        """If an update was made, the samples of its step are done."""
        if not self.has_updated:
            return
        self.has_updated = False
        if self._transaction is not None:
            self._transaction.close(is_empty=True)
        else:
            self._replica.tell("finish_window", None)  # nobody can be lost

    # ---- what they exchange ----

    def drawn(self) -> str:
        """What this replica has drawn for the open window, in words that must be the same in all."""
        return f"{self._sampler.drawn} behind {self._step()} updates"

    def average(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of flat tensors, which stay as they are.

        Raises:
            MismatchError: replicas have drawn other numbers of samples, or made other numbers of updates.
        """
        if self._transaction is None:  # whose vote compares
            _require_same_steps(allgather_object(self.drawn(), _DRAWN))
        return self._survive(lambda: reductions.grouped_allreduce(parts, name=_GRADIENTS), Part.SOME)

    def gathered(self, values: list[Any]) -> list[Any]:
        """What all processes have, by replica and process."""
        of_all = self._survive(lambda: allgather_object(values, _OBJECTS), Part.NOTHING)
        return [each for replica in of_all for each in replica]

    def _survive(self, function: Callable[[], Result], part: Part) -> Result:
        return function() if self._transaction is None else self._transaction.survive(function, part)


def _require_same_steps(drawn: Sequence[str]) -> None:
    other = next((number for number, each in enumerate(drawn) if each != drawn[0]), None)
    if other is not None:
        raise MismatchError(
            f"ShardedGuard: all replicas must draw as many samples and make the same updates, but replica {other} has drawn "
            f"{drawn[other]}, and replica 0 {drawn[0]}. Give all loaders one batch_size, and call optimizer.step() in all or in none."
        )


class _ReplicatedTraining:
    """What the transaction of a leader goes on with; it owns nothing."""

    def __init__(
        self, replica: Replica, sampler: ReplicaSampler, state: ReplicaState, drawn: Callable[[], str]
    ) -> None:
        self._replica, self._sampler, self._state = replica, sampler, state
        self.drawn = drawn

    def enter_world(self) -> None:
        """Nothing is bound to a world."""

    def outline(self) -> dict[str, str]:
        return self._state.outline(self._replica.size)

    def take_state(self) -> None:
        self._state.exchange(self._replica)

    def deal(self, size: int, place: int) -> None:
        self._replica.tell("deal", size, place)

    def batch(self) -> int:
        return self._sampler.batch

    def share_rules(self) -> ShareRules:
        return ShareRules()

    def work(self) -> float:
        return self._sampler.work

    def share(self, counts: Sequence[int]) -> None:
        """Shares are equal."""

    def finish_window(self, contributors: set[int] | None) -> None:
        self._replica.tell("finish_window", contributors)

    def weight(self, contributors: set[int] | None) -> int | None:
        """All count alike."""
