"""``run``: calls a training function again and again, in one world after another, until it returns."""

import functools
from collections.abc import Callable
from typing import Any

from ringtrain._bootstrap import membership
from ringtrain._runtime.context import current
from ringtrain.elastic.state import State
from ringtrain.elastic.worlds import can_go_on, next_world
from ringtrain.errors import HostsUpdatedInterrupt, UnsupportedError


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a training function elastic: its first argument is the state, and it goes on from what that has.

    Example:
        >>> @rt.elastic.run
        ... def train(state, batches): ...

    Each time a world begins, all ranks get the state of rank 0, which has been in the job for longest; then the function is
    called. It is called again, in the next world, when this one ends: after a failure from the last ``commit``, and when
    ranks come or leave from where it was. What it returns is returned.

    What another rank did ends no script here: ``HorovodInternalError`` (of these ``WorldChangedError``) and
    ``HostsUpdatedInterrupt`` do not leave the function. Whatever would fail again does, such as a ``MismatchError``.

    Args:
        func: takes the state and further arguments.

    Raises:
        UnsupportedError: by the function, in a job with ``--batch constant``.
    """
    return run_fn(func, next_world)


def run_fn(
    func: Callable[..., Any],
    reset: Callable[[], None],
    ends_world: Callable[[Exception], bool] = lambda problem: False,
) -> Callable[..., Any]:
    """``run`` with another way to the next world: ``reset()`` leaves this one and joins the next.

    Example:
        >>> def reset():
        ...     rt.shutdown()
        ...     rt.init()
        >>> train = rt.elastic.run_fn(train_on, reset)
        >>> train(rt.elastic.ObjectState(epoch=0))

    Args:
        func: as for ``run``.
        reset: leaves this world and joins the next.
        ends_world: whether an exception of another framework, which has classes of its own, says that the world has ended.
    """

    @functools.wraps(func)
    def elastic(state: State, *args: Any, **kwargs: Any) -> Any:
        if membership.planned():
            raise UnsupportedError(
                "--batch constant: steps must be counted by State with a sampler, or by Elastic, but elastic.run leaves that to "
                "the script. Leave the flag out, or use these."
            )
        is_new = False  # whether the state has not been told of this world yet
        while True:
            try:
                if is_new:
                    state.on_reset()
                    is_new = False
                state.sync()
                if (member := membership.current()) is not None:
                    member.got_state()
                    current().await_state_from(current().size)
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt:
                if membership.current() is None:
                    raise
            except Exception as problem:
                if not (can_go_on(problem) or (membership.current() is not None and ends_world(problem))):
                    raise
                state.restore()
            reset()
            is_new = True

    return elastic
