"""A launcher is lost, and another one takes its job up: how it finds the agent, and what the agent has kept for it.

The agent of an elastic job listens on a second socket beside that of its ranks, in the abstract namespace, which leaves
no file behind. Whoever is of this user and knows the job's key may take over: a fresh agent, which the new launcher
starts as any other, hands its stdin, stdout and stderr over (`hand_over`), and stays only to keep the connection open.
"""

from __future__ import annotations

import json
import os
import socket
from collections import deque

from ringtrain.launch.agent.processes import peer_of

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ringtrain._rendezvous.agent_protocol import TakeOver
    from ringtrain.launch.agent.link import LauncherEnd

MOST_OF_A_CLAIM = 4096  # bytes
MOST_KEPT = 1 << 20  # bytes of output that wait for the next launcher
SECONDS_TO_MAKE_WAY = 15.0  # for an agent that is told to end
FORM, LEAVE = "06", "09"  # the first byte of these frames, in hexadecimal: see native/elastic/control.h


def name_beside(name: str) -> str:
    """The socket for the next launcher, beside that for the ranks."""
    return f"{name}-launcher"


class Backlog:
    """What ranks write while there is no launcher: the last bytes of it, in their order.

    dropped: bytes that had no room.
    """

    def __init__(self, most: int = MOST_KEPT):
        self._most = most
        self._pieces: deque[tuple[int, int, bytes]] = deque()
        self._size = 0
        self.dropped = 0

    def add(self, rank: int, stream: int, data: bytes) -> None:
        """Keeps what a rank has written to a stream; the oldest makes room for it."""
        self._pieces.append((rank, stream, data))
        self._size += len(data)
        while self._size > self._most:
            _, _, oldest = self._pieces.popleft()
            self._size -= len(oldest)
            self.dropped += len(oldest)

    def take(self) -> Iterator[tuple[int, int, bytes]]:
        """(rank, stream, bytes) of what is kept, which is kept no longer."""
        self.dropped = self._size = 0
        while self._pieces:
            yield self._pieces.popleft()


class Succession:
    """Where the next launcher claims this agent. name: of the socket of the ranks. Raises OSError if it is taken."""

    def __init__(self, name: str, key: str):
        self._key = key
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind("\0" + name_beside(name))
        self.listener.listen(16)
        self.holder: socket.socket | None = None  # whose descriptors are the launcher's; its process waits for the end

    def accept(self) -> socket.socket | None:
        """A connection on which a claim is about to come; None if it was another user's, to whom the name can be seen."""
        connection = self.listener.accept()[0]
        if peer_of(connection)[1] == os.getuid():
            return connection
        connection.close()
        return None

    def hear(self, connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
        """The claim and the descriptors behind it; None if it is none, and then the connection is closed.

        Whoever does not know the key is told so.
        """
        import hmac  # takes milliseconds, and few jobs lose their launcher

        try:
            text, descriptors, _, _ = socket.recv_fds(connection, MOST_OF_A_CLAIM, 3, socket.MSG_CMSG_CLOEXEC)
            claim = json.loads(text) if text else {}
        except (OSError, ValueError):
            claim, descriptors = {}, []
        knows = hmac.compare_digest(str(claim.get("key", "")), self._key)
        if knows and (len(descriptors) == 3 or claim.get("do") == "kill"):
            return claim, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            connection.send(b"it must know the job's key, but does not")
        except OSError:  # it has gone
            pass
        connection.close()
        return None

    def hold(self, connection: socket.socket | None) -> None:
        """Lets the process go that holds the former launcher's connection open, and keeps this one."""
        if self.holder is not None:
            self.holder.close()
        self.holder = connection


def hand_over(launcher: LauncherEnd, request: TakeOver) -> None:
    """In a fresh agent: gives its launcher to the agent that serves the job, and returns once that has ended.

    Tells the launcher why if there is none, or it refuses.
    """
    claim = {"key": request["key"], "window": request["window"], "do": "take over"}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect("\0" + name_beside(request["socket"]))
            if peer_of(connection)[1] != os.getuid():
                raise PermissionError("its socket belongs to another user")
            socket.send_fds(connection, [json.dumps(claim).encode()], [0, 1, 2])
            refusal = connection.recv(MOST_OF_A_CLAIM).decode(errors="replace")
        except ConnectionRefusedError:
            refusal = "there is none any more"
        except OSError as error:
            refusal = str(error)
    if refusal:
        launcher.tell({"refused": refusal})


def make_way(name: str, key: str) -> None:
    """Has the agent end that still serves this job here, for a launcher that has given it up; waits until it has.

    Raises OSError if it does not.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(SECONDS_TO_MAKE_WAY)
        connection.connect("\0" + name_beside(name))
        if peer_of(connection)[1] != os.getuid():
            raise PermissionError("its socket belongs to another user")
        connection.send(json.dumps({"key": key, "do": "kill"}).encode())
        if refusal := connection.recv(MOST_OF_A_CLAIM):
            raise PermissionError(refusal.decode(errors="replace"))
