"""Learning rates that follow the epoch, fractions included: schedules, and the warm-up of Goyal et al. (2017),
"Accurate, Large Minibatch SGD", section 2.2."""

from collections.abc import Callable

from ringtrain._runtime.arguments import check_kind, number
from ringtrain._runtime.context import current
from ringtrain.elastic.followed import followed
from ringtrain.errors import InvalidArgumentError
from ringtrain.keras.types import Logs, Model, Optimizer, Params, Variable


class ScheduleHooks:
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` from ``start_epoch`` on, before ``end_epoch``.

    Example:
        >>> rate = 0.1 * hvd.size()
        >>> decay = hvd.callbacks.LearningRateScheduleCallback(rate, multiplier=lambda epoch: 0.1 ** (epoch // 30))
        >>> model.fit(x, y, epochs=3, callbacks=[decay])

    Args:
        initial_lr: the rate that is multiplied; usually already times the number of ranks.
        multiplier: a function of the epoch, or a number, raised to the power of the epochs since ``start_epoch``.
        start_epoch: the first epoch that it sets.
        end_epoch: the first one that it leaves alone again; None for all.
        staircase: once an epoch; otherwise before every batch, with a fractional epoch.
        momentum_correction: scales the velocities of SGD and RMSprop by new rate / old rate when the rate changes,
            since Keras has the rate within them (section 2.1 of the paper).
        steps_per_epoch: for ``staircase=False``, where ``fit`` does not know it.

    Raises:
        InvalidArgumentError: no ``initial_lr``; when ``fit`` begins: the optimizer has a schedule already, or the steps
            are not known.
    """

    model: Model  # Keras sets these two
    params: Params | None

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        number(f"{type(self).__name__}: initial_lr", initial_lr)
        if not callable(multiplier):
            number(f"{type(self).__name__}: multiplier", multiplier)
        self._initial_lr = initial_lr
        self._multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self._start_epoch, self._end_epoch = start_epoch, end_epoch
        self._staircase = staircase
        self._corrects_momentum = momentum_correction
        self._steps_per_epoch = steps_per_epoch
        self._epoch = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Checks what it needs."""
        optimizer = _innermost(self.model.optimizer)
        rate = getattr(optimizer, "_learning_rate", None)
        if rate is None:  # those of optimizers.legacy
            rate = getattr(optimizer, "learning_rate", None)
        demand = f"{type(self).__name__}: the optimizer's learning rate must be a number"
        advice = "Keras' schedules have warm-up of their own: CosineDecay(..., warmup_target=..., warmup_steps=...)"
        check_kind(demand, rate, ("assign",), advice)
        if self._steps_per_epoch is None:
            self._steps_per_epoch = (self.params or {}).get("steps")
        if self._steps_per_epoch is None and not self._staircase:
            raise InvalidArgumentError(
                f"{type(self).__name__}: expected a known number of steps in an epoch but found none. "
                "Pass steps_per_epoch."
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Notes the epoch; a staircase steps here."""
        self._epoch = epoch
        if self._staircase:
            self._set_rate(epoch)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Everything but a staircase moves here."""
        if not self._staircase:
            done = getattr(followed(), "batch", batch)  # ``fit`` of a rank that joins counts from 0
            self._set_rate(self._epoch + done / self._known_steps())

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Puts the rate into the metrics, as ``lr``."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _known_steps(self) -> int:
        """Steps in an epoch, which ``on_train_begin`` has asked for."""
        assert self._steps_per_epoch is not None
        return self._steps_per_epoch

    def _is_active(self) -> bool:
        return self._start_epoch <= self._epoch and (self._end_epoch is None or self._epoch < self._end_epoch)

    def _set_rate(self, epoch: float) -> None:
        if not self._is_active():
            return
        optimizer = self.model.optimizer
        old, new = float(optimizer.learning_rate), self._initial_lr * self._multiplier(epoch)
        optimizer.learning_rate = new
        if self._corrects_momentum and old > 0 and new != old:
            for velocity in _velocities(optimizer):
                velocity.assign(velocity * (new / old))


class WarmupHooks(ScheduleHooks):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr`` during the first epochs, batch by batch.

    Example:
        >>> model.fit(x, y, epochs=3, callbacks=[hvd.callbacks.LearningRateWarmupCallback(0.1 * hvd.size(), warmup_epochs=2)])

    Args:
        initial_lr: the full rate, already times the number of ranks.
        warmup_epochs: how long it takes.
        momentum_correction: as for ``LearningRateScheduleCallback``.
        steps_per_epoch: where ``fit`` does not know it.
        verbose: 1 to say when it is done, on rank 0.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            # Shifted by a batch, so that the last batch of the warm-up has the full rate.
            size, epoch = current().size, epoch + 1.0 / self._known_steps()
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Puts the rate into the metrics, and says when the warm-up is done."""
        super().on_epoch_end(epoch, logs)
        if self._verbose and epoch + 1 == self._end_epoch and current().rank == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._initial_lr}.")


def _innermost(optimizer: Optimizer) -> Optimizer:
    """The one that a LossScaleOptimizer is around, if it is one."""
    return getattr(optimizer, "inner_optimizer", None) or optimizer


def _velocities(optimizer: Optimizer) -> list[Variable]:
    """The velocities that contain the rate: those of SGD and RMSprop, and not what Muon calls momentum."""
    optimizer = _innermost(optimizer)
    of_the_two = any(kind.__name__ in ("SGD", "RMSprop") for kind in type(optimizer).__mro__)
    if not of_the_two or not getattr(optimizer, "momentum", None):
        return []
    if hasattr(optimizer, "get_slot"):  # one of optimizers.legacy
        return [each for each in optimizer.variables() if each.name.endswith("/momentum:0")]
    return getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", [])
