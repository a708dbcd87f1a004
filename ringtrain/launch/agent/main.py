"""What the agent does with each request, until the launcher is gone or the job is over."""

from __future__ import annotations

import signal
import time

from ringtrain.launch.agent.facts import describe
from ringtrain.launch.agent.host_networks import Networks, connect_all, free_port
from ringtrain.launch.agent.link import LauncherEnd
from ringtrain.launch.agent.listener import RankListener
from ringtrain.launch.agent.network_test import listen_with
from ringtrain.launch.agent.succession import hand_over

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from ringtrain._rendezvous.agent_protocol import Request


def run() -> None:
    """Runs the agent of this process; it ends without a word if the launcher is gone before the job began."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides when the ranks end
    try:
        main()
    except (EOFError, BrokenPipeError):
        pass


def main() -> None:
    """Answers requests until the launcher is gone or the job is over."""
    launcher, networks = LauncherEnd(), Networks()
    waiting: list[Request] = []
    while True:
        while not waiting:
            waiting = launcher.requests()
        request = waiting.pop(0)
        if request["do"] == "describe":
            launcher.tell(describe(request))
        elif request["do"] == "listen":
            answer = listen_with(networks, request["listener"])
            networks.answer_beside()
            launcher.tell(answer)
        elif request["do"] == "connect":
            launcher.tell({"reached": connect_all(request["targets"])})
        elif request["do"] == "find port":
            launcher.tell({"port": free_port(request["address"], request["ports"])})
        elif request["do"] == "tell time":
            launcher.tell({"clock": time.monotonic()})
        elif request["do"] == "take over":
            hand_over(launcher, request)
            return
        elif request["do"] == "serve":
            networks.close()
            RankListener(launcher, request).run()
            return
