"""``State(model=..., optimizer=...)``: a training in which the death of a rank costs no step, and is no exception.

``ringtrain.elastic.transaction`` decides when a step is released, and what becomes of it in another world; here is what
that means for PyTorch: gradients, samples, and the state for ranks that join.
"""

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ringtrain._binding.log import logger
from ringtrain._bootstrap import membership
from ringtrain._runtime.arguments import check_kind
from ringtrain._runtime.context import current
from ringtrain._runtime.objects import allgather_object, broadcast_object
from ringtrain._runtime.operations import broadcast
from ringtrain._runtime.process_sets import global_process_set, id_of
from ringtrain._runtime.world import long_phase
from ringtrain._training.needs import check_needs
from ringtrain._training.session import NewWorld
from ringtrain._training.step_guard import require_all_ranks
from ringtrain.elastic.balance import ShareRules
from ringtrain.elastic.lossless import (
    LosslessState,
    checked_progress,
    require_averages,
    require_one_sampler,
)
from ringtrain.elastic.saving import LONGEST_SAVE, SavingPlan, check_keep, check_names, taken_from
from ringtrain.elastic.sets import Rule
from ringtrain.elastic.transaction import Transaction
from ringtrain.embedding.kept_rows import surviving
from ringtrain.embedding.row_gradients import RowGradients
from ringtrain.errors import InvalidArgumentError, RowsLostError, UnsupportedError
from ringtrain.torch.backward import OneByOne
from ringtrain.torch.elastic.belongings import Belongings
from ringtrain.torch.elastic.checkpoints import ROWS, TorchFolder, on_devices
from ringtrain.torch.elastic.sampler import ElasticSampler
from ringtrain.torch.elastic.transfer import keeps_identity, outline_of, take_over
from ringtrain.torch.functions import set_state, state_of
from ringtrain.torch.hooks import Owner, number_anew, others
from ringtrain.torch.modes.adasum import AdasumMode
from ringtrain.torch.modes.base import State as Kept
from ringtrain.torch.modes.base import mode_of
from ringtrain.torch.modes.synchronous import SynchronousMode
from ringtrain.torch.table_checkpoints import (
    TrainedTable,
    dense_state_dict,
    load_dense_state_dict,
    load_parts,
    parts_of,
    save_parts,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

_OBJECTS = "ringtrain.elastic.objects"
_ROWS = "ringtrain.elastic.rows"
_BELONGINGS = "what was not given"  # in a file, beside the values
_GIVEN = ["_size", "_refusal", "_rows_from", "_saved_behind"]  # beside the values


class TransparentState(LosslessState):
    """A training whose steps survive a change of the world; ``hvd.elastic.State(model=..., optimizer=...)`` makes one.

    Example:
        >>> state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler)
        >>> for epoch in state.epochs(90):
        ...     for x, y in loader:
        ...         optimizer.zero_grad()
        ...         loss(model(x), y).backward()
        ...         optimizer.step()

    Values become attributes. In a job without ``--elastic``, and alone, it gives all ranks the state of rank 0, and counts.

    Args:
        model: a module.
        optimizer: of it, from ``DistributedOptimizer``. Others are given as ``objects``, all that the process has.
        sampler: an ``ElasticSampler``, which counts by itself from now on.
        schedule: of learning rates; whatever has ``state_dict`` and ``load_state_dict``. Those of ``torch.optim`` are found by their
            optimizer where they are not given.
        process_sets: a function of the number of ranks, the same on all, that returns the ranks of each process set which
            a world of so many is to have, such as ``lambda size: [range(0, size, 2), range(1, size, 2)]``. One without
            ranks is not there in that world. They are attributes, by place: ``even, odd = state.process_sets``.
        objects: more of such, and plain objects that pickle, which a rank that joins takes over. ``epoch`` and ``step``
            are 0 unless they are given, as after loading a checkpoint.

    Attributes:
        epoch: that ``epochs`` is in.
        step: updates that the optimizer has made; of several, the one that is given first.

    Raises:
        TypeError: ``epoch`` or ``step`` is no whole number, or the schedule has no ``state_dict``.
        InvalidArgumentError: no distributed optimizer; process sets that are no such function; in an elastic job also an
            optimizer or a model that is not given. By ``epochs``: two schedules of a kind that are not given.
        UnsupportedError: in an elastic job, an optimizer that does not send in each step (``every``, ``delay``), or among the
            ranks of a process set; several with different ``backward_passes_per_step``.
    """

    epoch: int
    step: int

    _training: "_Training"
    _NOTHING_TO_COMMIT = (
        "commit: elastic.State with a model loses no step, so there is nothing to commit. Leave the call out, or make a "
        "TorchState for elastic.run."
    )

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        sampler: ElasticSampler | None = None,
        schedule: "Stateful | None" = None,
        *,
        process_sets: Rule | None = None,
        **objects: object,
    ):
        super().__init__(objects, process_sets)
        objects |= checked_progress({name: objects[name] for name in ("epoch", "step") if name in objects})
        _check_schedule(schedule)
        named = {"model": model, "optimizer": optimizer, "sampler": sampler, "schedule": schedule}
        given = {
            "epoch": 0,
            "step": 0,
            **{name: value for name, value in named.items() if value is not None},
            **objects,
        }
        for name, value in {**named, **given}.items():
            setattr(self, name, value)
        self._stateful = sorted(name for name, value in given.items() if keeps_identity(value))
        self._plain = sorted(given.keys() - set(self._stateful))
        self._belongings = Belongings({name: getattr(self, name) for name in self._stateful})
        self._saves: tuple[TorchFolder, SavingPlan, int] | None = None  # where, when, and how many files are kept
        self._has_stepped = False  # and nothing was drawn since
        self._refusal = ""  # why this rank cannot begin
        self._resumed: str | None = None  # the folder with the rows of tables
        distributed = _distributed_optimizers(given.values())
        samplers = [getattr(self, name) for name in self._stateful if isinstance(getattr(self, name), ElasticSampler)]
        self._training = _Training(self, samplers, distributed)
        member = membership.current()
        self._transaction: Transaction | None = None
        if member is not None:
            modes = _checked_modes(distributed)
            _refuse_foreign_parameters(distributed, given.values())
            if member.planned:
                require_one_sampler("ElasticSampler", len(samplers))
                require_averages("DistributedOptimizer", all(mode.averages for mode in modes))
            number_anew(modes)
            several = len(modes) > 1
            self._transaction = Transaction(member, self._training, several, self._sets)
            one_by_one = OneByOne() if several else None
            for mode in modes:
                mode.guarded.keep_inputs_for(self._transaction, one_by_one)
            _let_train([part.table for part in self._tables()], distributed)
        for place, optimizer in enumerate(distributed):
            optimizer.register_step_post_hook(lambda *_, counts=place == 0: self._after_update(counts))
        for each in samplers:
            each.follow(self._training)

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the epochs up to ``count``, from the one that the others are in, or ``epoch``; to be used once, on all ranks.

        At first all ranks get the state of rank 0, so there is no need of ``broadcast_parameters``. A rank that joins later
        goes on in the middle of an epoch. The samplers are set to each epoch.

        Raises:
            InvalidArgumentError: ``count`` is no number, or a folder of ``save_every`` has files of later steps than this one.
        """
        check_kind("elastic.State.epochs: count must be a number of epochs", count, int)
        self._training.refuse_others()
        self._begin_loop()
        self._belongings.begin()
        if self._transaction is None:
            self._sets.make()
            self._training.take_state()
        else:
            self._enter(self._transaction)
        self._has_entered = True
        self._tell_change()
        if self._refusal:
            raise InvalidArgumentError(self._refusal)
        while self.epoch < count:
            self._training.set_epoch(self.epoch)
            if not self._training.is_in_epoch:
                self._belongings.draw_on()
            yield self.epoch
            has_ended = self._end_window_of_no_samples()
            self.epoch += 1
            self._training.set_epoch(self.epoch)
            self._has_stepped = True  # the draw that has found nothing left was within the epoch
            if has_ended:
                self._tell_change()
            self._between_steps()
        if self._transaction is not None:
            self._transaction.finish()

    def save_every(
        self,
        folder: "str | os.PathLike[str]",
        *,
        steps: int | None = None,
        minutes: float | None = None,
        epochs: int | None = None,
        keep: int = 3,
    ) -> None:
        """Has rank 0 write all values into a folder every so many steps, minutes or epochs, to go on from with ``resume``.

        It does so between two steps: when the next sample is drawn, or without an ``ElasticSampler`` when an epoch begins
        or ends. The others wait for it in their next step, for an hour at most. If the folder takes no file the log says so, and the
        training goes on. Rows of sharded embeddings are written by all ranks before, each its own, into a folder beside the file.
        With ``minutes`` rank 0 tells the others whether it is time, about every ten seconds.

        Args:
            folder: the same for all ranks, where rank 0 may come to be on any host; with sharded embeddings on a disk that all
                ranks share.
            steps: between two files.
            minutes: between two files.
            epochs: between two files, each at the end of an epoch.
            keep: files that stay.

        Raises:
            InvalidArgumentError: none of the three is given, or one is not above 0.
                At the beginning of the loop, on all ranks: the folder has files behind the step at which the training
                begins, since none of its own would stay beside these.
            UnsupportedError: a sharded embedding is shared by a process set.
        """
        self._refuse_tables_of_sets("save_every")
        check_keep(keep)
        self._saves = TorchFolder(folder), SavingPlan(steps, minutes, self.step, monotonic(), epochs, self.epoch), keep

    def resume(self, folder: "str | os.PathLike[str]") -> bool:
        """Takes the values of the newest file that ``save_every`` has written; returns whether there is one.

        To be called before ``epochs``, which gives all ranks what rank 0 has found. The training goes on bit for bit, with
        as many ranks as before, random numbers included; but for what ``Compression.int8`` and
        ``int4`` keep, and for what a loader's worker processes draw. Plain objects must be numbers,
        texts, or containers of these and of tensors: nothing in the file is run. Rows of sharded embeddings go to any number
        of ranks; ``epochs`` reads them, from where rank 0 has found them.

        Raises:
            InvalidArgumentError: the file has other values than this state. By ``epochs``: a rank cannot read its rows; on all
                ranks, and on one that joins later by itself.
            UnsupportedError: a sharded embedding is shared by a process set.
        """
        self._refuse_tables_of_sets("resume")
        found = TorchFolder(folder).newest()
        if found is None:
            return False
        path, kept = found
        rows, tables = TorchFolder(folder).rows_of(kept), self._tables()
        self._resumed = None if rows is None else os.fspath(rows)
        belongings = kept.pop(_BELONGINGS, None)
        expected = {*self._stateful, *self._plain, *([ROWS] if tables else [])}
        check_names(expected, kept, path)
        if belongings is not None:
            with taken_from(path, "the models", "those of a Module like this State's"):
                self._belongings.load_structure(belongings)
            self._belongings.load(belongings)
        for name in self._stateful:
            value = getattr(self, name)
            with taken_from(path, f"'{name}'", f"those of a {type(value).__name__} like this State's"):
                self._load(value, kept[name], has_tables=bool(tables))
        for name in self._plain:
            setattr(self, name, kept[name])
        return True

    @staticmethod
    def _load(value: "Stateful", kept: Kept, has_tables: bool) -> None:
        if isinstance(value, torch.optim.Optimizer):
            set_state(value, on_devices(value, kept))
        elif isinstance(value, torch.nn.Module) and has_tables:
            load_dense_state_dict(value, kept)
        else:
            value.load_state_dict(kept)

    def _tables(self) -> list[TrainedTable]:
        return parts_of({name: getattr(self, name) for name in self._stateful})

    def _refuse_tables_of_sets(self, what: str) -> None:
        for part in self._tables():
            if id_of(part.table.weight.process_set) != id_of(global_process_set):
                raise UnsupportedError(
                    f"{what}: a sharded embedding must be shared by all ranks, but '{part.name}' has a process set. Call "
                    "save_tables on its ranks, and save dense_state_dict on one, in the same step."
                )

    @property
    def _rows_from(self) -> str | None:
        """The folder that rows begin from; None where they have begun, so that who joins takes those of the others."""
        begins = any(part.table.kept is None for part in self._tables())
        return self._resumed if begins else None

    @_rows_from.setter
    def _rows_from(self, folder: str | None) -> None:
        self._resumed = folder

    @property
    def _saved_behind(self) -> tuple[int, int, int] | None:
        """How far the plan of the files is, which ranks agree on."""
        return None if self._saves is None else self._saves[1].progress

    @_saved_behind.setter
    def _saved_behind(self, progress: tuple[int, int, int] | None) -> None:
        if self._saves is not None and progress is not None:
            self._saves[1].progress = progress

    def _after_update(self, counts: bool) -> None:
        self.step += int(counts)
        self._has_stepped = True
        if self._transaction is None:
            self._training.finish_window(None)
        elif not self._transaction.several:
            self._tell_change()

    def _end_window_of_no_samples(self) -> bool:
        """Has the next epoch begin between two steps, unless gradients of this one are still to be sent; returns whether it does."""
        draws = bool(self._training.samplers) and not any(each.has_drawn for each in self._training.samplers)
        return draws and self._transaction is not None and self._transaction.close(is_empty=True)

    def _between_steps(self) -> None:
        if self._transaction is not None and self._transaction.close():
            self._tell_change()
        if self._has_stepped:
            self._has_stepped = False
            self._save_if_due()
            if self._transaction is not None and self._transaction.close():  # of the exchanges that rows have needed
                self._tell_change()
        if self._transaction is not None and self._transaction.pause():
            self._tell_change()

    def _save_if_due(self) -> None:
        if self._saves is None:
            return
        folder, plan, keep = self._saves
        due = plan.is_due(self.step, self.epoch, self._training.is_in_epoch)
        if not due and plan.asks_at(self.step):
            due = plan.hear(self.step, monotonic(), _of_rank_0(plan.answer(self.step, monotonic())))
        if not due:
            return
        plan.note(self.step, monotonic(), self.epoch)
        random, tables = self._belongings.gathered(), self._tables()
        try:
            rows = save_parts(tables, lambda token: folder.for_rows(self.step, token)) if tables else None
            if current().rank == 0:
                with long_phase(LONGEST_SAVE):
                    folder.write(self.step, {**self._values(rows), _BELONGINGS: self._belongings.in_file(random)}, keep)
        except RowsLostError:
            logger.warning(
                "save_every: the state behind step %d could not be written: rows are lost, as their next use says",
                self.step,
            )
        except (OSError, InvalidArgumentError) as problem:
            if current().rank == 0:
                logger.warning("save_every: the state behind step %d could not be written: %s", self.step, problem)

    def _values(self, rows: Path | None) -> dict[str, object]:
        values = {name: getattr(self, name) for name in (*self._stateful, *self._plain)}
        optimizers = {name: state_of(each) for name, each in values.items() if isinstance(each, torch.optim.Optimizer)}
        others = {name: _state_dict(values[name]) for name in self._stateful if name not in optimizers}
        beside = {} if rows is None else {ROWS: rows.name}
        return {**values, **others, **optimizers, **beside}


class _Training:
    """What the transaction of a state goes on with; it owns nothing."""

    def __init__(
        self, state: TransparentState, samplers: list[ElasticSampler], optimizers: list[torch.optim.Optimizer]
    ):
        self._state = state
        self.samplers = samplers
        self._optimizers = optimizers
        self._has_state = False  # that all have

    # ---- Training ----

    def enter_world(self) -> None:
        """Has the optimizers go on in the present world, in the order in which ranks that join have made theirs."""
        for mode in sorted(self._modes(), key=lambda each: each.order()):
            mode.enter_world(NewWorld.GOES_ON)

    def outline(self) -> dict[str, str]:
        """Shapes and dtypes in modules, and numbers of parameters in optimizers; what else there is, by its name."""
        state = self._state
        found = dict.fromkeys(state._plain, "a plain value")
        for name in state._stateful:
            found |= outline_of(name, getattr(state, name))
        return found | state._belongings.outline()

    def take_state(self) -> None:
        """Takes the values of rank 0."""
        state = self._state
        state._belongings.take_structure(self._has_state)
        for name in state._stateful:
            take_over(getattr(state, name), has_it=self._has_state)
        state._belongings.take_over(self._has_state)
        if not self._has_state:
            state._refusal = "" if state._saves is None else state._saves[0].refuse_later_than(state.step)
        values = broadcast_object({name: getattr(state, name) for name in _GIVEN + state._plain}, 0, _OBJECTS)
        for name, value in values.items():
            setattr(state, name, value)
        for mode in self._modes():
            mode.guarded.note_between_steps()
        self._take_rows()
        self._has_state = True

    def _take_rows(self) -> None:
        """Has rows begin from where rank 0 has found them; what a rank cannot read is said where the loop begins."""
        state = self._state
        folder, tables = state._resumed, state._tables()  # rank 0's, by now
        if folder is None or not tables:
            return
        problem = None if self._has_state else load_parts(tables, folder)
        told = allgather_object((self._has_state, problem), _ROWS)
        if not any(has_state for has_state, _ in told):  # who joins later, and cannot, ends alone
            problem = next((f"rank {rank}: {words}" for rank, (_, words) in enumerate(told) if words is not None), None)
        state._refusal = state._refusal or problem or ""

    def refuse_others(self) -> None:
        """A state made later has taken the optimizers over."""
        transaction = self._state._transaction
        if transaction is not None and not all(each.guarded.is_kept_for(transaction) for each in self._modes()):
            raise InvalidArgumentError(
                "elastic.State: expected one State of an optimizer but found another one, made later, to which its steps "
                "belong. Make one State, and use that."
            )

    def deal(self, size: int, place: int) -> None:
        """Deals the samples of the next window."""
        for sampler in self.samplers:
            sampler.deal(size, place)

    def batch(self) -> int:
        """Samples of a batch on all ranks together."""
        return self.samplers[0].batch if self.samplers else 0

    def share_rules(self) -> ShareRules:
        """What the first of them was told."""
        return self.samplers[0].share_rules if self.samplers else ShareRules()

    def work(self) -> float:
        """What this rank does in the open window, in samples."""
        return self.samplers[0].work if self.samplers else 0.0

    def share(self, counts: Sequence[int]) -> None:
        """Deals so many of them to each place."""
        for sampler in self.samplers:
            sampler.share(counts)

    def drawn(self) -> str:
        """What this rank has drawn for the open window."""
        return ", ".join(sampler.drawn for sampler in self.samplers)

    def finish_window(self, contributors: set[int] | None) -> None:
        """Counts the samples of a window."""
        for sampler in self.samplers:
            sampler.finish_window(contributors)

    def weight(self, contributors: set[int] | None) -> int | None:
        """The samples of this rank, where shares differ."""
        return self.samplers[0].weight(contributors) if self.samplers else None

    def _modes(self) -> list["Surviving"]:
        found = [mode_of(each) for each in self._optimizers]
        return [each for each in found if isinstance(each, (SynchronousMode, AdasumMode))]

    # ---- samplers ----

    def before_draw(self) -> None:
        """Lets ranks join if all have agreed on it, and begins the next window."""
        self._state._between_steps()
        self._state._belongings.draw_on()
        if self._state._transaction is not None:
            self._state._transaction.begin()

    @property
    def is_in_epoch(self) -> bool:
        """Whether some of its samples are done."""
        return any(sampler.processed_num for sampler in self.samplers)

    def set_epoch(self, epoch: int) -> None:
        """Sets the samplers to an epoch, which begins if they are not in it."""
        for sampler in self.samplers:
            if sampler.epoch != epoch:
                sampler.set_epoch(epoch)


def _of_rank_0(answer: tuple[int, int]) -> tuple[int, int]:
    """The answer of rank 0's plan; all ranks ask together."""
    told = np.array(answer, np.int64)
    due, next_look = surviving(lambda: broadcast(told, 0, "save_every.due")).tolist()
    return due, next_look


def _state_dict(value: "Stateful") -> dict[str, object]:
    """What is the same on all ranks."""
    return dense_state_dict(value) if isinstance(value, torch.nn.Module) else value.state_dict()


def _check_schedule(schedule: object) -> None:
    if schedule is not None:
        demand = (
            "elastic.State: schedule must have state_dict and load_state_dict, as those of torch.optim.lr_scheduler"
        )
        methods = ("state_dict", "load_state_dict")
        check_kind(demand, schedule, methods, "Give plain values under names of your own", TypeError)


Surviving = SynchronousMode | AdasumMode


def _distributed_optimizers(values: Iterable[object]) -> list[torch.optim.Optimizer]:
    found = [value for value in values if mode_of(value) is not None]
    if not found:
        raise InvalidArgumentError(
            "elastic.State: expected an optimizer from DistributedOptimizer but found none. Wrap the optimizer before."
        )
    return found


def _refuse_foreign_parameters(optimizers: list[torch.optim.Optimizer], values: Iterable[object]) -> None:
    """Of a model that is left out ranks would keep what they have made, each its own."""
    modules = [value for value in values if isinstance(value, torch.nn.Module)]
    known = {id(each) for module in modules for each in module.parameters()}
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    foreign = [each for parameters in groups for each in parameters if id(each) not in known]
    if foreign:
        shapes = ", ".join(str(tuple(each.shape)) for each in foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise InvalidArgumentError(
            f"elastic.State: expected the models of all parameters that its optimizers train but found {len(foreign)} "
            f"of none ({shapes}), which would differ between ranks. Give each model: State(..., critic=critic)."
        )


def _checked_modes(optimizers: list[torch.optim.Optimizer]) -> list[Surviving]:
    modes = [_checked_mode(each) for each in optimizers]
    if _left_out(modes):
        gc.collect()  # one that was wrapped before, and is in use no more
    if left_out := len(_left_out(modes)):
        raise InvalidArgumentError(
            f"elastic.State: expected all optimizers from DistributedOptimizer in this process but found {left_out} more, which "
            "would not go on in another world. Give them, too: State(..., other=other_optimizer)."
        )
    passes = sorted({each.backward_passes_per_step for each in optimizers})
    if len(passes) > 1:
        raise UnsupportedError(
            f"elastic.State: backward_passes_per_step must be the same for all optimizers, so that all are between two steps "
            f"where ranks join, but is {passes}. Use TorchState and elastic.run."
        )
    return modes


def _let_train(tables: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    """Has tables' rows trained by that of the optimizers that has them; none may, if they are frozen."""
    for optimizer in optimizers:
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        own = [table for table in tables if id(table.weight) in trained]
        for table in own:
            table.train_by(optimizer, _rows_of(optimizer._mode))


def _rows_of(mode: SynchronousMode) -> RowGradients:
    """What the gradients of all tables of an optimizer travel with."""
    exchange = mode.guarded
    found = next((each for each in exchange.rounds.passengers if isinstance(each, RowGradients)), None)
    if found is None:
        found = RowGradients(exchange.note_passenger)
        exchange.rounds.passengers.append(found)
    return found


def _left_out(modes: list[Surviving]) -> list[Owner]:
    return [each for each in others(modes[0]) if each not in modes]


def _checked_mode(optimizer: torch.optim.Optimizer) -> Surviving:
    require_all_ranks("DistributedOptimizer", optimizer.process_set, "TorchState")
    mode: Any = mode_of(optimizer)
    check_needs(optimizer.mode.columns, {"elastic.State": True}, "elastic.State")
    return mode
