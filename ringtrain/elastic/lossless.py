"""What the states that lose no step share: values that become attributes, who is told of another size, and no commits.

What a step is, and how its results survive, differs: NumPy, TensorFlow and Keras have ``ringtrain.elastic.transparent``,
PyTorch has ``ringtrain.torch.elastic.transparent``.
"""

from collections.abc import Callable
from typing import Any

from ringtrain.context import current
from ringtrain.elastic.state import State
from ringtrain.elastic.transaction import Training
from ringtrain.errors import InvalidArgumentError, UnsupportedError


class LosslessState(State):
    """The base of both.

    Args:
        objects: what becomes attributes.

    Raises:
        InvalidArgumentError: a name that is taken.
    """

    _training: Training  # that goes on
    _NOTHING_TO_COMMIT: str  # and what to do instead

    def __init__(self, objects: dict[str, Any]):
        super().__init__()
        self._refuse_names(objects)
        self._listeners: list[Callable[[int, int], object]] = []
        self._size: int | None = None  # that was told last
        self._has_looped = False  # or does

    def on_change(self, function: Callable[[int, int], object]) -> None:
        """Has a function called between two steps when the number of ranks has changed, with the old and the new one.

        Learning rates do not follow that number by themselves. It may use no collective operation: ranks that join do not
        call it.
        """
        self._listeners.append(function)

    def _begin_loop(self) -> None:
        self._refuse_second_loop()
        self._has_looped = True

    def _refuse_second_loop(self) -> None:
        """A rank that joins begins with the first loop of the script, in which the others may be no longer."""
        if self._has_looped:
            raise InvalidArgumentError(
                "elastic.State: expected one loop over all epochs, or one fit, but found another one, in which ranks that join "
                "would not be. Count all epochs in one, or make another State for each run of the script."
            )

    def _tell_change(self) -> None:
        size = current().size
        former, self._size = self._size, size
        if former is not None and former != size:
            for listener in self._listeners:
                listener(former, size)

    # ---- Horovod's, of which there is no need ----

    def commit(self) -> None:
        """Raises UnsupportedError: there is nothing to go back to."""
        raise UnsupportedError(self._NOTHING_TO_COMMIT)

    def save(self) -> None:
        """Raises UnsupportedError, as ``commit`` does."""
        self.commit()

    def restore(self) -> None:
        """Raises UnsupportedError, as ``commit`` does."""
        self.commit()

    def check_host_updates(self) -> None:
        """Raises UnsupportedError: ranks that wait to join do so between two steps, without being asked for."""
        self.commit()

    def sync(self) -> None:
        """Gives all ranks the values of rank 0; the loops do it."""
        self._training.take_state()

    @classmethod
    def _refuse_names(cls, objects: dict[str, Any]) -> None:
        taken = sorted(name for name in objects if name.startswith("_") or hasattr(cls, name))
        if taken:
            raise InvalidArgumentError(
                f"elastic.State: names must not be those of its methods, or private, but {', '.join(taken)} is. "
                "Choose another one."
            )
