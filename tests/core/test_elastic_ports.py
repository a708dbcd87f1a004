"""A rank whose range has no port left for its next world opens the present one all the same, which lets ports go."""

import threading

from eventually import eventually

from ringtrain import membership
from ringtrain.errors import InvalidArgumentError
from ringtrain.launcher import ElasticPlace


class Opener:
    """One port, which serves again once the world that has used it is open."""

    def __init__(self):
        self.is_free, self.listeners = threading.Event(), 0
        self.is_free.set()

    def listen(self):
        if not self.is_free.is_set():
            raise InvalidArgumentError("no port is free")
        self.is_free.clear()
        self.listeners += 1
        return self.listeners, f"127.0.0.1:{self.listeners}"

    def open(self, listener, rank, peers, secret, epoch):
        assert listener == 1
        self.is_free.set()
        raise InvalidArgumentError("and the world is none")


class Link:
    planned, leave_code, notices = 0, 0, ()

    def key_of(self, drawn):
        return bytearray()


def test_a_world_is_opened_before_a_port_for_the_next_one_is_there(monkeypatch):
    monkeypatch.setattr(membership, "SECONDS_TO_LISTEN", 1.0)
    opener = Opener()
    member = membership.Member(ElasticPlace("0" * 31 + "1", 0, 0, "a", ""), "program", opener, Link())
    form = membership._Form(1, 0, "")
    form.add(membership.Peer("0" * 31 + "1", "a", 0), False, "127.0.0.1:1")
    member._connect(form)
    eventually(lambda: member._listener == 2, "the rank listens for its next world")
