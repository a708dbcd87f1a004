"""Servers and who calls them, in one process: many at once, strangers, and ends of connections."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from eventually import eventually

from ringtrain._rendezvous import server
from ringtrain._rendezvous.handshake import GREETING_BYTES, OBJECTS, REFUSAL, HandshakeError
from ringtrain._rendezvous.server import BROKEN, ENDED, Client, Server

SECRET = bytes(range(32))
PATIENCE = 60.0


class Served:
    """A server in a thread, which answers each object with the same, until `stop`."""

    def __init__(self, listener: socket.socket, secret: bytes = SECRET):
        self.where = listener.getsockname()
        self.family = listener.family
        self.server = Server([listener], secret)
        self.events: list[tuple[Any, Any]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            for connection, said in self.server.wait(0.05):
                self.events.append((connection, said))
                if isinstance(said, dict):
                    self.server.send(connection, said)

    def call(self, secret: bytes = SECRET) -> Client:
        return Client(self.reach(), secret, PATIENCE)

    def reach(self) -> socket.socket:
        """What has proven nothing."""
        connection = socket.socket(self.family, socket.SOCK_STREAM)
        connection.settimeout(PATIENCE)
        connection.connect(self.where)
        return connection

    def ends(self) -> list[Any]:
        return [said for _, said in list(self.events) if isinstance(said, str)]

    def stop(self) -> None:
        """Nobody answers from then on."""
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        self.stop()
        self.server.close()


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served(socket.create_server(("127.0.0.1", 0), backlog=1024))
    yield found
    found.close()


def asks(client: Client, said: object) -> object:
    client.say(said)
    (answer,) = client.receive_until(time.monotonic() + PATIENCE)
    return answer


def reads_the_end(connection: socket.socket) -> bytes:
    got = b""
    try:
        while data := connection.recv(4096):
            got += data
    except ConnectionResetError:
        pass
    return got


def test_what_is_said_is_heard_in_order_and_ends_are_told(served: Served) -> None:
    one, other = served.call(), served.call()
    large = {"x": "y" * 3_000_000}
    assert [asks(one, {"a": 1}), asks(other, {"b": 2}), asks(one, large)] == [{"a": 1}, {"b": 2}, large]
    one.close()
    eventually(lambda: served.ends() == [ENDED], "the end of the one is told")
    assert served.server.are_there()
    other.socket.sendall(bytes(100))  # no code fits
    eventually(lambda: served.ends() == [ENDED, BROKEN], "the other one is dropped")
    assert not served.server.are_there() and reads_the_end(other.socket) == b""
    other.close()


@pytest.mark.parametrize("text", ["7", "[]", "{"])
def test_what_is_no_object_ends_the_connection(text: str, served: Served) -> None:
    client = served.call()
    client._end.say_text(text.encode())
    client.socket.sendall(client._end.take())
    eventually(lambda: served.ends() == [BROKEN], "it is dropped")
    client.close()


def test_strangers_are_told_that_they_are_and_nobody_else_is(served: Served) -> None:
    for data, answer in [(b"GET / HTTP/1.1\r\n\r\n", b""), (OBJECTS + bytes(64), REFUSAL)]:
        with served.reach() as stranger:
            stranger.sendall(data)
            assert reads_the_end(stranger)[16:] == answer
    with pytest.raises(HandshakeError) as told:
        served.call(bytes(32))
    assert told.value.has_another
    eventually(lambda: served.server.refused == 2, "those of the right protocol are counted")
    assert served.events == []


def test_who_is_silent_loses_its_place_and_another_one_does_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SECONDS_TO_PROVE", 0.2)
    client = served.call()
    with served.reach() as silent, served.reach() as half:
        half.sendall(OBJECTS)
        assert reads_the_end(silent) == b"" == reads_the_end(half)
    assert asks(client, {"a": 1}) == {"a": 1}
    client.close()


def test_a_flood_of_strangers_keeps_nobody_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there is room for, who stay: some lose their places to those who come, who may have to come again."""

    def call() -> Client | None:
        try:
            return served.call()
        except ConnectionError:  # as a stranger that had been there for too long
            return None

    monkeypatch.setattr(server, "MOST_STRANGERS", 8)
    monkeypatch.setattr(server, "LEAST_VISIT", 0.02)
    monkeypatch.setattr(server, "SECONDS_TO_PROVE", 1000.0)
    strangers = [served.reach() for _ in range(30)]
    clients = [eventually(call, "it has found a place") for _ in range(5)]
    assert [asks(client, {"n": number}) for number, client in enumerate(clients)] == [{"n": n} for n in range(5)]
    assert len(served.server._strangers) <= 8
    for each in strangers:
        each.close()
    for client in clients:
        client.close()


def test_the_young_keep_their_places_and_others_wait(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the ranks of a large world come at once: none is turned away that would prove itself."""
    monkeypatch.setattr(server, "MOST_STRANGERS", 4)
    monkeypatch.setattr(server, "LEAST_VISIT", 1000.0)
    early = [served.reach() for _ in range(4)]
    eventually(lambda: len(served.server._strangers) == 4, "all of them are there")
    late: list[object] = []
    thread = threading.Thread(target=lambda: late.append(asks(served.call(), {"late": 1})))
    thread.start()
    clients = [Client(each, SECRET, PATIENCE) for each in early]
    assert [asks(client, {"early": 1}) for client in clients] == [{"early": 1}] * 4
    thread.join()
    assert late == [{"late": 1}]
    for client in clients:
        client.close()


def test_a_thousand_call_at_once() -> None:
    """From threads that all wait for the last one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(1000, (hard - 200) // 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * count + 200), hard))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    gathered = Server([listener], SECRET)
    told: list[object] = []

    def call() -> None:
        client = Client(socket.create_connection(listener.getsockname(), PATIENCE), SECRET, PATIENCE)
        client.say({"from": threading.get_ident()})
        told.extend(client.receive_until(time.monotonic() + PATIENCE))
        client.close()

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    came = set()
    deadline = time.monotonic() + PATIENCE
    while len(came) < count and time.monotonic() < deadline:
        came |= {connection for connection, said in gathered.wait(1.0) if isinstance(said, dict)}
    gathered.send_all(came, {"all": ["x" * 30] * count})
    gathered.flush(PATIENCE)
    for thread in threads:
        thread.join()
    gathered.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(came) == len(told) == count and told[0] == {"all": ["x" * 30] * count}


def test_without_descriptors_it_rests_and_goes_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wake for the same call again and again."""
    monkeypatch.setattr(server, "SECONDS_OF_REST", 0.05)
    tries = []
    accept = socket.socket.accept

    def fails_twice(self: socket.socket) -> object:
        tries.append(1)
        if len(tries) <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", fails_twice)
    client = served.call()
    assert asks(client, {"a": 1}) == {"a": 1} and len(tries) <= 5
    client.close()


def test_of_a_unix_socket_those_of_this_user_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0ringtrain-test-{os.getpid()}")
        listener.listen()
        with contextlib.closing(Served(listener, b"")) as found:
            client = found.call(b"")
            assert asks(client, {"a": 1}) == {"a": 1}
            client.close()
            monkeypatch.setattr(server, "user_of", lambda _: os.getuid() + 1)
            with found.reach() as other, contextlib.suppress(BrokenPipeError):
                other.sendall(OBJECTS + bytes(GREETING_BYTES - len(OBJECTS)))
                assert reads_the_end(other) == b"", "one that is let in is answered"
            with pytest.raises(PermissionError, match="it belongs to another user"):
                Client.to(found.family, found.where, b"", PATIENCE)


def test_who_reads_nothing_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_UNSENT", 10_000_000)
    client, other = served.call(), served.call()
    with pytest.raises(ConnectionError):  # it is answered, and does not read that
        while True:
            client.say({"x": "y" * 2_000_000})
    eventually(lambda: len(served.server._proven) == 1, "it has lost its connection")
    assert asks(other, {"a": 1}) == {"a": 1}
    client.close()
    other.close()


def test_who_says_much_leaves_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast it speaks: each turn hears a part of what has come of it, and all who have said something."""
    monkeypatch.setattr(server, "BYTES_AT_ONCE", 1000)
    served = Served(socket.create_server(("127.0.0.1", 0)))
    loud, quiet = served.call(), served.call()
    served.stop()
    for number in range(100):
        loud.say({"number": number})
    quiet.say({"number": -1})

    def turn() -> list[int]:
        return [said["number"] for _, said in served.server.wait(1.0) if isinstance(said, dict)]

    heard = turn()
    assert -1 in heard and len(heard) < 50
    while len(heard) < 101:
        heard += turn()
    assert heard[-1] == 99
    for client in (loud, quiet):
        client.close()
    served.close()


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda connection: None, "says nothing, and is none of this job"),
        (lambda connection: connection.shutdown(socket.SHUT_WR), "it has closed the connection"),
        (lambda connection: connection.sendall(bytes(1000)), "it is none of this job"),
    ],
    ids=["silent", "closed", "wrong"],
)
def test_who_answers_without_the_secret_is_not_believed(answer: Callable[[socket.socket], object], words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            answer(accepted)
            with pytest.raises((OSError, HandshakeError), match=words):
                Client(connection, SECRET, 0.2)
        assert connection.fileno() == -1, "it is closed"
