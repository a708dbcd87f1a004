"""``State(weights=...)``: a training in which the death of a rank costs no step, and is no exception; for any framework.

``ringtrain.elastic.transaction`` decides when a step is released, and what becomes of it in another world. Here is what a
training without gradients of a framework's own needs of it: operations that survive, where a step ends, and the state for
ranks that join. TensorFlow and Keras stand on it; PyTorch's gradients leave in the midst of a backward pass, and have a
state of their own. With a ``BatchSampler`` a step begins where its samples are drawn, and averages are weighed by them.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ringtrain._bootstrap import membership
from ringtrain._runtime import operations
from ringtrain._runtime.operations import Average, Compression
from ringtrain._training.step_guard import Part
from ringtrain._training.watch import Comparison
from ringtrain.elastic.followed import follow
from ringtrain.elastic.lossless import LosslessState, checked_progress, require_averages
from ringtrain.elastic.sampler import BatchSampler
from ringtrain.elastic.sets import Rule
from ringtrain.elastic.state import State
from ringtrain.elastic.state_files import StateFiles
from ringtrain.elastic.training import StateTraining, only_sampler
from ringtrain.elastic.transaction import Transaction
from ringtrain.elastic.values import StateValues
from ringtrain.errors import InvalidArgumentError

Result = TypeVar("Result")


class TransparentState(LosslessState):
    """A training whose steps survive a change of the world; ``rt.elastic.State(weights=...)`` makes one.

    Example:
        >>> state = rt.elastic.State(weights=weights)
        >>> for epoch in state.epochs(90):
        ...     for batch in state.steps(100):
        ...         state.weights -= 0.1 * state.allreduce(gradient(state.weights, batch))

    Values become attributes. In a job without ``--elastic``, and alone, it gives all ranks the state of rank 0, and counts.

    Args:
        process_sets: a function of the number of ranks, the same on all, that returns the ranks of each process set which
            a world of so many is to have, such as ``lambda size: [range(0, size, 2), range(1, size, 2)]``. One without
            ranks is not there in that world. They are attributes, by place: ``even, odd = state.process_sets``.
        objects: what a rank that joins takes over: NumPy arrays, which stay the same objects while shape and dtype do; in
            TensorFlow and Keras models, optimizers and variables; a ``BatchSampler``, which counts by itself from now on; and
            whatever pickles. ``epoch``, ``batch`` and ``step`` are 0 unless they are given, as after loading a checkpoint.

    Attributes:
        epoch: that ``epochs`` is in.
        batch: steps of the epoch that are done, as ``steps`` counts them, or draws of the sampler.
        step: steps of all epochs that are done.

    Raises:
        InvalidArgumentError: a name that is taken, process sets that are no such function, or several samplers; in a job with
            ``--batch constant`` also none.
        TypeError: ``epoch``, ``batch`` or ``step`` is no whole number.
    """

    epoch: int
    batch: int
    step: int

    _NOTHING_TO_COMMIT = (
        "commit: elastic.State with values loses no step, so there is nothing to commit, and ranks join without being "
        "asked for. Leave the call out, or make an ObjectState for elastic.run."
    )

    _SURVIVED = Part.LAST  # each operation is a window of its own
    # That ranks that join take over, beside the values.
    _GIVEN: Sequence[str] = ("_size", "_refusal", "_of_files")

    def __init__(self, *, process_sets: Rule | None = None, **objects: Any):
        super().__init__(objects, process_sets)
        given = {"epoch": 0, "batch": 0, "step": 0, **objects}
        given |= checked_progress({name: given[name] for name in ("epoch", "batch", "step")})
        for name, value in given.items():
            setattr(self, name, value)
        self._values = StateValues(self, given)
        self._files = StateFiles(self, self._values)
        self._in_epochs = False
        self._refusal = ""  # why the job cannot begin
        self._sampler = only_sampler(objects.values())
        self._is_in_step = False  # its samples are drawn, and the loop has not come back for others
        self._comparison: Comparison | None = None  # of the gradients that are reduced next
        self._training = StateTraining(self, self._values, self._sampler, self._GIVEN)
        member = membership.current()
        self._transaction = None if member is None else Transaction(member, self._training, sets=self._sets)
        if self._sampler is not None:
            self._follow_draws(self._sampler)
        if self._transaction is not None or self._sampler is not None:
            self.be_followed()

    def be_followed(self) -> None:
        """Is the one that ``followed`` returns, until another one is."""
        follow(self, elastic=self._transaction is not None)

    # ---- the loop ----

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the epochs up to ``count``, from the one that the others are in, or ``epoch``; to be used once, on all ranks.

        At first all ranks get the state of rank 0. A rank that joins later goes on in the middle of an epoch: at once with
        its ``steps``. Ranks join and leave here, too.
        """
        self._begin_loop()
        self.enter()
        self._in_epochs = True
        while self.epoch < count:
            self.set_epoch()
            yield self.epoch
            self.end_step()
            self.epoch += 1
            self.batch = 0
            self.set_epoch()
            self.between_steps()
        self._in_epochs = False
        self.finish()

    def steps(self, count: int) -> Iterator[int]:
        """Yields the steps of an epoch up to ``count``, the same on all ranks, from the one that the others are in.

        Ranks join and leave between two of them. Outside of ``epochs`` it does what that does, for the one epoch there is.

        Raises:
            InvalidArgumentError: the state has a sampler, whose draws are its steps.
        """
        if self._sampler is not None:
            raise InvalidArgumentError(
                "elastic.State.steps: the steps of a state with a sampler must be its draws, but steps() counts others. Write "
                "`for indices in sampler` in the loop over epochs()."
            )
        if not self._in_epochs:
            self._begin_loop()
        self.enter()
        while self.batch < count:
            self.between_steps()
            yield self.batch
            self.batch += 1
            self.step += 1
        if not self._in_epochs:
            self.save_if_due()
            self.finish()

    # ---- files ----

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

        Example:
            >>> state.resume("checkpoints")  # before the loop
            >>> state.save_every("checkpoints", epochs=1)

        It does so between two steps, or where an epoch ends. The others wait for it in their next step, for an hour at most. If the
        folder takes no file the log says so, and the training goes on. With ``minutes`` rank 0 tells the others whether it is
        time, about every ten seconds.

        Args:
            folder: the same for all ranks, where rank 0 may come to be on any host.
            steps: between two files.
            minutes: between two files.
            epochs: between two files, each at the end of an epoch.
            keep: files that stay.

        Raises:
            InvalidArgumentError: none of the three is given, or one is not above 0; a value is neither a number, a text, an
                array, nor made of these.
                At the beginning of the loop, on all ranks: the folder has files behind the step at which the training
                begins, since none of its own would stay beside these.
            UnsupportedError: a sharded embedding, whose rows are each rank's own.
        """
        self._files.save_every(folder, steps, minutes, epochs, keep)

    def resume(self, folder: "str | os.PathLike[str]") -> bool:
        """Takes the values of the newest file that ``save_every`` has written; returns whether there is one.

        To be called before the loop, which gives all ranks what rank 0 has found. On as many ranks as before they go on with the
        random numbers of Python, of NumPy, and of Keras' layers, too.

        Raises:
            InvalidArgumentError: the file has other values than this state, or cannot be read.
            UnsupportedError: as by ``save_every``.
        """
        kept = self._files.resume(folder)
        if kept is not None:
            self._take_from_file(kept)
        return kept is not None

    def save_if_due(self) -> None:
        """To be called on all ranks alike, where the state is whole."""
        self._files.save_if_due()

    def _in_file(self, content: dict[str, Any]) -> dict[str, Any]:
        """What a file has; a derived class puts more beside."""
        return content

    def _take_from_file(self, kept: dict[str, Any]) -> None:
        """Takes what a derived class has put beside."""

    @property
    def _of_files(self) -> Any:
        """What ranks that join take over of the files."""
        return self._files.given

    @_of_files.setter
    def _of_files(self, theirs: Any) -> None:
        self._files.given = theirs

    # ---- what survives ----

    def allreduce(
        self,
        tensor: Any,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        compression: str = Compression.none,
        weight: int | None = None,
    ) -> Any:
        """``rt.allreduce`` over all ranks, whose result all of them have, or none: a death on the way costs nothing.

        Args:
            tensor: an array, which stays as it is; it is sent again if the world ends before all have the result.
            name: as for ``rt.allreduce``, as all that follow.
            op: averages are those of the ranks that are left.
            prescale_factor: before the reduction.
            postscale_factor: after it.
            compression: how it travels between hosts.
            weight: this rank's share of an average. By default, in a step of the state's sampler and for floating-point
                numbers, its samples of that step; else all ranks count alike.

        Raises:
            RingtrainError: what another world would meet again, such as a MismatchError.
        """
        reduce = partial(
            operations.allreduce, tensor, name, op, prescale_factor, postscale_factor, compression=compression
        )
        return self.survive(lambda: reduce(weight=self._share(op, [tensor]) if weight is None else weight))

    def grouped_allreduce(
        self,
        tensors: Sequence[Any],
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        compression: str = Compression.none,
        weight: int | None = None,
    ) -> list[Any]:
        """``allreduce`` of several arrays as one operation: the results are those of the same ranks."""
        reduce = partial(
            operations.grouped_allreduce, tensors, name, op, prescale_factor, postscale_factor, compression=compression
        )
        return self.survive(lambda: reduce(weight=self._share(op, tensors) if weight is None else weight))

    def share(self, op: int | None) -> int | None:
        """What this rank counts in an average of gradients, in the present attempt; None if all count alike.

        To be called in what survives: it depends on who is in the world.
        """
        if self._sampler is None or not self._is_in_step or op not in (None, Average):
            return None
        return self._training.weight(None) if self._transaction is None else self._transaction.weight()

    @contextmanager
    def comparing(self, comparison: Comparison) -> Iterator[None]:
        """The gradients that are reduced first within this block travel with a comparison of the ranks.

        It belongs into what survives with them: in another world it is made again, as they are sent again.
        """
        self._comparison = comparison
        try:
            yield
        finally:
            self._comparison = None

    def take_comparison(self) -> Comparison | None:
        """That of the gradients that are reduced now; for those who reduce, at once or in a graph."""
        taken, self._comparison = self._comparison, None
        return taken

    def check_gradients(self, owner: str, op: int | None) -> None:
        """Refuses gradients that could not be those of one process with the whole batch.

        Raises:
            UnsupportedError: in a job with ``--batch constant``, sums and Adasum.
        """
        require_averages(owner, op in (None, Average))

    def _share(self, op: int | None, tensors: Sequence[Any]) -> int | None:
        return self.share(op) if all(_is_floating(each) for each in tensors) else None

    # ---- for those who have a loop of their own, such as fit ----

    def enter(self) -> None:
        """Takes the state of rank 0, at the first call; on all ranks, and for those that join with what they go on with.

        Raises:
            InvalidArgumentError: a folder of ``save_every`` has files of later steps than this one.
        """
        if self._has_entered:
            return
        self._has_entered = True
        self._refusal = self._files.refusal()
        if self._transaction is None:
            self._sets.make()
            self._training.take_state()
        else:
            self._enter(self._transaction)
        if self._refusal:
            raise InvalidArgumentError(self._refusal)
        if self.batch == 0:
            self._files.draw_on()
        self._tell_change()

    def between_steps(self) -> None:
        """Lets ranks join and leave, if all have agreed on it. To be called on all ranks alike, where the state is whole."""
        self._files.draw_on()
        if self._transaction is not None:
            self._transaction.close()  # of rows that were looked up since, as to evaluate
        self._save_between_steps()
        if self._transaction is not None:
            self._transaction.pause()
        self._tell_change()

    def _save_between_steps(self) -> None:
        self.save_if_due()

    def finish(self) -> None:
        """Returns when all ranks have the last step."""
        if self._transaction is not None:
            self._transaction.finish()

    # ---- its sampler ----

    def _follow_draws(self, sampler: BatchSampler) -> None:
        sampler.follow(self)

    def before_draw(self) -> None:
        """The sampler draws for the next step: ranks join and leave here.

        Raises:
            InvalidArgumentError: it is read before the loop.
        """
        if not self._has_entered:
            raise InvalidArgumentError(
                "elastic.State: its sampler must be read in the loop over epochs(), but is read before it, where ranks that join "
                "would not be. Move that into the loop."
            )
        self.end_step()
        self.between_steps()

    def note_draw(self) -> None:
        """The sampler has drawn: the next step has begun."""
        if self._transaction is not None:
            self._transaction.begin()
        self._is_in_step = True

    def end_step(self) -> None:
        """Counts the step that was begun by a draw, if there is one."""
        if self._is_in_step:
            self._is_in_step = False
            self.batch += 1
            self.step += 1
            self.release_alone()

    def release_alone(self) -> None:
        """In a job that is not elastic: the samples of the step are processed, as nobody can be lost."""
        if self._transaction is None:
            self._training.finish_window(None)

    def set_epoch(self) -> None:
        """Sets the sampler to the epoch, which begins if it is not in it."""
        if self._sampler is not None:
            self._sampler.set_epoch(self.epoch)


State.with_values = TransparentState


def _is_floating(tensor: Any) -> bool:
    dtype = getattr(tensor, "dtype", None)
    return "float" in str(np.asarray(tensor).dtype if dtype is None else dtype)
