"""A rank whose range has no port left for its next world opens the present one all the same, which lets ports go."""

import threading

from eventually import eventually

from ringtrain._binding._native import as_text, ffi
from ringtrain._bootstrap import member as member_module
from ringtrain._bootstrap.formed_world import FormedWorld
from ringtrain._rendezvous.launcher import ElasticPlace
from ringtrain.errors import InvalidArgumentError


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
    planned, balances, leave_code, notices = 0, False, 0, ()

    def key_of(self, drawn):
        return bytearray()


def test_a_world_is_opened_before_a_port_for_the_next_one_is_there(monkeypatch):
    monkeypatch.setattr(member_module, "SECONDS_TO_LISTEN", 1.0)
    opener = Opener()
    member = member_module.Member(ElasticPlace("0" * 31 + "1", 0, 0, "a", ""), "program", opener, Link())
    texts = [as_text(text) for text in ("0" * 31 + "1", "a", "127.0.0.1:1")]
    members = ffi.new("rt_member[]", [{"uid": texts[0], "host": texts[1], "address": texts[2]}])
    action = ffi.new("rt_membership_action *", {"world": 1, "members": members, "member_count": 1})
    form = FormedWorld(action, b"")
    member._connect(form)
    eventually(lambda: member._listener == 2, "the rank listens for its next world")
