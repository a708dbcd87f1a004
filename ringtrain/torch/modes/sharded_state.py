"""The optimizer's state with ``ShardedStep``: each rank has that of its parts of the parameters, and checkpoints the whole.

Until the first step the state is whole and belongs to the parameters, as in any optimizer: as made, loaded or broadcast.
The first step keeps of it what belongs to this rank's parts. ``consolidate`` puts it together again, for a checkpoint
that optimizers of any kind, on any number of ranks, load.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ringtrain._runtime.objects import allgather_object
from ringtrain._training.adapter.checks import named_ranks
from ringtrain._training.session import Session
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.torch.modes.base import State
from ringtrain.torch.modes.sharded_buckets import SharedBucket
from ringtrain.torch.modes.sharded_gradients import SentGradient

_State = dict[torch.Tensor, State]


class SharedState:
    """The state of one optimizer.

    Args:
        optimizer: finds it.
        session: the rank, and those that share the state.
        prefix: of the names of what is submitted.
        buckets: have the parts; further ones may come.

    Attributes:
        is_whole: whether the state belongs to the parameters, and not to parts of them.
    """

    def __init__(
        self,
        optimizer: Callable[[], torch.optim.Optimizer],
        session: Session,
        prefix: str,
        buckets: Sequence[SharedBucket],
    ):
        self._optimizer, self._session, self._prefix, self._buckets = optimizer, session, prefix, buckets
        self._consolidated: _State | None = None
        self.is_whole = True

    def deal_out(self) -> None:
        """Before a step: each part gets what belongs to it of its parameter's state, and the rest is forgotten."""
        self._consolidated = None
        if self.is_whole:
            state: _State = self._optimizer().state
            for sent in self._sent():
                whole = state.pop(sent.parameter, None)
                if whole and sent.part is not None:
                    state[sent.part] = {key: sent.part_of(value) for key, value in whole.items()}
        self.is_whole = False

    def _sent(self) -> list[SentGradient]:
        return [each for bucket in self._buckets for each in bucket.sent]

    def forget(self) -> None:
        """Whole state is about to be loaded."""
        for sent in self._sent():
            self._optimizer().state.pop(sent.part, None)
        self._consolidated, self.is_whole = None, True

    def consolidate(self, to: int | None) -> None:
        """Puts the whole state together on rank ``to``, or on all; all ranks call this."""
        if self._is_whole_on(to):
            return
        state, whole = self._optimizer().state, _State()
        for bucket in self._buckets:
            own = [sent.own_state(state) for sent in bucket.sent]
            for of_rank in allgather_object(own, f"{bucket.name}.state", self._session.process_set):
                for sent, part in zip(bucket.sent, of_rank, strict=True):
                    if part is not None:
                        sent.put_together(whole.setdefault(sent.parameter, {}), *part)
        self._consolidated = whole if to is None or self._session.context.rank == to else None

    def _is_whole_on(self, to: int | None) -> bool:
        """Whether the state is whole on that rank, or on all.

        Raises MismatchError, on all ranks, if shares are needed that a rank has given up for a state that it has loaded alone.
        """
        said = (self._session.context.rank, self.is_whole)
        everyone = allgather_object(said, f"{self._prefix}.whole", self._session.process_set)
        whole = [rank for rank, is_whole in everyone if is_whole]
        if len(whole) == len(everyone) or to in whole:
            return True
        if whole:
            raise MismatchError(
                f"consolidate_state_dict '{self._prefix}': expected shares of the optimizer's state on all ranks but found that "
                f"{named_ranks(whole)} loaded another state. Load it on all ranks, or broadcast_optimizer_state() from such a rank."
            )
        return False

    def take_whole(self) -> None:
        """The optimizer's state becomes the whole one that was put together."""
        whole = self._consolidated
        if whole is not None:
            self.forget()
            self._optimizer().state.update(whole)

    @contextmanager
    def shown_whole(self) -> Iterator[None]:
        """A block in which the optimizer's state is the whole one.

        Raises InvalidArgumentError if that was not put together since the last step.
        """
        optimizer = self._optimizer()
        shares = optimizer.state
        if not self.is_whole and self._consolidated is None:
            raise InvalidArgumentError(
                "state_dict: expected consolidate_state_dict() on all ranks since the last step, as each has a share of the "
                "optimizer's state (ShardedStep), but there was none for this rank. Call it on all ranks, with to= this rank."
            )
        try:
            optimizer.state = shares if self.is_whole else self._consolidated
            yield
        finally:
            optimizer.state = shares

    # ---- shard by shard ----

    def shards(self, update: Callable[[Mapping[torch.Tensor, torch.Tensor]], None]) -> State:
        """This rank's share, by the names of the parameters; that of a first step where there is none yet, to be loaded into.

        Args:
            update: has the optimizer step with other tensors in place of parameters.
        """
        optimizer = self._optimizer()
        is_new = self.is_whole and not optimizer.state
        self.deal_out()
        if is_new:
            self._begin(update)
        names, state = optimizer._parameter_names, optimizer.state
        shares = {
            (name := names[sent.parameter]): sent.shards_of(name, state) for sent in self._sent() if sent.part in state
        }
        groups = [{**group, "params": [names[each] for each in group["params"]]} for group in optimizer.param_groups]
        return {"state": shares, "param_groups": groups}

    def _begin(self, update: Callable[[Mapping[torch.Tensor, torch.Tensor]], None]) -> None:
        """Makes the state that a first step makes, by a step with tensors that nobody has."""
        state = self._optimizer().state
        trained = [each for each in self._sent() if each.part is not None and each.parameter.requires_grad]
        stand_ins = {each.parameter: torch.zeros_like(each.part) for each in trained}
        for stand_in in stand_ins.values():
            stand_in.grad = torch.zeros_like(stand_in)
        update(stand_ins)
        for each in trained:
            if (made := state.pop(stand_ins[each.parameter], None)) is not None:
                state[each.part] = made

    def take_shards(self, loaded: State) -> None:
        """Goes on with what ``shards`` has returned, and others may have written to; or with whole values under its names.

        Raises:
            InvalidArgumentError: it is of other parameters.
        """
        optimizer = self._optimizer()
        _check_groups(optimizer, loaded)
        self._consolidated, self.is_whole = None, False
        optimizer.state.clear()
        for sent in self._sent():
            values = loaded["state"].get(optimizer._parameter_names[sent.parameter])
            if sent.part is not None and values is not None:
                optimizer.state[sent.part] = sent.take_shards(values)
        for group, values in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})


def _check_groups(optimizer: torch.optim.Optimizer, loaded: State) -> None:
    names = optimizer._parameter_names
    own = [[names[each] for each in group["params"]] for group in optimizer.param_groups]
    theirs = [list(group["params"]) for group in loaded["param_groups"]]
    if own != theirs:
        raise InvalidArgumentError(
            f"load_sharded_state_dict: parameters must be those of this optimizer, {_in_words(own)}, but are {_in_words(theirs)}. "
            "Load the state of this model."
        )


def _in_words(groups: list[list[str]]) -> str:
    return " and ".join(f"{len(names)} from '{names[0]}' to '{names[-1]}'" if names else "none" for names in groups)
