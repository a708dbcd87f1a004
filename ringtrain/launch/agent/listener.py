"""Listens to the ranks of a host during a job, passes on what they write and tell, and ends them after it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import time

from ringtrain.launch.agent.children import Children
from ringtrain.launch.agent.connections import RankConnections
from ringtrain.launch.agent.daemons import Daemons
from ringtrain.launch.agent.events import call_ready
from ringtrain.launch.agent.function_folder import FunctionFolder
from ringtrain.launch.agent.link import LauncherGoneError
from ringtrain.launch.agent.network_test import NetworkTest
from ringtrain.launch.agent.processes import TIDIERS, JobMark, LeftGroups, is_stopped, kill_all, kill_once, processes_of
from ringtrain.launch.agent.rank_command import LAUNCHER
from ringtrain.launch.agent.rank_output import RankOutput
from ringtrain.launch.agent.segments import Segments
from ringtrain.launch.agent.succession import FORM, LEAVE, Succession, make_way

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringtrain._rendezvous.agent_protocol import Lead, RankNews, Serve, Serving, Welcome
    from ringtrain.launch.agent.connections import ConnectedRank
    from ringtrain.launch.agent.link import LauncherEnd

SECONDS_TO_KILL = 5.0  # from the request to end until what is left is killed; ranks have 3
SECONDS_AFTER_A_REFUSAL = 0.1  # of the system, until the agent tries again


class RankListener:
    """One selector around the launcher, the ranks' sockets and the pipes of their output."""

    def __init__(self, launcher: LauncherEnd, request: Serve):
        self.launcher = launcher
        self.function_folder = FunctionFolder(request["function"])
        environment = request["environment"]
        if self.function_folder.path:
            environment["RINGTRAIN_FUNCTION"] = self.function_folder.path
        welcome: Welcome = {
            "environment": environment,
            "directory": request["directory"],
            "ignored": request["ignored"],
        }
        self.welcome = json.dumps(welcome).encode()
        # In the environment of all that the ranks start; but not the job that a rank submits to Slurm, which takes it
        # along.
        slurm_job = environment.get("SLURM_JOB_ID", os.environ.get("SLURM_JOB_ID", ""))
        self.mark = JobMark(f"{LAUNCHER}={request['socket']}".encode(), slurm_job.encode())
        self.heard_at = time.monotonic()
        self.patience = request["patience"] or float("inf")
        self.grace = request["grace"]  # seconds that the ranks go on without a launcher
        self.record = ""  # the newest world that the ranks here were told of
        self.noticed: set[int] = set()  # ranks that are asked to leave
        self.is_cut_off = False  # the launcher may live, but cannot be heard
        self.refusals: set[str] = set()  # of the system, which the launcher was told of
        self.kill_at: float | None = None
        self.selector = selectors.DefaultSelector()
        launcher.is_outlived = self.grace > 0
        self.succession = self._await_successors(request) if self.grace > 0 else None
        self.groups = LeftGroups()
        self.connections = RankConnections(request["socket"], launcher, self.selector, self.groups, self._take)
        self.selector.register(0, selectors.EVENT_READ, self._hear_launcher)
        self.segments = Segments(self.selector, lambda: {group for _, group in self._living()})
        self.daemons = Daemons()
        self.output = RankOutput(launcher, self.selector, request["window"])
        # Of none, where an engine starts the ranks.
        self.children = Children(
            launcher,
            self.selector,
            request,
            self._note_start,
            self.connections.hear_all_out,
            self._take_notice_of_keeper,
        )
        self.network_test = NetworkTest(launcher, self.selector)
        self.notices: list[tuple[int, str]] = []  # signals that have asked this host to leave, and are not told of
        self.noticed_by: set[str] = set()  # processes that have got one: this one, or its keeper
        for name in request["notices"]:
            signal.signal(signal.Signals[name], lambda number, _frame: self.notices.append((number, "agent")))
        os.set_blocking(1, False)
        launcher.tell({"serving": True})

    def _await_successors(self, request: Serve) -> Succession:
        """Listens for a launcher that takes the job up. An agent that this one has given up, and that lives, ends first."""
        try:
            succession = Succession(request["socket"], request["key"])
        except OSError:
            make_way(request["socket"], request["key"])
            succession = Succession(request["socket"], request["key"])
        self.selector.register(succession.listener, selectors.EVENT_READ, self._accept_claim)
        return succession

    def run(self) -> None:
        """Returns when the job is over here: asked to end, and no rank is left."""
        try:
            while self.kill_at is None or (self._is_anyone_left() and time.monotonic() < self.kill_at):
                try:
                    self._step()
                except LauncherGoneError:
                    raise
                except OSError as error:
                    self._note_refusal(str(error))
        except LauncherGoneError:
            self.launcher.lose()
            self.end()
            self._wait_without_launcher()
        except Exception:
            self.launcher.lose()  # after its fault is told, nobody waits for more
            self.end()
            self._wait_without_launcher()
            raise
        self.connections.forget_all()
        self.children.kill()
        left = kill_all(self.groups.numbers, self.mark, self.children.is_parent, self.children.remaining)
        self.segments.remove()
        if self.is_cut_off:
            self.daemons.end()
        else:
            self.daemons.leave_killer()
        try:
            numbers = self.groups.numbers | {group: number for number, group in self._living()}
            for process, (name, session) in left.items():
                self.launcher.tell({"rank": numbers.get(session, -1), "remains": process, "name": name})
            self.children.finish()
            self.output.drain()
            self._send_results()
            self.launcher.finish()
        except OSError:  # the launcher is gone
            pass
        self.function_folder.remove()

    def _is_anyone_left(self) -> bool:
        return bool(self.connections or self.children.running)

    def _living(self) -> list[tuple[int, int]]:
        """(rank, process group) of those whose command has not ended."""
        started = [(child.number, child.process) for child in self.children.running.values() if child.status is None]
        return started + self.connections.living()

    def _note_refusal(self, text: str) -> None:
        """The system has refused something, such as another descriptor: it is tried again, and told once."""
        if text not in self.refusals:
            self.refusals.add(text)
            host = socket.gethostname()
            why = f"the agent on {host} needs more than it may have there, and tries again: {text}. Raise its limits (ulimit -n)."
            self.launcher.tell({"rank": -1, "words": f"ringtrainrun: {why}\n"})
        time.sleep(SECONDS_AFTER_A_REFUSAL)

    def end(self) -> None:
        """Asks every rank to end: its supervisor, if it has one, does so when its socket closes."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + SECONDS_TO_KILL
            self.children.end()
            self.segments.look()
            self.connections.close()

    def _send_results(self) -> None:
        """Sends what the ranks of `ringtrain.run` have left."""
        for rank, kind, data in self.function_folder.results():
            self.launcher.tell({"rank": rank, "left": kind}, data)
            self.launcher.finish()

    def _step(self) -> None:
        silent = self.heard_at + (self.grace if self.launcher.is_gone else self.patience)
        deadline = min(silent if self.kill_at is None else self.kill_at, self.segments.look_at, self.groups.look_at)
        deadline = min(deadline, self.children.look_at, self.network_test.look_at)
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        self.output.listen()
        call_ready(self.selector, timeout)
        if self.notices:
            self._take_notice(*self.notices.pop(0))
        if time.monotonic() >= self.children.look_at:
            self.children.look()
        if time.monotonic() >= self.network_test.look_at:
            self.network_test.look()
        if time.monotonic() >= self.segments.look_at:
            self.segments.look_again()
        if time.monotonic() >= self.groups.look_at:
            self.groups.look()
        if time.monotonic() > silent:
            self.end()
            self.is_cut_off = True

    def _take_notice_of_keeper(self, number: int) -> None:
        self.notices.append((number, "keeper"))

    def _take_notice(self, number: int, told: str) -> None:
        """Asks the launcher to have the ranks of this host leave; told once more, ends them.

        told: which process has got the signal. Slurm sends it to all of them.
        """
        if not self.noticed_by:
            self.launcher.tell({"rank": -1, "noticed": number})
        elif told in self.noticed_by and number == signal.SIGTERM:
            self.end()
        self.noticed_by.add(told)

    def _wait_without_launcher(self) -> None:
        self.output.close()
        while self._is_anyone_left() and self.kill_at is not None and time.monotonic() < self.kill_at:
            time.sleep(0.05)
            self.children.look()
            self.connections.forget_closed()

    def _hear_launcher(self) -> None:
        self.heard_at = time.monotonic()
        try:
            requests = self.launcher.requests()
        except (EOFError, OSError):
            self.selector.unregister(0)
            self.network_test.close()
            if self.grace > 0 and self.kill_at is None:
                self.launcher.lose()
                return
            requests = [{"do": "end"}]
        for request in requests:
            if request["do"] == "beat":
                self.launcher.tell({"clock": time.monotonic(), "asked": request["at"]})
            if request["do"] == "start" and self.kill_at is None:
                self.children.start(request)
            if request["do"] == "introduce":
                self.connections.introduce(request)
            if request["do"] == "lead":
                self._lead(request)
            if request["do"] == "evict":
                self._evict(request["rank"])
            if request["do"] == "listen":
                self.network_test.listen(request)
            if request["do"] == "connect":
                self.network_test.connect(request)
            if request["do"] == "listen no more":
                self.network_test.close()
            if request["do"] == "tell stopped":
                self._tell_stopped()
            if request["do"] == "go on":
                self.output.go_on(request["bytes"])
            if request["do"] == "end":
                self.end()
            if request["do"] == "kill":
                self.end()
                self.kill_at = self.heard_at

    # ---- the next launcher ----

    def _accept_claim(self) -> None:
        assert self.succession is not None
        connection = self.succession.accept()
        if connection is None:
            return
        self.selector.register(connection, selectors.EVENT_READ, lambda: self._hear_claim(connection))

    def _hear_claim(self, connection: socket.socket) -> None:
        assert self.succession is not None
        self.selector.unregister(connection)
        heard = self.succession.hear(connection)
        if heard is None:
            return
        claim, descriptors = heard
        if self.kill_at is not None and descriptors:  # it ends, and nothing keeps it from that
            for descriptor in descriptors:
                os.close(descriptor)
            connection.close()
            return
        former = self.succession.holder
        self.succession.holder = None
        if claim["do"] == "kill":
            self.end()
            self.kill_at = time.monotonic()
        else:
            self._follow(descriptors, claim["window"])
        if former is not None:
            former.close()
        self.succession.hold(connection)

    def _follow(self, descriptors: list[int], window: int) -> None:
        """Serves another launcher: tells it what there is, and what ranks have written meanwhile."""
        for number in (0, 1):
            if number in self.selector.get_map():
                self.selector.unregister(number)
        self.launcher.replace(descriptors)
        self.selector.register(0, selectors.EVENT_READ, self._hear_launcher)
        self.heard_at = time.monotonic()
        self.launcher.tell(self._account())
        self.children.untold.clear()
        for child in self.children.running.values():
            if child.status is None:
                self.children.tell_start(child.number)
        self.output.follow(window)

    def _account(self) -> Serving:
        """What the next launcher must know."""
        return {
            "serving": True,
            "clock": time.monotonic(),
            "processes": [
                (number, child.uid, number in self.noticed) for number, child in self.children.running.items()
            ],
            "record": self.record,
            "finished": self.children.has_finished,
            "noticed": bool(self.noticed_by),
            "ended": list(self.children.untold),
            "dropped": self.output.dropped,
        }

    # ---- ranks ----

    def _take(self, facts: RankNews, rank: ConnectedRank, connection: socket.socket) -> None:
        """Passes facts about a rank on. A rank's own program may tell of its failure, its segments and its arrival alone."""
        if "meets" in facts:
            self.connections.arrive(facts, rank, connection)
            return
        if "control" in facts:
            rank.uid = facts["uid"]
            self.launcher.tell(facts)
            return
        if "noticed" in facts and self.kill_at is not None:  # the end that it is asked for is that of the job
            self._end_again(facts["rank"])
            return
        if "noticed" in facts:
            self.noticed.add(facts["rank"])
        if "segments" in facts:
            self.segments.note(facts["segments"])
            return
        if "starts" in facts:
            rank.number = facts["rank"]
            self.daemons.note(connection)
            self._greet(facts["rank"], connection)
        rank.group = facts.get("group", rank.group)
        rank.has_ended = rank.has_ended or "ended" in facts
        if facts.get("ended"):  # the engine ends the others now
            self.segments.look_unless_known()
        self.launcher.tell(facts)

    def _lead(self, request: Lead) -> None:
        """Passes a word of the authority on to the rank that it is for."""
        if request["frame"].startswith(FORM):
            self.record = request["frame"]
        elif request["frame"].startswith(LEAVE):
            self.children.dismissed.add(request["uid"])
        self.connections.lead(request)

    def _evict(self, number: int) -> None:
        """Ends a rank at once, which may be stopped."""
        for rank, group in self._living():
            if rank == number:
                kill_once(processes_of({group}, None), spare=TIDIERS)

    def _tell_stopped(self) -> None:
        for rank, group in self._living():
            self.launcher.tell({"rank": rank, "stopped": is_stopped(processes_of({group}, None))})

    def _end_again(self, number: int) -> None:
        """Ends a rank that has taken the first signal for a notice."""
        if number in self.children.running:
            self.children.running[number].send(signal.SIGTERM)

    def _greet(self, rank: int, connection: socket.socket) -> None:
        """Gives a starting rank its environment and the pipes for its output."""
        pipes = [os.pipe() for _ in (1, 2)]
        self._note_start(rank, [read_end for read_end, _ in pipes])
        try:
            socket.send_fds(connection, [struct.pack("I", len(self.welcome))], [write_end for _, write_end in pipes])
            connection.sendall(self.welcome)
        except OSError:  # its supervisor has just ended, as the end of the connection will tell
            pass
        finally:
            for _, write_end in pipes:
                os.close(write_end)

    def _note_start(self, rank: int, streams: Sequence[int]) -> None:
        """A rank has started, whose stdout and stderr can be read there."""
        self.noticed.discard(rank)  # another one's, which was in its slot
        self.output.begin(rank, streams)
