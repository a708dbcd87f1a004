"""Ends what an agent has started, should the agent be killed.

An agent that starts ranks is two processes from then on: the one that was there stays as the keeper, and its child goes on
as the agent. Both are subreapers. If the agent ends, the kernel kills its ranks, and what these have started becomes the
keeper's, whatever it has done to hide. If the keeper ends, the agent hears of it, and ends the ranks of its host.
"""

from __future__ import annotations

import os
import signal

from ringtrain.launch.agent import rank_command
from ringtrain.launch.agent.processes import close_all_but, end_all_below

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType
    from typing import NoReturn


def leave_keeper(notices: Iterable[int]) -> int:
    """Leaves this process as the keeper, and returns in a child of it.

    Returns a descriptor: the keeper writes into it the numbers of the signals among `notices` that come to it, and its end is
    the keeper's.
    """
    rank_command.prctl(rank_command.PR_SET_CHILD_SUBREAPER, 1)
    heard, tells = os.pipe()
    try:
        agent = os.fork()
    except OSError:
        os.close(heard)
        os.close(tells)
        raise
    if agent:
        _keep(agent, tells, notices)
    os.close(tells)
    rank_command.prctl(rank_command.PR_SET_CHILD_SUBREAPER, 1)
    return heard


def _keep(agent: int, tells: int, notices: Iterable[int]) -> NoReturn:
    """Waits for the agent's end; keeps nothing open that others wait for."""
    try:
        signal.set_wakeup_fd(-1)
        for descriptor in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        close_all_but({tells})

        def tell(number: int, _frame: FrameType | None) -> None:
            try:
                os.write(tells, bytes([number]))
            except OSError:  # the agent has just ended
                pass

        for number in notices:
            signal.signal(number, tell)
        while (ended := os.wait())[0] != agent:
            pass
        end_all_below()
        code = os.waitstatus_to_exitcode(ended[1])
        os._exit(code if code >= 0 else 128 - code)
    finally:
        os._exit(1)
