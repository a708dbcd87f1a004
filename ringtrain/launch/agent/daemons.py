"""The daemons by which an MPI's engine starts ranks on a host, which are to end with the job."""

from __future__ import annotations

import os
import signal

from ringtrain.launch.agent.processes import SECONDS_TO_DIE, Status, await_ends, close_all_but, peer_of

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    import socket

NAMES = {"prted", "orted", "hydra_pmi_proxy"}  # srun's is Slurm's own to end
SECONDS_TO_END = 5.0  # by themselves, once the job is over


class Daemons:
    """The engine's daemons on this host, by process id. A descriptor tells each from later processes of its id."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}

    def note(self, connection: socket.socket) -> None:
        """The daemon is whoever has started the supervisor of a rank."""
        try:
            daemon = Status(peer_of(connection)[0]).parent
            if daemon not in self._descriptors and Status(daemon).name in NAMES:
                self._descriptors[daemon] = os.pidfd_open(daemon)
        except (AttributeError, OSError):  # a Python without pidfd_open; one has ended, or is another user's
            pass

    def end(self, number: int = signal.SIGTERM) -> None:
        """They would wait for minutes for a launcher that they cannot hear either, and have no ranks any more."""
        for descriptor in self._descriptors.values():
            try:
                signal.pidfd_send_signal(descriptor, number)
            except ProcessLookupError:
                pass

    def leave_killer(self) -> None:
        """A process that ends the daemons if they do not end with the job: the engine's network may be cut, and not the launcher's.

        It keeps nothing open that the launcher waits for.
        """
        if not self._descriptors or os.fork():
            return
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            close_all_but(self._descriptors.values())
            for number in (0, signal.SIGTERM, signal.SIGKILL):
                self.end(number)
                await_ends(self._descriptors.values(), SECONDS_TO_END if number == 0 else SECONDS_TO_DIE)
        finally:
            os._exit(0)
