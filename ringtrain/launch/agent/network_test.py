"""The test of networks on a host whose agent serves a job already: beside a host that comes, or has lost its ranks."""

from __future__ import annotations

import selectors
import socket

from ringtrain.launch.agent.facts import machine
from ringtrain.launch.agent.host_networks import Attempts, Networks, rdma_ports

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from ringtrain._rendezvous.agent_protocol import Addresses, Connect, Listen, Listener
    from ringtrain.launch.agent.link import LauncherEnd


def listen_with(networks: Networks, how: Listener) -> Addresses:
    """Has them listen; the answer to the launcher."""
    return {
        "addresses": networks.listen(**how),
        "left_out": networks.left_out,
        "name": socket.gethostname(),
        "machine": machine(),
        "rdma_ports": rdma_ports(),
    }


class NetworkTest:
    """What `Networks` and `connect_all` do, as events of the agent's selector. look_at: when to call `look`."""

    def __init__(self, launcher: LauncherEnd, selector: selectors.BaseSelector):
        self.look_at = float("inf")
        self._launcher, self._selector = launcher, selector
        self._networks: Networks | None = None
        self._attempts: Attempts | None = None

    def listen(self, request: Listen) -> None:
        """Answers as `Addresses`, and listens until `close`."""
        self.close()
        networks = self._networks = Networks()
        answer = listen_with(networks, request["listener"])
        self._selector.register(networks.selector, selectors.EVENT_READ, lambda: networks.answer(0.0))
        self._launcher.tell(answer)

    def connect(self, request: Connect) -> None:
        """Answers as `Reached`, once all targets have answered or had their time."""
        self._give_up()
        attempts = self._attempts = Attempts(request["targets"])
        self._selector.register(attempts.selector, selectors.EVENT_READ, lambda: self._take(attempts))
        self.look()

    def look(self) -> None:
        """Ends attempts that are late."""
        if self._attempts is not None and self._attempts.have_ended():
            results = self._attempts.results
            self._give_up()
            self._launcher.tell({"reached": results})
        self.look_at = self._attempts.deadline if self._attempts is not None else float("inf")

    def close(self) -> None:
        """Listens no more."""
        if self._networks is not None:
            self._selector.unregister(self._networks.selector)
            self._networks.close()
            self._networks = None

    def _take(self, attempts: Attempts) -> None:
        attempts.take(0.0)
        self.look()

    def _give_up(self) -> None:
        if self._attempts is not None:
            self._selector.unregister(self._attempts.selector)
            self._attempts.close()
            self._attempts = None
