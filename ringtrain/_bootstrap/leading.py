"""Who leads a rank of an elastic job, as the rank speaks to it: the launcher's agent on its host, or an authority that it calls.

An agent is lost with its job. An authority may be away for a while: the connection is made anew, and the rank goes on
meanwhile, for as long as the authority has said.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ringtrain._binding.log import logger
from ringtrain._binding.options import environment
from ringtrain._rendezvous.by_address import Address
from ringtrain._rendezvous.handshake import HandshakeError, key_of_world
from ringtrain._rendezvous.launcher import ElasticPlace
from ringtrain._rendezvous.meeting import user_of
from ringtrain._rendezvous.server import Client
from ringtrain.errors import InvalidArgumentError, TimeoutError, UnsupportedError
from ringtrain.version import __version__

NOTICES = "RINGTRAIN_ELASTIC_NOTICE"  # names of the signals that ask a rank to leave between two steps
PLANNED = "RINGTRAIN_ELASTIC_PLANNED"  # see `Member.planned`
BALANCED = "RINGTRAIN_ELASTIC_BALANCED"  # see `Member.balances`
SECONDS_OF_SILENCE = 5.0  # of the authority, which says something each second; then it is called anew
SECONDS_BETWEEN_CALLS = 0.5
SECONDS_TO_ANSWER = 5.0  # of an authority that is called
SECONDS_TO_DRAIN = 1.0  # what an earlier connection still has
ONE_SECRET = "Give the authority and all ranks the same one."


class LinkLostError(Exception):
    """Nobody leads this rank any more. ends_rank: nobody else ends its process."""

    def __init__(self, text: str, ends_rank: bool):
        super().__init__(text)
        self.ends_rank = ends_rank


class Link(Protocol):
    """The way between a rank and who leads it. `receive` and `has_more` are one thread's, the others anybody's.

    Attributes:
        notices: names of the signals that ask this rank to leave.
        planned, balances: see `Member`.
        leave_code: exit code of a rank that leaves on notice.
    """

    notices: Sequence[str]
    planned: int
    balances: bool
    leave_code: int

    def open(self) -> None:
        """Raises UnsupportedError."""

    def send(self, said: dict[str, Any]) -> bool:
        """False if nobody hears it."""

    def receive(self) -> list[dict[str, Any]]:
        """Waits for words to this rank. Raises LinkLostError."""

    def has_more(self) -> bool:
        """Whether `receive` would not wait."""

    def ask_for_leave(self, number: int) -> bool:
        """This signal has asked the rank to leave; False if nobody can let it."""

    def finish(self) -> None:
        """The program has come to its end, and `send` has said so; returns when that will not be forgotten."""

    def key_of(self, drawn: bytes) -> bytearray:
        """The secret of a world, of what it was formed with."""


class AgentLink:
    """To the launcher's agent on this host. number: of this rank's slot."""

    leave_code = 0

    def __init__(self, number: int):
        self.notices: Sequence[str] = [name for name in environment().get(NOTICES, "").split(",") if name]
        self.planned = int(environment().get(PLANNED) or 0)
        self.balances = bool(environment().get(BALANCED))
        self._number = number
        self._agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._pending = b""

    def open(self) -> None:
        """Raises UnsupportedError."""
        try:
            self._agent.connect("\0" + environment()["RINGTRAIN_LAUNCHER"])
            if user_of(self._agent) != os.getuid():
                raise PermissionError("its socket belongs to another user")
        except OSError as error:
            raise UnsupportedError(
                f"init: ringtrainrun must lead this rank of an elastic job, but its agent on this host cannot be reached: "
                f"{error}. Start the job anew, with ringtrainrun."
            ) from None

    def send(self, said: dict[str, Any]) -> bool:
        """False if the agent is gone."""
        try:
            self._agent.sendall(json.dumps({"rank": self._number, **said}).encode() + b"\n")
            return True
        except OSError:
            return False

    def receive(self) -> list[dict[str, Any]]:
        """Raises LinkLostError; who has started this process ends it then."""
        while True:
            try:
                data = self._agent.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                raise LinkLostError(
                    "init: ringtrainrun must lead an elastic job, but it has ended it, or is gone.", False
                )
            *lines, self._pending = (self._pending + data).split(b"\n")
            if lines:
                return [json.loads(line) for line in lines]

    def has_more(self) -> bool:
        """Whether something has come."""
        return bool(select.select([self._agent], [], [], 0)[0])

    def ask_for_leave(self, number: int) -> bool:
        """False if the agent is gone."""
        return self.send({"noticed": number})

    def finish(self) -> None:
        """The agent keeps the word."""

    def key_of(self, drawn: bytes) -> bytearray:
        """As it was drawn: the way from the launcher is ssh."""
        return bytearray(drawn)


class AuthorityLink:
    """To the authority at an address, which an engine of the user's has started beside the ranks.

    secret: 32 bytes that it and all ranks know.
    """

    def __init__(self, address: Address, secret: bytes):
        self.notices: Sequence[str] = ()
        self.planned = self.leave_code = 0
        self.balances = False
        self._address, self._secret = address, secret
        # What this process says of itself with each call.
        self._self: dict[str, Any] = {
            "version": __version__,
            "uid": secrets.token_hex(16),
            "hostname": socket.gethostname(),
            "machine": _machine(),
            "job": "",  # the rest once it is known
            "host": "",
            "slot": -1,
            "noticed": 0,
            "finished": False,
        }
        self._grace = 0.0
        self._heard = 0.0  # when the authority has last said something
        self._connection: Client | None = None
        self._waiting: list[dict[str, Any]] = []  # words that `receive` has not returned yet
        self._lock = threading.Lock()  # of what is sent, and of the two before
        self._kept = threading.Event()  # the authority remembers that this rank has finished

    def enter(self, seconds: float, listens: str) -> ElasticPlace:
        """Calls the authority until it answers, for so long. listens: where this rank is to listen for others.

        Raises:
            InvalidArgumentError: it has another secret.
            TimeoutError: it did not answer.
            UnsupportedError: it refuses this process.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                welcome = self._call(min(SECONDS_TO_ANSWER, max(0.1, deadline - time.monotonic())))
                break
            except HandshakeError as problem:
                if problem.has_another:
                    raise InvalidArgumentError(
                        f"RINGTRAIN_SECRET: it must be that of the authority at '{self._address}', but is another. {ONE_SECRET}"
                    ) from None
                why = str(problem)
            except OSError as problem:
                why = problem.strerror or str(problem)
            if time.monotonic() + SECONDS_BETWEEN_CALLS > deadline:
                raise TimeoutError(
                    f"init: expected the authority of the job to answer at '{self._address}' within {seconds:g} s, but: {why}. "
                    "Start it with `ringtrain authority`; look at RINGTRAIN_AUTHORITY, and at the network between the hosts."
                )
            time.sleep(SECONDS_BETWEEN_CALLS)
        if "refused" in welcome:
            raise UnsupportedError(f"init: {welcome['refused']}")
        self._self.update(job=welcome["job"], host=welcome["host"], slot=welcome["slot"])
        self.notices, self.planned, self.leave_code = welcome["notices"], welcome["planned"], welcome["leave_code"]
        self.balances = welcome["balances"]
        self._grace = welcome["grace"]
        return ElasticPlace(self._self["uid"], welcome["slot"], welcome["slot"], welcome["host"], listens)

    def open(self) -> None:
        """Nothing: `enter` was before."""

    def send(self, said: dict[str, Any]) -> bool:
        """False if the authority is away; it asks for what counts when it is called."""
        with self._lock:
            if self._connection is None:
                return False
            try:
                self._connection.say(said)
                return True
            except OSError:
                return False

    def receive(self) -> list[dict[str, Any]]:
        """Raises LinkLostError if the authority is away for too long, or refuses this rank."""
        try:
            return self._receive()
        except LinkLostError:
            self._kept.set()  # nobody will remember more
            raise

    def has_more(self) -> bool:
        """Whether something has come."""
        connection = self._connection
        return bool(self._waiting) or (
            connection is not None and bool(select.select([connection.socket], [], [], 0)[0])
        )

    def ask_for_leave(self, number: int) -> bool:
        """True: an authority that is away is asked when it is back."""
        self._self["noticed"] = number
        self.send({"noticed": number})
        return True

    def finish(self) -> None:
        """Waits until the authority has it on its disk, or is away for too long."""
        self._self["finished"] = True
        self.send({"finished": True})
        if not self._kept.wait(self._grace):
            logger.warning(
                "elastic: the authority at '%s' must know that this rank has come to its end, but is away",
                self._address,
            )

    def key_of(self, drawn: bytes) -> bytearray:
        """Of the job's secret, since others may read what an authority says."""
        return key_of_world(self._secret, drawn.hex())

    # ---- the thread that receives, and before it begins ----

    def _receive(self) -> list[dict[str, Any]]:
        while True:
            if said := [each for each in self._read() if not self._is_ours(each)]:
                return said
            if time.monotonic() - self._heard < SECONDS_OF_SILENCE and self._connection is not None:
                continue
            if time.monotonic() - self._heard >= self._grace:
                raise LinkLostError(
                    f"nothing was heard of the authority at '{self._address}' for {self._grace:g} s, so that this rank cannot "
                    "know which others go on.",
                    True,
                )
            self._call_again()

    def _is_ours(self, said: Mapping[str, Any]) -> bool:
        """Takes what is said to the link, and not to the rank."""
        self._heard = time.monotonic()
        if "beat" in said:
            self.send({"beat": said["beat"]})
        elif "kept" in said:
            self._kept.set()
        elif "over" in said:
            self._kept.set()  # as above
            return False
        elif "waits" in said:
            logger.warning("elastic: %s", said["waits"])
        else:
            return False
        return True

    def _read(self) -> list[dict[str, Any]]:
        """What has come; waits a while for it."""
        if self._waiting:
            said, self._waiting = self._waiting, []
            return said
        if self._connection is None:
            time.sleep(SECONDS_BETWEEN_CALLS)
            return []
        if not select.select([self._connection.socket], [], [], SECONDS_OF_SILENCE)[0]:
            return []
        try:
            return self._connection.receive()
        except (OSError, HandshakeError):
            pass
        with self._lock:
            self._connection.close()
            self._connection = None
        return []

    def _call_again(self) -> None:
        """An earlier connection stays until a new one stands: its end is taken for that of this process."""
        try:
            welcome = self._call(SECONDS_TO_ANSWER)
        except (OSError, HandshakeError):
            return
        if "refused" in welcome:
            raise LinkLostError(welcome["refused"], True)

    def _call(self, seconds: float) -> dict[str, Any]:
        """Makes a connection that is the present one from then on; returns what the authority has answered."""
        deadline = time.monotonic() + seconds
        called = socket.create_connection((self._address.host, self._address.port), timeout=seconds)
        connection = Client(called, self._secret, deadline - time.monotonic())
        try:
            called.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SECONDS_OF_SILENCE * 1000))
            connection.say(self._self)
            said = connection.receive_until(deadline)
            called.settimeout(None)
        except BaseException:
            connection.close()
            raise
        self._heard = time.monotonic()
        with self._lock:
            before, self._connection = self._connection, connection
        self._waiting += [*(_drain(before) if before is not None else ()), *said[1:]]
        return said[0]


def _machine() -> list[str | int]:
    """What no other machine, or container, has."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:  # a container may have processes alone in /proc
        boot = socket.gethostname()
    return [boot, os.stat("/proc/self/ns/net").st_ino]


def _drain(connection: Client) -> list[dict[str, Any]]:
    """What a connection has whose other end closes it now."""
    said: list[dict[str, Any]] = []
    with contextlib.closing(connection), contextlib.suppress(OSError, HandshakeError):
        connection.socket.settimeout(SECONDS_TO_DRAIN)
        while True:
            said += connection.receive()
    return said


class LeaveNotice:
    """Signals that ask a rank to leave between two steps, as far as the script does not handle them itself.

    ask: is called by a thread of its own, once, with the signal's number.

    Attributes:
        was_given: whether one has come.
    """

    def __init__(self, ask: Callable[[int], None]):
        self.was_given = False
        self._ask = ask
        self._process = os.getpid()

    def heed(self, names: Sequence[str]) -> None:
        """Handles the signals of these names from now on."""
        if threading.current_thread() is not threading.main_thread():  # the only one that may; the agent still listens
            return
        for number in (signal.Signals[name] for name in names):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        """A child that this process has forked, and whoever is told twice, ends at once."""
        if os.getpid() != self._process or (self.was_given and number == signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self.was_given:
            self.was_given = True
            # By a thread: what this one does at the moment may hold the lock, or stand in the midst of a line.
            threading.Thread(target=self._ask, args=(number,), name="ringtrain-notice", daemon=True).start()
