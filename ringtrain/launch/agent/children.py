"""The ranks of a host that the agent starts itself, where no MPI's engine does: it is the parent of their commands.

It is a subreaper as well: what a rank leaves behind becomes a child of the agent, and is killed once the rank has ended.
Whose it is its process group or session says, or its environment. Where neither does, it is killed once all ranks have ended
that may have started it.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time

from ringtrain.launch.agent.keeper import leave_keeper
from ringtrain.launch.agent.link import LauncherGoneError
from ringtrain.launch.agent.processes import (
    SECONDS_TO_DIE,
    SECONDS_TO_TIDY,
    TIDIERS,
    Status,
    children_of_this,
    descendants_of,
    kill_once,
    listeners_of,
    name_of,
    remove_listeners,
    variables_of,
)
from ringtrain.launch.agent.rank_command import (
    LAUNCHER,
    PLACE,
    SECONDS_TO_END,
    environment_of,
    start,
)

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ringtrain._rendezvous.agent_protocol import RankNews, Serve, Start
    from ringtrain.launch.agent.link import LauncherEnd

CANNOT_START = 125  # code of a command that never was
SECONDS_BETWEEN_LOOKS = 0.05  # while somebody is to die: a large process takes a while to end


class Child:
    """A rank's command.

    Attributes:
        number: of the rank.
        uid: of the process, in an elastic job.
        process: its id, and that of its process group and session.
        variables: of its environment, by which its descendants are told from those of other ranks.
        status: exit code, -n for signal n; None while it runs.
        ended_at: when it was found to have ended. is_told: whether the launcher was told.
        kill_at: when it is killed, since it was asked to end; None if it was not.
        listeners: sockets of processes that are killed, and will remove nothing.
    """

    def __init__(self, number: int, uid: str, process: int, variables: frozenset[bytes]):
        self.number, self.uid, self.process, self.variables = number, uid, process, variables
        self.status: int | None = None
        self.ended_at, self.is_told = 0.0, False
        self.kill_at: float | None = None
        self.listeners: set[str] = set()

    def send(self, *numbers: int) -> None:
        """Sends signals to its process group."""
        for number in numbers if self.status is None else ():
            try:
                os.killpg(self.process, number)
            except OSError:  # it has just ended, or has changed its user
                pass

    def end(self) -> None:
        """Asks it to end, and sets the time at which it is killed."""
        self.send(signal.SIGTERM, signal.SIGCONT)  # a stopped process handles no other signal
        self.kill_at = self.kill_at or time.monotonic() + SECONDS_TO_END

    def end_of_it(self) -> RankNews:
        """What the launcher is told of its end."""
        assert self.status is not None  # it has ended
        was_told_to = self.kill_at is not None
        at = self.ended_at
        return {"rank": self.number, "ended": self.status, "at": at, "was_told_to": was_told_to, "engine_lost_at": None}

    def is_over(self, now: float) -> bool:
        """Whether nothing of it may live on."""
        return self.status is not None or (self.kill_at is not None and now >= self.kill_at)


class Orphan:
    """The first of the processes that a rank has left behind.

    owners: the ranks that may have started it. seen_at: when it was met.
    """

    def __init__(self, owners: frozenset[Child], seen_at: float):
        self.owners, self.seen_at = owners, seen_at

    def tidy_until(self) -> float:
        """When those are killed, too, that remove what others have shared."""
        return max([self.seen_at, *(owner.ended_at for owner in self.owners)]) + SECONDS_TO_TIDY


class Children:
    """The ranks that this agent has started and that are not over, with what they have left behind.

    Args:
        request: what they get.
        selector: the agent's, whose entries have a function as data.
        note_start: is told the number of a rank that has started, and descriptors of its stdout and stderr.
        hear_out: takes what the programs of ranks have said, so that their ends are told last.
        note_notice: is told the number of a signal that was sent to the keeper.

    Attributes:
        running: by rank.
        look_at: when there is something to do even if nothing happens.
        dismissed: uids of those that leave before the training has come to its end.
        has_finished: some program has come to its end.
        untold: (rank, code) of those whose end no launcher was told.
        remaining: processes that have outlived SIGKILL, as was told.
    """

    def __init__(
        self,
        launcher: LauncherEnd,
        selector: selectors.BaseSelector,
        request: Serve,
        note_start: Callable[[int, Sequence[int]], None],
        hear_out: Callable[[], None],
        note_notice: Callable[[int], None],
    ):
        self.launcher, self.selector, self.request = launcher, selector, request
        self.note_start, self.hear_out, self.note_notice = note_start, hear_out, note_notice
        self.running: dict[int, Child] = {}
        self.orphans: dict[int, Orphan] = {}
        self.look_at = float("inf")
        self.dismissed: set[str] = set()
        self.has_finished = False
        self.untold: list[tuple[int, int]] = []
        self.remaining: set[int] = set()
        self.is_parent = False

    # ---- start ----

    def start(self, request: Start) -> None:
        """Starts the ranks of a request: all of the host, or one that follows another in its slot."""
        without = tuple(request["without"])
        given = {name: value for name, value in os.environ.items() if not name.startswith(without)}
        given |= request.get("variables", {}) | self.request["environment"]
        for local in request.get("only", range(request["count"])):
            place = [str(each) for each in (request["first"] + local, request["size"], local, request["count"])]
            try:
                self._become_parent()
                self._start(request, given, place)
            except LauncherGoneError:
                raise
            except OSError as error:
                self._tell_why_not(request["first"] + local, error)

    def _start(self, request: Start, given: dict[str, str], place: list[str]) -> None:
        number = int(place[0])
        environment, threads = environment_of(given, place, self.request["socket"])
        pipes: list[tuple[int, int]] = []
        try:
            for _ in range(2):
                pipes.append(os.pipe())
            streams = [write_end for _, write_end in pipes]
            process = start(request["line"], environment, self.request["directory"], streams, self.request["ignored"])
        except OSError:
            for read_end, _ in pipes:
                os.close(read_end)
            raise
        finally:
            for _, write_end in pipes:
                os.close(write_end)
        own = {PLACE[0]: place[0], **request.get("variables", {})}
        variables = frozenset(f"{name}={value}".encode() for name, value in own.items())
        self.running[number] = Child(number, request.get("uid", ""), process, variables)
        self.note_start(number, [read_end for read_end, _ in pipes])
        self.tell_start(number)
        if threads is not None:
            self.launcher.tell({"rank": number, "omp_num_threads": threads})

    def tell_start(self, number: int) -> None:
        """Tells the launcher that a rank runs here."""
        self.launcher.tell({"rank": number, "starts": True, "host": socket.gethostname()})

    def _tell_why_not(self, rank: int, error: OSError) -> None:
        why = f"cannot start rank {rank}: {error.strerror}. Give its host fewer slots, or raise its limits (ulimit -u, ulimit -n)."
        self.launcher.tell({"rank": -1, "words": f"ringtrainrun: {why}\n"})
        self.launcher.tell({"rank": rank, "cleared": CANNOT_START})

    def _become_parent(self) -> None:
        """Leaves a keeper, and has the selector wake up when a child has ended."""
        if self.is_parent:
            return
        wakeup, wakeup_write = os.pipe()
        try:
            keeper = leave_keeper([signal.Signals[name] for name in self.request["notices"]])
        except OSError:
            os.close(wakeup)
            os.close(wakeup_write)
            raise
        self.is_parent = True
        for descriptor in (wakeup, wakeup_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

        def wake() -> None:
            os.read(wakeup, 4096)
            self.look()

        self.selector.register(wakeup, selectors.EVENT_READ, wake)
        self.selector.register(keeper, selectors.EVENT_READ, lambda: self._hear_keeper(keeper))

    def _hear_keeper(self, keeper: int) -> None:
        numbers = os.read(keeper, 4096)
        if not numbers:  # nobody would end what is here, should this process be killed
            self.selector.unregister(keeper)
            for child in self.running.values():  # at once, as when this process is killed
                child.kill_at = time.monotonic()
            raise LauncherGoneError  # as if there were nobody any more
        for number in numbers:
            self.note_notice(number)

    # ---- end ----

    def end(self) -> None:
        """Asks all to end; those that have not are killed after some seconds."""
        for child in self.running.values():
            child.end()
        self._plan_look()

    def look(self) -> None:
        """Takes the ends of children, and kills what may not live on."""
        self._reap()
        now = time.monotonic()
        self._adopt(now)
        self._kill_who_is_over(now)
        for child in [child for child in self.running.values() if child.status is not None]:
            self._clear(child, now)
        self._plan_look()

    def _reap(self) -> None:
        """Takes children that have ended, and tells of those that are commands of ranks."""
        ended = {}
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                ended[reaped[0]] = reaped[1]
        except ChildProcessError:
            pass
        for child in self.running.values():
            if child.status is None and child.process in ended:
                child.status, child.ended_at = os.waitstatus_to_exitcode(ended[child.process]), time.monotonic()
        if untold := [child for child in self.running.values() if child.status is not None and not child.is_told]:
            self.hear_out()
            for child in untold:
                child.is_told = True
                self.launcher.tell(child.end_of_it())

    def _adopt(self, now: float) -> None:
        """Notes who has become a child of this process since the last look."""
        left = set(children_of_this()) - {child.process for child in self.running.values() if child.status is None}
        self.remaining = {process for process in self.remaining if os.path.exists(f"/proc/{process}")}
        self.orphans = {process: orphan for process, orphan in self.orphans.items() if process in left}
        for process in left - self.orphans.keys() - self.remaining:
            self.orphans[process] = Orphan(self._owners_of(process), now)

    def _owners_of(self, process: int) -> frozenset[Child]:
        """The ranks that may have started a process."""
        ranks = self.running.values()
        try:
            status = Status(process)
            if owner := [child for child in ranks if child.process in (status.group, status.session)]:
                return frozenset(owner)
            variables = set(variables_of(process)) if status.state != b"D" else set()
        except OSError:  # it has ended, or is another user's
            variables = set()
        marked = f"{LAUNCHER}={self.request['socket']}".encode() in variables
        return frozenset(child for child in ranks if marked and child.variables <= variables) or frozenset(ranks)

    def _kill_who_is_over(self, now: float) -> None:
        """Kills ranks that were asked to end and have not, and what ranks have left behind, with all that these have started."""
        firsts: dict[bool, dict[int, frozenset[Child]]] = {True: {}, False: {}}  # by whether some of them are spared
        for child in self.running.values():
            if child.status is None and child.is_over(now):
                firsts[True][child.process] = frozenset([child])
        for process, orphan in self.orphans.items():
            if all(owner.is_over(now) for owner in orphan.owners):
                firsts[now < orphan.tidy_until()][process] = orphan.owners
        for spares, found in firsts.items():
            if found:
                below = [*found, *descendants_of(*found)]
                listeners = listeners_of(below)
                for owner in frozenset().union(*found.values()):
                    owner.listeners |= listeners
                kill_once(below, spare=TIDIERS if spares else ())

    def _clear(self, child: Child, now: float) -> None:
        """Tells that a rank is over, once nothing is left of it, or what is left waits in the kernel."""
        left = [
            process
            for process, orphan in self.orphans.items()
            if child in orphan.owners and all(owner.is_over(now) for owner in orphan.owners)
        ]
        if left and now < child.ended_at + SECONDS_TO_TIDY + SECONDS_TO_DIE:
            return
        for process in [*left, *descendants_of(*left)] if left else ():
            self.launcher.tell({"rank": child.number, "remains": process, "name": name_of(process)})
            self.remaining.add(process)
            self.orphans.pop(process, None)
        self._let_go(child)

    def _let_go(self, child: Child) -> None:
        del self.running[child.number]
        remove_listeners(child.listeners)
        assert child.status is not None  # it has ended
        code = child.status if child.status >= 0 else 128 - child.status
        self.has_finished = self.has_finished or (code == 0 and child.uid not in self.dismissed)
        self.dismissed.discard(child.uid)
        if self.launcher.is_gone:
            self.untold.append((child.number, code))
        self.launcher.tell({"rank": child.number, "cleared": code})

    def _plan_look(self) -> None:
        soon = time.monotonic() + SECONDS_BETWEEN_LOOKS
        over = [max(soon, child.kill_at or 0.0) for child in self.running.values() if child.kill_at is not None]
        over += [soon for child in self.running.values() if child.status is not None]
        self.look_at = min(over, default=float("inf"))

    def kill(self) -> None:
        """Kills all that are left, whose ends `finish` tells."""
        for child in self.running.values():
            child.kill_at = 0.0
        if self.is_parent:
            self._adopt(time.monotonic())
            self._kill_who_is_over(time.monotonic())

    def finish(self) -> None:
        """Tells of those that were killed last."""
        self._reap()
        for child in [child for child in self.running.values() if child.status is not None]:
            self._let_go(child)
