"""The state of an optimizer of which each rank has a share (``ahead``), and the whole of it for checkpoints.

Until the first step the state is whole and belongs to the parameters, as in any optimizer: as made, loaded or broadcast.
The first step keeps of it what belongs to this rank's pieces. ``consolidate`` puts it together again, for a checkpoint
that optimizers of any kind, on any number of ranks, load.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ringtrain.checks import named_ranks
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.objects import allgather_object
from ringtrain.torch.ahead_buckets import SharedBucket
from ringtrain.torch.gradients import ReductionSettings
from ringtrain.torch.tensors import buffer_of, finish, received

_State = dict[Any, dict[str, Any]]


class SharedState:
    """The state of one optimizer.

    Args:
        optimizer: whose ``state`` it is.
        settings: of its session.
        prefix: of the names of what is submitted.
        buckets: have the pieces.

    Attributes:
        is_whole: whether the state belongs to the parameters, and not to pieces of them.
    """

    def __init__(self, optimizer: Any, settings: ReductionSettings, prefix: str, buckets: Sequence[SharedBucket]):
        self._optimizer, self._settings, self._prefix, self._buckets = optimizer, settings, prefix, buckets
        self._consolidated: _State | None = None
        self.is_whole = True

    # ---- dealing out ----

    def deal_out(self) -> None:
        """Before a step: each piece gets its part of the state of its parameter, and the rest is forgotten."""
        self._consolidated = None
        if not self.is_whole:
            return
        state = self._optimizer.state
        for bucket in self._buckets:
            for piece, parameter in bucket.pieces:
                of_all = state.get(bucket.parameters[piece.tensor])
                if of_all:
                    shape = bucket.parameters[piece.tensor].shape
                    state[parameter] = {
                        key: _part(value, shape, piece.first, piece.last) for key, value in of_all.items()
                    }
            for parameter in bucket.parameters:
                state.pop(parameter, None)
        self.is_whole = False

    def forget(self) -> None:
        """Whole state is about to be loaded."""
        for bucket in self._buckets:
            for _, piece in bucket.pieces:
                self._optimizer.state.pop(piece, None)
        self._consolidated, self.is_whole = None, True

    # ---- putting together ----

    def consolidate(self, to: int | None) -> None:
        """Puts the whole state together on rank ``to``, or on all; all ranks call this."""
        if self._is_whole_on(to):
            return
        keeps = to is None or self._settings.session.context.rank == to
        self._consolidated = None
        whole: _State = {}
        kinds = self._kinds()
        for bucket in self._buckets:
            keys = {(key, kind) for place in bucket.places for key, kind in kinds.get(place, {}).items()}
            for key, kind in sorted((key, kind) for key, kind in keys if isinstance(kind, str)):
                every = self._gathered(bucket, key, getattr(torch, kind))
                for index, parameter in enumerate(bucket.parameters):
                    if keeps and kinds.get(bucket.first + index, {}).get(key) == kind:
                        at, count = bucket.layout.offsets[index], bucket.layout.counts[index]
                        whole.setdefault(parameter, {})[key] = every[at : at + count].clone().view(parameter.shape)
            for index, parameter in enumerate(bucket.parameters):
                for key, kind in kinds.get(bucket.first + index, {}).items():
                    if keeps and isinstance(kind, tuple):
                        whole.setdefault(parameter, {})[key] = kind[0]
        if keeps:
            self._consolidated = whole

    def _is_whole_on(self, to: int | None) -> bool:
        """Whether the state is whole on that rank, or on all.

        Raises MismatchError, on all ranks, if shares are needed that a rank has given up for a state that it has loaded alone.
        """
        session = self._settings.session
        everyone = allgather_object((session.context.rank, self.is_whole), f"{self._prefix}.whole", session.process_set)
        whole = [rank for rank, is_whole in everyone if is_whole]
        if len(whole) == len(everyone) or to in whole:
            return True
        if whole:
            raise MismatchError(
                f"consolidate_state_dict '{self._prefix}': expected shares of the optimizer's state on all ranks but found that "
                f"{named_ranks(whole)} loaded another state. Load it on all ranks, or broadcast_optimizer_state() from such a rank."
            )
        return False

    def gather_at(self, root: int) -> None:
        """The root's state becomes whole, and other ranks forget what they have; on all ranks together."""
        self.consolidate(root)
        if self._settings.session.context.rank != root:
            self.forget()
        else:
            self.take_whole()

    def _kinds(self) -> dict[int, dict[str, Any]]:
        """What the state of each parameter has on any rank: by key a dtype's name, or a tuple of the value itself."""
        own: dict[int, dict[str, Any]] = {}
        for bucket in self._buckets:
            for piece, parameter in bucket.pieces:
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    has_parts = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                    kind = str(value.dtype).removeprefix("torch.") if has_parts else (value,)
                    own.setdefault(bucket.first + piece.tensor, {})[key] = kind
        merged: dict[int, dict[str, Any]] = {}
        for theirs in allgather_object(own, f"{self._prefix}.state", self._settings.session.process_set):
            for place, kinds in theirs.items():
                merged.setdefault(place, {}).update(kinds)
        return merged

    def _gathered(self, bucket: SharedBucket, key: str, dtype: torch.dtype) -> torch.Tensor:
        share = torch.zeros(bucket.layout.share, dtype=dtype)
        for piece, parameter in bucket.pieces:
            value = self._optimizer.state.get(parameter, {}).get(key)
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dtype == dtype:
                share[piece.at :][: piece.last - piece.first].copy_(value)
        session = self._settings.session
        operation = session.context.submit(
            "allgather", f"{self._prefix}.{bucket.names[0]}.{key}", [buffer_of(share)], [None],
            process_set=session.process_set_id, waits=True,
        )  # fmt: skip
        finish(operation, share)
        return received(operation, share)

    def take_whole(self) -> None:
        """The optimizer's state becomes the whole one that was put together."""
        whole, state = self._consolidated, self._optimizer.state
        if whole is not None:
            self.forget()
            state.update(whole)

    @contextmanager
    def shown_whole(self, function: str) -> Iterator[None]:
        """A block in which the optimizer's state is the whole one.

        Raises InvalidArgumentError if that was not put together since the last step.
        """
        if self.is_whole:
            yield
            return
        if self._consolidated is None:
            raise InvalidArgumentError(
                f"{function}: expected consolidate_state_dict() on all ranks since the last step, as each has a share of the "
                "optimizer's state (ShardedStep), but there was none for this rank. Call it on all ranks, with to= this rank."
            )
        shares = self._optimizer.state
        self._optimizer.state = self._consolidated
        try:
            yield
        finally:
            self._optimizer.state = shares


def _part(value: Any, shape: torch.Size, first: int, last: int) -> Any:
    """A piece's part of a value of the state: of the elements where it has some for each element, else all of it."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == shape:
        return value.detach().reshape(-1)[first:last].clone()
    return value.detach().clone()
