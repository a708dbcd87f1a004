"""What ``fit`` tells an elastic state: how far it is, and when to commit. Any order of the callbacks will do.

A commit that is due waits until all callbacks have had their say about the batch or the epoch behind it: its place is
before the next one begins.
"""

from typing import Any

from ringtrain._runtime.arguments import check_least
from ringtrain.errors import InvalidArgumentError
from ringtrain.keras.types import Logs, Model, Params


class _EndOfEpoch:
    """What ends an epoch's batches as ``stop_training``, and is told from a True of others, which ends the training."""


END_OF_EPOCH = _EndOfEpoch()


class CommitHooks:
    """Commits the state after so many batches, and at the end of each epoch; all ranks pass it.

    Example:
        >>> state = hvd.elastic.KerasState(model)
        >>> model.fit(x, y, callbacks=[hvd.elastic.CommitStateCallback(state, batches_per_commit=10)])

    Args:
        state: of ``elastic.run``.
        batches_per_commit: a failure costs fewer batches than this, and those of validation; each commit copies the state.

    Attributes:
        state: as given.

    Raises:
        InvalidArgumentError: less than 1 batch.
        HostsUpdatedInterrupt: in ``fit``, on all ranks at once, if ranks wait to join or to leave; ``run`` catches it.
    """

    _supports_tf_logs = True  # Keras 2 need not fetch the metrics of each batch for it

    def __init__(self, state: Any, batches_per_commit: int = 1):
        super().__init__()
        check_least("CommitStateCallback: batches_per_commit", batches_per_commit, 1)
        self.state = state
        self._batches_per_commit = batches_per_commit
        self._since = 0  # batches since the last commit
        self._seen = 0  # batches of this epoch
        self._due = False

    def commit(self) -> None:
        """Commits the state; for programs that do more then."""
        self.state.commit()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Counts from here."""
        self._since, self._due = 0, False

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Commits what the last epoch has left."""
        self._seen = 0
        self._commit_if_due()

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Commits after the batch before."""
        self._commit_if_due()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Counts; one call may stand for several batches (``steps_per_execution``)."""
        self._since += batch + 1 - self._seen
        self._seen = batch + 1
        self._due |= self._since >= self._batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """A commit is due."""
        self._due = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Saves; who waits to join would find nothing to do."""
        self.state.save()

    def _commit_if_due(self) -> None:
        if self._due:
            self._since, self._due = 0, False
            self.commit()


class UpdateBatchHooks:
    """Keeps ``state.batch``: how many batches of the epoch are done. The first epoch of ``fit`` is shortened by them.

    Example:
        >>> state = hvd.elastic.KerasState(model, batch=0)
        >>> callbacks = [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.CommitStateCallback(state)]
        >>> model.fit(x, y, callbacks=callbacks)

    It is shortened where ``fit`` knows its number of steps; one batch at least is done. The batches are the first ones of
    the data again, so data are to be shuffled, or taken from where ``state.batch`` says.

    Args:
        state: with an attribute ``batch``.

    Attributes:
        state: as given.

    Raises:
        InvalidArgumentError: it has none.
    """

    _supports_tf_logs = True

    model: Model  # Keras sets these two
    params: Params | None

    def __init__(self, state: Any):
        super().__init__()
        _require(state, "batch", "UpdateBatchStateCallback")
        self.state = state
        self._before = 0  # batches of this epoch that were done in another call of fit
        self._last: int | None = None  # the number of batches after which the epoch ends early

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Finds what is left to do."""
        self._before = self.state.batch
        steps = (self.params or {}).get("steps")
        self._last = max(1, steps - self._before) if steps and self._before else None

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Counts, and ends the epoch when its batches are done."""
        self.state.batch = self._before + batch + 1
        if self._last is not None and batch + 1 >= self._last and not self.model.stop_training:
            self.model.stop_training = END_OF_EPOCH

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Goes on with the next epoch."""
        self.state.batch = 0
        if self.model.stop_training is END_OF_EPOCH:
            self.model.stop_training = False


class UpdateEpochHooks:
    """Keeps ``state.epoch``: how many epochs are done.

    Example:
        >>> model.fit(data, initial_epoch=state.epoch, epochs=90, callbacks=[hvd.elastic.UpdateEpochStateCallback(state)])

    Args:
        state: with an attribute ``epoch``.

    Attributes:
        state: as given.

    Raises:
        InvalidArgumentError: it has none.
    """

    _supports_tf_logs = True

    def __init__(self, state: Any):
        super().__init__()
        _require(state, "epoch", "UpdateEpochStateCallback")
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """One more."""
        self.state.epoch += 1


def _require(state: Any, name: str, who: str) -> None:
    if not hasattr(state, name):
        raise InvalidArgumentError(
            f"{who}: the state must have an attribute '{name}', but has none. Make it with {name}=0."
        )
