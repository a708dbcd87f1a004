"""The connections of a host's ranks to the agent: of their programs, and of the supervisors that an MPI's engine has started."""

from __future__ import annotations

import json
import os
import select
import selectors
import socket
import time

from ringtrain.launch.agent.processes import peer_of

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable

    from ringtrain._rendezvous.agent_protocol import Introduce, Lead, RankNews
    from ringtrain.launch.agent.link import LauncherEnd
    from ringtrain.launch.agent.processes import LeftGroups


class ConnectedRank:
    """What is known of a rank of this host by a connection: its program's, or its supervisor's where an MPI's engine has started it."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.group = 0  # process group of its command
        self.has_ended = False
        self.pending = b""
        self.arrival: RankNews | None = None  # its program's, which waits for an answer; on a connection of its own
        self.uid = ""  # of its program in an elastic job, which is led over a connection of its own


class RankConnections:
    """The socket at which ranks call, and their connections.

    name: of the socket. groups: those of ranks whose connection is gone. take: is called with facts of a rank.
    """

    def __init__(
        self,
        name: str,
        launcher: LauncherEnd,
        selector: selectors.BaseSelector,
        groups: LeftGroups,
        take: Callable[[RankNews, ConnectedRank, socket.socket], None],
    ):
        self._launcher = launcher
        self._selector = selector
        self._groups = groups
        self._take = take
        self._ranks: dict[socket.socket, ConnectedRank] = {}
        self._is_closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + name)
        self._listener.listen(4096)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def living(self) -> list[tuple[int, int]]:
        """(rank, process group) of those whose command has not ended."""
        return [
            (-1 if rank.number is None else rank.number, rank.group)
            for rank in self._ranks.values()
            if rank.group and not rank.has_ended
        ]

    def hear_all_out(self) -> None:
        """Takes all that ranks have said, some of which have ended."""
        for connection in list(self._ranks):
            while connection in self._ranks and is_readable(connection):
                self._hear(connection)

    def arrive(self, facts: RankNews, rank: ConnectedRank, connection: socket.socket) -> None:
        """A rank's program has called init(), and waits for the others to have done so."""
        if any(other.arrival and other.arrival["rank"] == facts["rank"] for other in self._ranks.values()):
            refusal = (
                f"init: one process of rank {facts['rank']} must call init() at a time, but two have. "
                "Call it in the rank alone, and not in what it starts."
            )
            send_line(connection, {"do": "introduce", "ranks": facts["meets"]["ranks"], "refusal": refusal})
            return
        rank.arrival = facts
        self._launcher.tell(facts)

    def introduce(self, request: Introduce) -> None:
        """Tells the ranks of this host that wait for each other who the others are, or that they do not come."""
        for connection, rank in self._ranks.items():
            if rank.arrival and rank.arrival["meets"]["ranks"] == request["ranks"]:
                rank.arrival = None
                send_line(connection, request)

    def lead(self, request: Lead) -> None:
        """Passes a word of the authority on to the rank that it is for."""
        for connection, rank in self._ranks.items():
            if rank.uid == request["uid"]:
                send_line(connection, request)

    def close(self) -> None:
        """Asks every rank to end that has a supervisor, which does so when its socket closes; one that only starts gives up."""
        self._is_closed = True
        self._selector.unregister(self._listener)
        self._listener.close()
        for connection, rank in self._ranks.items():
            if rank.arrival or rank.uid:  # its program waits for the others, until its supervisor ends it
                continue
            try:
                connection.shutdown(socket.SHUT_WR)
            except OSError:  # it has just left
                pass

    def forget_closed(self) -> None:
        """Forgets those whose other end has gone, and throws away what the others say."""
        for connection in list(self._ranks):
            if not is_open(connection):
                self._forget(connection)

    def forget_all(self) -> None:
        """Waits for nobody any longer."""
        for connection in list(self._ranks):
            self._forget(connection)

    def _accept(self) -> None:
        if self._is_closed:  # since this was found
            return
        connection, _ = self._listener.accept()
        if peer_of(connection)[1] != os.getuid():  # the name can be seen by others
            connection.close()
            return
        self._ranks[connection] = ConnectedRank()
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(connection))

    def _hear(self, connection: socket.socket) -> None:
        """Takes what a rank says about itself: one JSON object a line.

        What the selector has found may have been taken in the same round, when the end of another rank was.
        """
        if connection not in self._ranks:
            return
        rank = self._ranks[connection]
        try:
            data = connection.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        *lines, rank.pending = (rank.pending + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line), rank, connection)
        if not data:
            self._selector.unregister(connection)
            connection.close()
            self._forget(connection)
            if rank.arrival:
                self._launcher.tell({"rank": rank.arrival["rank"], "withdraws": rank.arrival["meets"]["ranks"]})
            if rank.number is not None and not rank.has_ended:
                self._launcher.tell({"rank": rank.number, "lost": True, "at": time.monotonic()})

    def _forget(self, connection: socket.socket) -> None:
        """Ends what there may still be of a rank whose supervisor is gone, or is not waited for any longer."""
        rank = self._ranks.pop(connection)
        if rank.group and not rank.has_ended:
            self._groups.add(rank.group, -1 if rank.number is None else rank.number)


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
