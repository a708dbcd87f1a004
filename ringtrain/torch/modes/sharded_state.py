"""The optimizer's state with ``ShardedStep``: each rank has that of its parts of the parameters, and checkpoints the whole.

Until the first step the state is whole, as in any optimizer: as made, loaded or broadcast. The first step keeps of each
parameter's what belongs to this rank's part of it. ``consolidate`` puts it together again, for a checkpoint that optimizers
of any kind, on any number of ranks, load. ``torch.distributed.checkpoint`` takes it part by part, under torch's own names,
shapes and places of the whole.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ringtrain._runtime.objects import allgather_object
from ringtrain._training.adapter.checks import named_ranks
from ringtrain._training.agreement import advised
from ringtrain._training.session import Session
from ringtrain._training.shares import Box, Piece, boxes
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.torch.modes.base import State
from ringtrain.torch.modes.sharded_buckets import SharedBucket
from ringtrain.torch.modes.sharded_gradients import Placeholder, SentGradient

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_State = dict[torch.Tensor, State]
Update = Callable[[Mapping[torch.Tensor, torch.Tensor]], None]  # a step with these tensors in place of parameters


class SharedState:
    """The state of one optimizer.

    Args:
        optimizer: which has it.
        session: the rank, and those that share the state.
        prefix: of the names of what is submitted.
        buckets: have the parts; further ones may come.

    Attributes:
        is_whole: whether the state is of whole parameters, and not of this rank's parts.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, session: Session, prefix: str, buckets: Sequence[SharedBucket]
    ):
        self._refer, self._session, self._prefix, self._buckets = weakref.ref(optimizer), session, prefix, buckets
        self._consolidated: _State | None = None
        self.is_whole = True

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._refer()
        assert optimizer is not None  # who asks has it
        return optimizer

    @property
    def _sent(self) -> Iterator[SentGradient]:
        return (each for bucket in self._buckets for each in bucket.sent)

    # ---- whole and in parts ----

    def deal_out(self) -> None:
        """Before a step: keeps of the state what belongs to this rank's parts, and forgets the rest."""
        self._consolidated = None
        if self.is_whole:
            self._keep_parts(lambda sent: self._optimizer.state.pop(sent.parameter, None))

    def _keep_parts(self, values_of: Callable[[SentGradient], State | None]) -> None:
        for sent in self._sent:
            values = values_of(sent)
            if values and sent.part is not None:
                self._optimizer.state[sent.parameter] = {key: _own(sent, value) for key, value in values.items()}
        self._consolidated, self.is_whole = None, False

    def consolidate(self, to: int | None) -> None:
        """Puts the whole state together on rank ``to``, or on all; all ranks call this."""
        if self._is_whole_on(to):
            return
        state, whole = self._optimizer.state, _State()
        for bucket in self._buckets:
            own = [(sent.piece, state.get(sent.parameter)) for sent in bucket.sent]
            for of_rank in allgather_object(own, f"{bucket.name}.state", self._session.process_set):
                for sent, (piece, part) in zip(bucket.sent, of_rank, strict=True):
                    if part:
                        _put_together(whole.setdefault(sent.parameter, {}), sent.shape, piece, part)
        self._consolidated = whole if to is None or self._session.context.rank == to else None

    def _is_whole_on(self, to: int | None) -> bool:
        """Whether the state is whole on that rank, or on all.

        Raises MismatchError, on all ranks, if shares are needed that a rank has given up for a state that it has loaded alone.
        """
        said = (self._session.context.rank, self.is_whole)
        with advised(
            "Call consolidate_state_dict() and broadcast_optimizer_state() on all ranks, after the same step."
        ):
            everyone = allgather_object(said, f"{self._prefix}.whole", self._session.process_set)
        whole = [rank for rank, is_whole in everyone if is_whole]
        if whole and len(whole) < len(everyone) and to not in whole:
            raise MismatchError(
                f"consolidate_state_dict '{self._prefix}': expected shares of the optimizer's state on all ranks but found that "
                f"{named_ranks(whole)} loaded another state. Load it on all ranks, or broadcast_optimizer_state() from such a rank."
            )
        return bool(whole)

    def make_whole(self) -> None:
        """From now on the optimizer has what was put together on this rank, or nothing in place of its parts."""
        if not self.is_whole:
            self._optimizer.state.clear()
            self._optimizer.state.update(self._consolidated or {})
        self._consolidated, self.is_whole = None, True

    def whole(self) -> _State:
        """All of it; raises InvalidArgumentError if that was not put together since the last step."""
        if self.is_whole:
            return self._optimizer.state
        if self._consolidated is None:
            raise InvalidArgumentError(
                "state_dict: expected consolidate_state_dict() on all ranks since the last step, as each has a share of the "
                "optimizer's state (ShardedStep), but there was none for this rank. Call it on all ranks, with to= this rank."
            )
        return self._consolidated

    # ---- shard by shard ----

    def shards(self, update: Update) -> State:
        """This rank's share, by the names of the parameters; that of a first step where there is none yet, to be loaded into."""
        names, state = self._optimizer._parameter_names, self._optimizer.state
        is_new = self.is_whole and not any(state.values())
        self.deal_out()
        if is_new:
            self._begin(update)
        shares = {
            names[sent.parameter]: {
                key: StateShard.of(names[sent.parameter], sent, value) for key, value in state[sent.parameter].items()
            }
            for sent in self._sent
            if state.get(sent.parameter)
        }
        return {"state": shares, "param_groups": self._groups()}

    def _begin(self, update: Update) -> None:
        """Makes the state that a first step makes, by a step with tensors that nobody has."""
        trained = [each for each in self._sent if each.part is not None and each.parameter.requires_grad]
        stand_ins = {each.parameter: torch.zeros_like(each.part) for each in trained}
        for stand_in in stand_ins.values():
            stand_in.grad = torch.zeros_like(stand_in)
        update(stand_ins)

    def take_shards(self, loaded: State) -> None:
        """Goes on with what ``shards`` has returned, and others may have written to; or with whole values under its names.

        Raises:
            InvalidArgumentError: it is of other parameters.
        """
        if not isinstance(loaded, Mapping) or not {"state", "param_groups"} <= set(loaded):
            raise InvalidArgumentError(
                "load_sharded_state_dict: the state must be what sharded_state_dict() returned, with state and param_groups, but is "
                f"{sorted(loaded) if isinstance(loaded, Mapping) else loaded!r}."
            )
        own, theirs = ([list(each["params"]) for each in groups] for groups in (self._groups(), loaded["param_groups"]))
        if own != theirs:
            raise InvalidArgumentError(
                f"load_sharded_state_dict: parameters must be those of this optimizer, {_in_words(own)}, but are {_in_words(theirs)}. "
                "Load the state of this model."
            )
        optimizer = self._optimizer
        optimizer.state.clear()
        self._keep_parts(lambda sent: loaded["state"].get(optimizer._parameter_names[sent.parameter]))
        for group, values in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})

    def _groups(self) -> list[State]:
        """The optimizer's, with names in place of parameters."""
        names = self._optimizer._parameter_names
        return [
            {**group, "params": [names[each] for each in group["params"]]} for group in self._optimizer.param_groups
        ]


class StateShard(Placeholder):
    """What this rank has of a value with an element for each of a parameter's.

    ``torch.distributed.checkpoint`` asks it for boxes, and writes to these when it loads. Nothing else can be done with it.

    Attributes:
        own: this rank's elements, flat.
    """

    refusal = (
        "sharded_state_dict '%s': expected torch.distributed.checkpoint.save or load, since this rank has a share of "
        "the state alone (ShardedStep), but found %s. Use these on all ranks, or consolidate_state_dict() and state_dict()."
    )
    own: torch.Tensor

    @staticmethod
    def of(name: str, sent: SentGradient, value: Any) -> Any:
        """The one of a parameter's value; any other value as it is."""
        if not _fits(value, sent.piece):
            return value
        made: StateShard = StateShard.like(sent, value.dtype, name, sent.piece)
        made.own = value
        return made

    @property
    def _boxes(self) -> list[Box]:
        return boxes(self.shape, self.piece.first, self.piece.last)

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self._boxes]

    def __create_write_items__(self, fqn: str, _: object) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self.own)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]  # fmt: skip

    def __get_tensor_shard__(self, index: "MetadataIndex") -> torch.Tensor:
        parts = self.own.split([box.elements for box in self._boxes])
        return next(
            part.view(box.sizes)
            for part, box in zip(parts, self._boxes, strict=True)
            if box.offsets == tuple(index.offset)
        )


def _own(sent: SentGradient, value: object) -> object:
    """This rank's of a value of a parameter's state: of the elements, where that has some for each, else all of it."""
    if isinstance(value, StateShard):
        return value.own
    if not isinstance(value, torch.Tensor):
        return value
    return (sent.cut(value.detach()) if value.shape == sent.shape else value.detach()).clone()


def _put_together(whole: State, shape: Sequence[int], piece: Piece, part: State) -> None:
    """Adds what a rank has of the state to that of the parameter."""
    for key, value in part.items():
        if not _fits(value, piece):
            whole[key] = value
            continue
        if key not in whole:
            whole[key] = torch.zeros(shape, dtype=value.dtype)
        whole[key].view(-1)[piece.first : piece.last] = value


def _fits(value: object, piece: Piece) -> bool:
    """Whether a value of a part's state has an element for each of the part's."""
    return isinstance(value, torch.Tensor) and value.shape == (piece.last - piece.first,)


def _in_words(groups: list[list[str]]) -> str:
    return " and ".join(f"{len(names)} from '{names[0]}' to '{names[-1]}'" if names else "none" for names in groups)
