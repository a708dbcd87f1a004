"""Listens to the ranks of a host during a job, passes on what they write and tell, and ends them after it."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import selectors
import shutil
import signal
import socket
import struct
import tempfile
import time

from ringtrain.launch.agent.children import Children
from ringtrain.launch.agent.command import LAUNCHER
from ringtrain.launch.agent.events import call_ready
from ringtrain.launch.agent.link import LauncherGoneError
from ringtrain.launch.agent.processes import (
    SECONDS_TO_DIE,
    TIDIERS,
    JobMark,
    Status,
    await_ends,
    close_quietly,
    is_stopped,
    kill_all,
    kill_once,
    peer_of,
    processes_of,
)
from ringtrain.launch.agent.segments import MPI_FILE, SegmentWatch, remove_file, segments_of
from ringtrain.launch.agent.succession import FORM, LEAVE, Backlog, Succession, make_way

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringtrain.agent_protocol import Introduce, Lead, RankNews, Serve, Serving, Welcome
    from ringtrain.launch.agent.link import Launcher

SECONDS_TO_KILL = 5.0  # from the request to end until what is left is killed; ranks have 3
SECONDS_BETWEEN_LOOKS_AT_GROUPS = 1.0
SECONDS_AFTER_A_REFUSAL = 0.1  # of the system, until the agent tries again
DAEMONS = {"prted", "orted", "hydra_pmi_proxy"}  # by which engines start ranks on a host; srun's is Slurm's own to end
MAX_UNSENT = 256 << 10  # bytes that wait for the launcher; beyond them the ranks wait
LEAST_READ = 4096
LOOKS, SECONDS_BETWEEN_LOOKS = 5, 0.05  # for whoever has just made shared memory, and is about to map it
LAST_BYTES = 1 << 20  # of each stream of a rank that has ended; whoever goes on writing then is not of the job


class Rank:
    """What is known of a rank of this host by a connection: its program's, or its supervisor's where an MPI's engine has started it."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.group = 0  # process group of its command
        self.has_ended = False
        self.pending = b""
        self.arrival: RankNews | None = None  # its program's, which waits for an answer; on a connection of its own
        self.uid = ""  # of its program in an elastic job, which is led over a connection of its own


class RankListener:
    """One selector around the launcher, the ranks' sockets and the pipes of their output."""

    def __init__(self, launcher: Launcher, request: Serve):
        self.launcher = launcher
        self.function_folder = private_folder_with(request["function"]) if request["function"] else None
        environment = request["environment"]
        if self.function_folder:
            environment["RINGTRAIN_FUNCTION"] = self.function_folder
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
        self.ranks: dict[socket.socket, Rank] = {}
        # Numbers of the ranks whose command has not ended, by its process group, which is its session's too.
        self.groups: dict[int, int] = {}
        self.look_at_groups = float("inf")
        self.segments: set[tuple[str, int]] = set()  # (path, inode) of shared memory that the ranks' MPI has made
        self.looks = 0  # still to be taken, the next one at look_at
        self.look_at = float("inf")
        self.daemons: dict[int, int] = {}  # descriptors of the engine's, by process id
        self.pipes: dict[int, tuple[int, int]] = {}  # (rank, stream) by descriptor
        self.listened_to: set[int] = set()  # those of them that the selector watches
        self.credit = request["window"]  # bytes of output that the launcher has room for
        self.heard_at = time.monotonic()
        self.patience = request["patience"] or float("inf")
        self.grace = request["grace"]  # seconds that the ranks go on without a launcher
        self.record = ""  # the newest world that the ranks here were told of
        self.noticed: set[int] = set()  # ranks that are asked to leave
        self.backlog = Backlog()
        self.is_cut_off = False  # the launcher may live, but cannot be heard
        self.refusals: set[str] = set()  # of the system, which the launcher was told of
        self.kill_at: float | None = None
        self.selector = selectors.DefaultSelector()
        launcher.is_outlived = self.grace > 0
        self.succession = self._await_successors(request) if self.grace > 0 else None
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind("\0" + request["socket"])
        self.listener.listen(4096)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(0, selectors.EVENT_READ, self._hear_launcher)
        try:
            self.watch = SegmentWatch()
            self.selector.register(self.watch, selectors.EVENT_READ, self._note_creation)
        except OSError:  # then a rank that is killed within MPI_Init may leave what it shares
            pass
        # Of none, where an engine starts the ranks.
        self.children = Children(
            launcher, self.selector, request, self._note_start, self._hear_all_out, self._take_notice_of_keeper
        )
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
        for connection in list(self.ranks):
            self._forget(connection)
        self.children.kill()
        left = kill_all(self.groups, self.mark, self.children.is_parent, self.children.remaining)
        for path, inode in self.segments:
            remove_file(path, inode)
        if self.is_cut_off:
            self._end_daemons(signal.SIGTERM)
        elif self.daemons:
            self._leave_daemon_killer()
        try:
            numbers = self.groups | {group: number for number, group in self._living()}
            for process, (name, session) in left.items():
                self.launcher.tell({"rank": numbers.get(session, -1), "remains": process, "name": name})
            self.children.finish()
            for descriptor in list(self.pipes):
                room = LAST_BYTES
                while room > 0 and (size := self._read(descriptor, LAST_BYTES)):
                    self.launcher.finish()
                    room -= size
            self._send_results()
            self.launcher.finish()
        except OSError:  # the launcher is gone
            pass
        if self.function_folder:
            shutil.rmtree(self.function_folder, ignore_errors=True)

    def _is_anyone_left(self) -> bool:
        return bool(self.ranks or self.children.running)

    def _living(self) -> list[tuple[int, int]]:
        """(rank, process group) of those whose command has not ended."""
        started = [(child.number, child.process) for child in self.children.running.values() if child.status is None]
        return started + [
            (-1 if rank.number is None else rank.number, rank.group)
            for rank in self.ranks.values()
            if rank.group and not rank.has_ended
        ]

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
            self._look_for_segments()
            self.selector.unregister(self.listener)
            self.listener.close()  # a rank that only starts finds nobody, and gives up
            for connection, rank in self.ranks.items():
                if rank.arrival or rank.uid:  # its program waits for the others, until its supervisor ends it
                    continue
                try:
                    connection.shutdown(socket.SHUT_WR)
                except OSError:  # it has just left
                    pass

    def _look_for_segments(self) -> None:
        """Notes what the ranks' MPI shares: those that end within MPI_Init do not come to tell of it themselves."""
        groups = {group for _, group in self._living()}
        for process in processes_of(groups, None) if groups else ():
            self.segments |= segments_of(process)

    def _note_creation(self) -> None:
        if self.watch.has_seen_one():
            self.looks, self.look_at = LOOKS, 0.0

    def _look_again(self) -> None:
        """Until those are known who have just made shared memory, or it is clear that they are not of this job."""
        known = len(self.segments)
        self._look_for_segments()
        self.looks = 0 if len(self.segments) > known else self.looks - 1
        self.look_at = time.monotonic() + SECONDS_BETWEEN_LOOKS if self.looks else float("inf")

    def _forget(self, connection: socket.socket) -> None:
        """Ends what there may still be of a rank whose supervisor is gone, or is not waited for any longer."""
        rank = self.ranks.pop(connection)
        if rank.group and not rank.has_ended:
            self.groups[rank.group] = -1 if rank.number is None else rank.number
            kill_once(processes_of({rank.group}, None), spare=TIDIERS)
            self.look_at_groups = time.monotonic() + SECONDS_BETWEEN_LOOKS_AT_GROUPS

    def _let_go_of_empty_groups(self) -> None:
        """One in which nobody is left must not be killed later: its number may be that of a stranger by then."""
        for group in [group for group in self.groups if not processes_of({group}, None)]:
            del self.groups[group]
        self.look_at_groups = time.monotonic() + SECONDS_BETWEEN_LOOKS_AT_GROUPS if self.groups else float("inf")

    def _note_daemon(self, connection: socket.socket) -> None:
        """The engine's daemon is whoever has started the rank's supervisor. A descriptor tells it from later processes."""
        try:
            daemon = Status(peer_of(connection)[0]).parent
            if daemon not in self.daemons and Status(daemon).name in DAEMONS:
                self.daemons[daemon] = os.pidfd_open(daemon)
        except (AttributeError, OSError):  # a Python without pidfd_open; one has ended, or is another user's
            pass

    def _end_daemons(self, number: int) -> None:
        """They would wait for minutes for a launcher that they cannot hear either, and have no ranks any more."""
        for descriptor in self.daemons.values():
            try:
                signal.pidfd_send_signal(descriptor, number)
            except ProcessLookupError:
                pass

    def _leave_daemon_killer(self) -> None:
        """A process that ends the daemons if they do not end with the job: the engine's network may be cut, and not the launcher's.

        It keeps nothing open that the launcher waits for.
        """
        if os.fork():
            return
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            kept = {2, *self.daemons.values()}
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and int(name) not in kept:
                    close_quietly(int(name))
            for number in (0, signal.SIGTERM, signal.SIGKILL):
                self._end_daemons(number)
                await_ends(self.daemons.values(), SECONDS_TO_KILL if number == 0 else SECONDS_TO_DIE)
        finally:
            os._exit(0)

    def _send_results(self) -> None:
        """Sends what the ranks of `ringtrain.run` have left: a result or a failure each."""
        folder = self.function_folder
        for name in sorted(os.listdir(folder)) if folder else ():
            kind, _, rank = name.partition(".")
            if rank.isdigit():
                with open(f"{folder}/{name}", "rb") as file:
                    self.launcher.tell({"rank": int(rank), "left": kind}, file.read())
                self.launcher.finish()

    def _step(self) -> None:
        silent = self.heard_at + (self.grace if self.launcher.is_gone else self.patience)
        deadline = min(silent if self.kill_at is None else self.kill_at, self.look_at, self.look_at_groups)
        deadline = min(deadline, self.children.look_at)
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        self._listen()
        call_ready(self.selector, timeout)
        if self.notices:
            self._take_notice(*self.notices.pop(0))
        if time.monotonic() >= self.children.look_at:
            self.children.look()
        if time.monotonic() >= self.look_at:
            self._look_again()
        if time.monotonic() >= self.look_at_groups:
            self._let_go_of_empty_groups()
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

    def _listen(self) -> None:
        """Listens to what ranks write only while the launcher takes it, so that they wait like any program that nobody reads."""
        has_room = self.credit > 0 and len(self.launcher.unsent) < MAX_UNSENT
        wanted = set(self.pipes) if has_room or self.launcher.is_gone else set()
        for descriptor in wanted - self.listened_to:
            self.selector.register(
                descriptor,
                selectors.EVENT_READ,
                lambda descriptor=descriptor: self._read(descriptor, 1 << 16 if self.launcher.is_gone else self.credit),
            )
        for descriptor in self.listened_to - wanted:
            self.selector.unregister(descriptor)
        self.listened_to = wanted
        if bool(self.launcher.unsent) != (1 in self.selector.get_map()):
            if self.launcher.unsent:
                self.selector.register(1, selectors.EVENT_WRITE, self.launcher.flush)
            else:
                self.selector.unregister(1)

    def _wait_without_launcher(self) -> None:
        for descriptor in self.pipes:
            os.close(descriptor)  # a rank that writes on gets SIGPIPE
        self.pipes.clear()
        while self._is_anyone_left() and self.kill_at is not None and time.monotonic() < self.kill_at:
            time.sleep(0.05)
            self.children.look()
            for connection, _rank in list(self.ranks.items()):
                if not is_open(connection):
                    self._forget(connection)

    def _hear_launcher(self) -> None:
        self.heard_at = time.monotonic()
        try:
            requests = self.launcher.requests()
        except (EOFError, OSError):
            self.selector.unregister(0)
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
                self._introduce(request)
            if request["do"] == "lead":
                self._lead(request)
            if request["do"] == "evict":
                self._evict(request["rank"])
            if request["do"] == "tell stopped":
                self._tell_stopped()
            if request["do"] == "go on":
                self.credit += request["bytes"]
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
        self.heard_at, self.credit = time.monotonic(), window
        self.launcher.tell(self._account())
        self.children.untold.clear()
        for child in self.children.running.values():
            if child.status is None:
                self.children.tell_start(child.number)
        for number, stream, data in self.backlog.take():
            self.credit -= len(data)
            self.launcher.tell({"rank": number, "stream": stream}, data)

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
            "dropped": self.backlog.dropped,
        }

    # ---- ranks ----

    def _accept(self) -> None:
        if self.kill_at is not None:  # the listener has been closed since this was found
            return
        connection, _ = self.listener.accept()
        if peer_of(connection)[1] != os.getuid():  # the name can be seen by others
            connection.close()
            return
        self.ranks[connection] = Rank()
        self.selector.register(connection, selectors.EVENT_READ, lambda: self._hear_rank(connection))

    def _hear_rank(self, connection: socket.socket) -> None:
        """Takes what a rank says about itself: one JSON object a line."""
        if connection not in self.ranks:  # it has ended, and was heard out in the same round of the selector
            return
        rank = self.ranks[connection]
        try:
            data = connection.recv(65536)
        except ConnectionError:
            data = b""
        *lines, rank.pending = (rank.pending + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line), rank, connection)
        if not data:
            self.selector.unregister(connection)
            connection.close()
            self._forget(connection)
            if rank.arrival:
                self.launcher.tell({"rank": rank.arrival["rank"], "withdraws": rank.arrival["meets"]["ranks"]})
            if rank.number is not None and not rank.has_ended:
                self.launcher.tell({"rank": rank.number, "lost": True, "at": time.monotonic()})

    def _hear_all_out(self) -> None:
        """Takes all that ranks have said, some of which have ended."""
        for connection in list(self.ranks):
            while connection in self.ranks and is_readable(connection):
                self._hear_rank(connection)

    def _take(self, facts: RankNews, rank: Rank, connection: socket.socket) -> None:
        """Passes facts about a rank on. A rank's own program may tell of its failure, its segments and its arrival alone."""
        if "meets" in facts:
            self._note_arrival(facts, rank, connection)
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
            self.segments.update(
                (path, inode) for path, inode in facts["segments"] if re.fullmatch(MPI_FILE, os.fsencode(path))
            )
            return
        if "starts" in facts:
            rank.number = facts["rank"]
            self._note_daemon(connection)
            self._greet(facts["rank"], connection)
        rank.group = facts.get("group", rank.group)
        rank.has_ended = rank.has_ended or "ended" in facts
        if facts.get("ended") and not self.segments:  # the engine ends the others now
            self._look_for_segments()
        self.launcher.tell(facts)

    def _note_arrival(self, facts: RankNews, rank: Rank, connection: socket.socket) -> None:
        """A rank's program has called init(), and waits for the others to have done so."""
        if any(other.arrival and other.arrival["rank"] == facts["rank"] for other in self.ranks.values()):
            refusal = (
                f"init: one process of rank {facts['rank']} must call init() at a time, but two have. "
                "Call it in the rank alone, and not in what it starts."
            )
            send_line(connection, {"do": "introduce", "ranks": facts["meets"]["ranks"], "refusal": refusal})
            return
        rank.arrival = facts
        self.launcher.tell(facts)

    def _introduce(self, request: Introduce) -> None:
        """Tells the ranks of this host that wait for each other who the others are, or that they do not come."""
        for connection, rank in self.ranks.items():
            if rank.arrival and rank.arrival["meets"]["ranks"] == request["ranks"]:
                rank.arrival = None
                send_line(connection, request)

    def _lead(self, request: Lead) -> None:
        """Passes a word of the authority on to the rank that it is for."""
        if request["frame"].startswith(FORM):
            self.record = request["frame"]
        elif request["frame"].startswith(LEAVE):
            self.children.dismissed.add(request["uid"])
        for connection, rank in self.ranks.items():
            if rank.uid == request["uid"]:
                send_line(connection, request)

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
        for stream, descriptor in enumerate(streams, 1):
            os.set_blocking(descriptor, False)
            self.pipes[descriptor] = (rank, stream)

    def _read(self, descriptor: int, most: int) -> int:
        """Passes on what a rank wrote, up to so many bytes; returns their number, 0 at the end of the stream or if nothing is there."""
        try:
            data = os.read(descriptor, max(LEAST_READ, min(most, 1 << 16)))
        except BlockingIOError:
            return 0
        rank, stream = self.pipes[descriptor]
        if data and self.launcher.is_gone:
            self.backlog.add(rank, stream, data)
        elif data:
            self.credit -= len(data)
            self.launcher.tell({"rank": rank, "stream": stream}, data)
        if data:
            return len(data)
        if descriptor in self.listened_to:
            self.listened_to.discard(descriptor)
            self.selector.unregister(descriptor)
        os.close(descriptor)
        del self.pipes[descriptor]
        return 0


def private_folder_with(function: str) -> str:
    """Makes a folder for this user alone, with the function that `ringtrain.run` wants called in it."""
    try:
        folder = tempfile.mkdtemp(prefix="ringtrain-run-")
    except FileNotFoundError:  # none can be written, as in a container with a read-only root
        folder = tempfile.mkdtemp(prefix="ringtrain-run-", dir="/dev/shm")
    path = os.path.join(folder, "function")
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(base64.b64decode(function))
    return folder


def send_line(connection: socket.socket, facts: Introduce | Lead) -> None:
    """Sends facts to a rank's program."""
    try:
        connection.sendall(json.dumps(facts).encode() + b"\n")
    except OSError:  # it has just ended, as the end of the connection will tell
        pass


def is_readable(connection: socket.socket) -> bool:
    """Whether something has arrived, or the peer has gone."""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    return waiting.poll(0) != []


def is_open(connection: socket.socket) -> bool:
    """Whether the peer of a socket is still there; what it sends is thrown away."""
    connection.setblocking(False)
    try:
        return connection.recv(65536) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
