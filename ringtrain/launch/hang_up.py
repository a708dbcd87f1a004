"""Hangs up on the agents of a job that does not start, and ends shells in whose start-up file they are stuck."""

from __future__ import annotations

import os
import re
import time

from ringtrain.launch.agent.processes import kill_group
from ringtrain.launch.reach import COMES_TO_ITS_COMMAND, Agent

SECONDS_TO_LEAVE = 2.0  # for agents whose job does not start
SECONDS_TO_END_SHELLS, SECONDS_BETWEEN_QUITS = 10.0, 0.1
SECONDS_BEFORE_QUIT = (
    0.1,
    1.0,
    2.0,
)  # of one shell after the other, for its login and the beginning of its start-up file
QUIT = b"\x1c"  # the key of a terminal
SESSION_HAS_ENDED = re.compile(rb"^Connection to \S+ closed", re.M)  # as ssh says of one on a terminal


def hang_up_on(agents: list[Agent]) -> list[str]:
    """Closes all agents of a job that does not start; whoever does not leave by itself, as an ssh that still connects, is ended.

    Returns a line for each host on which something stays for all that.
    """
    for agent in agents:
        agent.close()
    deadline = time.monotonic() + SECONDS_TO_LEAVE
    stuck = [agent for agent in agents if not agent.has_left(deadline)]
    for agent in stuck:
        kill_group(agent.process.pid)
        agent.process.wait()
    return [
        f"host '{name}': a start-up file of the shell there turns the shell into another program, as exec does, and one of these "
        "stays there until it ends. No command can be run there to end it: take the line out, and end it from the host's console."
        for name in end_shells(stuck)
    ]


def end_shells(agents: list[Agent]) -> list[str]:
    """Ends the shells of agents that have not come to their program: sshd leaves them where they wait.

    Returns the names of hosts where no shell comes to its command, as its start-up file ends with another program.
    """
    enders = [ShellEnder(agent) for agent in agents if agent.has_shell()]
    deadline = time.monotonic() + SECONDS_TO_END_SHELLS
    left = enders
    while left and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_QUITS)
        left = [ender for ender in left if ender.goes_on()]
    for ender in left:
        kill_group(ender.process.pid)
        ender.process.communicate()
    return [ender.agent.host.name for ender in enders if ender.meets_another_program]


class ShellEnder:
    """Ends the shell of an agent by other shells on terminals, one after the other: a quit key that comes too early ends one itself."""

    def __init__(self, agent: Agent):
        self.agent = agent
        self.tries = 0
        self.meets_another_program = False
        self._open()

    def _open(self) -> None:
        self.process = self.agent.end_shell()
        self._quit_at = time.monotonic() + SECONDS_BEFORE_QUIT[self.tries]
        self.tries += 1

    def goes_on(self) -> bool:
        """Sends the quit key, or begins anew; whether it is to be called again."""
        if self.process.poll() is None:
            if time.monotonic() >= self._quit_at:
                try:
                    os.write(self.process.stdin.fileno(), QUIT)  # type: ignore[union-attr]  # as was asked for
                except OSError:  # it has just ended
                    pass
            return True
        said, words = self.process.communicate()
        if COMES_TO_ITS_COMMAND.encode() in said or not SESSION_HAS_ENDED.search(words):
            return False
        if self.tries < len(SECONDS_BEFORE_QUIT):
            self._open()
            return True
        self.meets_another_program = True
        return False
