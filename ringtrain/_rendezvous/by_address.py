"""A place for `at_rank_zero` at "host:port", where rank 0 listens.

Ranks without a secret meet on one host alone, by a Unix socket under the port's number, whose ends are told each other's user
by the kernel. That name has no file, so any user may take it first: rank 0 then adds to it what nobody can know before, and
the others find it in the kernel's list, among which they call those of their own user alone.
"""

import errno
import ipaddress
import os
import re
import secrets
import socket
from pathlib import Path
from typing import NamedTuple

from ringtrain._rendezvous import at_rank_zero
from ringtrain._rendezvous.at_rank_zero import Found, Where, answers
from ringtrain._rendezvous.introducing import ONE_SECRET, Call
from ringtrain._rendezvous.meeting import Introduction, user_of
from ringtrain.errors import InvalidArgumentError


class Address(NamedTuple):
    """Where rank 0 listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> Address | None:
    """ "host:port", "10.0.0.1:4711" or "[fd00::1]:4711"; None if the text is none of these."""
    matched = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:/\[\]]+)):([0-9]{1,5})", text)
    if not matched or not 0 < int(matched[3]) < 65536:
        return None
    return Address(matched[1] or matched[2], int(matched[3]))


def meet(address: Address, call: Call, secret: bytes) -> Introduction:
    """`at_rank_zero.meet` at an address, the same on all ranks.

    Args:
        address: rank 0's.
        call: this rank's.
        secret: 32 bytes that all ranks know; b"" on the loopback, for ranks of one user.

    Raises InvalidArgumentError, besides, if there is no secret where others could reach it.
    """
    if not secret and not is_loopback(address):
        raise InvalidArgumentError(
            f"init: secret must be given where ranks meet at '{address}', but is not, and whoever reaches that port could "
            "join. Give all ranks the same 32 bytes (secrets.token_bytes), or a text in RINGTRAIN_SECRET, such as that of: "
            "openssl rand -hex 32"
        )
    return at_rank_zero.meet(AtAddress(address, secret), call)


def is_loopback(address: Address) -> bool:
    """Whether it can be reached on this host alone."""
    try:
        return all(ipaddress.ip_address(where[0]).is_loopback for _, where in _resolved(address))
    except OSError:  # nobody knows the name yet
        return False


def names_this_host(address: Address) -> bool:
    """Whether it is written as one that means another host to each host; pure."""
    try:
        return address.host == "localhost" or ipaddress.ip_address(address.host).is_loopback
    except ValueError:  # a name, which a host may have of itself
        return False


class AtAddress:
    """See `at_rank_zero.GatheringPlace`."""

    def __init__(self, address: Address, secret: bytes):
        self.absent = f"rank 0 could not be reached at '{address}'"
        self._address, self._secret = address, secret

    def listen(self) -> tuple[list[socket.socket], bytes]:
        try:
            listener = _listener(self._address) if self._secret else _unix_listener(self._address)
        except OSError as error:
            raise InvalidArgumentError(
                f"init: rendezvous '{self._address}' must be an address of rank 0's host with a free port, but: "
                f"{error.strerror or error}. Name rank 0's host and another port, and let one process be rank 0."
            ) from None
        return [listener], self._secret

    def look(self, own: Call) -> str:
        """Nothing: nobody else can listen there."""
        return ""

    def leave(self) -> None:
        """Nothing is left there."""

    def find(self) -> Found | None:
        try:
            places = _resolved(self._address) if self._secret else _unix_places(self._address)
        except OSError as error:  # nobody knows the name yet
            self.absent = f"rank 0 could not be reached at '{self._address}' ({error.strerror or error})"
            return None
        return Found(places, str(self._address), self._secret, True)

    def object(self, call: Call) -> None:
        """On one host those with a secret and those without look for rank 0 in different places."""
        if not is_loopback(self._address):
            return
        others = _unix_places(self._address) if self._secret else _resolved(self._address)[:1]
        if any(map(answers, others)):
            with_one, without = (call["rank"], 0) if self._secret else (0, call["rank"])
            raise InvalidArgumentError(
                f"init: secret must be given on all ranks that meet at '{self._address}' or on none, but rank {without} seems to have "
                f"none, and rank {with_one} has one. {ONE_SECRET}"
            )


def _resolved(address: Address) -> list[Where]:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return [(family, where) for family, _, _, _, where in found]


def _place_to_listen(address: Address) -> Where:
    """Where rank 0 waits. Debian gives a host's own name to 127.0.1.1, which no other host can call: then on every interface."""
    family, where = _resolved(address)[0]
    if is_loopback(address) and not names_this_host(address):
        return family, ("::" if family == socket.AF_INET6 else "0.0.0.0", *where[1:])
    return family, where


def _listener(address: Address) -> socket.socket:
    family, where = _place_to_listen(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def _unix_listener(address: Address) -> socket.socket:
    listener, name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), _unix_name(address)
    try:
        try:
            listener.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or any(
                map(_is_of_this_user, _unix_places(address))
            ):  # of another rank 0
                raise
            listener.bind(f"{name}-{secrets.token_hex(16)}")
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def _is_of_this_user(place: Where) -> bool:
    """Whether a process of this user listens there, be it as busy as it may."""
    family, where = place
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(where)
        except OSError:
            return False
        return user_of(probe) == os.getuid()


def _unix_name(address: Address) -> str:
    return f"\0ringtrain-rendezvous-{os.getuid()}-{address.port}"


def _unix_places(address: Address) -> list[Where]:
    """Where rank 0 may be: under its name, or, if that is another user's, under one that begins so."""
    name = _unix_name(address)
    try:
        listed = Path("/proc/self/net/unix").read_text(errors="replace")
    except OSError:  # a container may lack this part of /proc
        listed = ""
    longer = re.findall(rf"@({re.escape(name[1:])}-[0-9a-f]{{32}})$", listed, re.MULTILINE)
    return [(socket.AF_UNIX, each) for each in (name, *dict.fromkeys(f"\0{each}" for each in longer))]
