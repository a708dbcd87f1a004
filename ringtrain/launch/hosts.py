"""Where ranks may run: the hosts and slots of `-H` and of host files. Pure, but for the question which host this is."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass


class HostsError(ValueError):
    """A host list that cannot be read, or has too few slots."""


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks it may run."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> list[Host]:
    """Reads `-H a:4,b:4`; a host without a number has one slot.

    Raises HostsError for an empty name, slots that are not a positive number, and a host named twice.
    """
    return _distinct([_host(entry.strip(), "-H") for entry in text.split(",")])


def parse_hostfile(text: str, path: str) -> list[Host]:
    """Reads a host file: one `host slots=4` or `host:4` a line, `#` begins a comment. Raises HostsError."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    hosts = [_host(re.sub(r"\s+slots\s*=\s*", ":", line), path) for line in lines if line]
    if not hosts:
        raise HostsError(f"host file '{path}': at least one line 'host slots=N' is needed, but it names no host.")
    return _distinct(hosts)


def place(hosts: list[Host], ranks: int) -> list[Host]:
    """The hosts that `ranks` ranks occupy, filled in their order. Raises HostsError if there are too few slots."""
    placed, left = [], ranks
    for host in hosts:
        if left:
            placed.append(Host(host.name, min(host.slots, left)))
            left -= placed[-1].slots
    if left:
        listed = ",".join(map(str, hosts))
        raise HostsError(f"hosts '{listed}': -np {ranks} needs {ranks} slots, but there are {ranks - left}. "
                         "Give hosts more slots (host:slots), name more hosts, or lower -np.")
    return placed


def is_this_host(name: str) -> bool:
    """Whether a name means the machine that the launcher runs on."""
    own = socket.gethostname()
    return name in ("localhost", own, own.split(".")[0], socket.getfqdn()) or name.startswith("127.")


def _host(entry: str, source: str) -> Host:
    name, colon, slots = entry.rpartition(":") if re.search(r":[^\]]*$", entry) else (entry, "", "1")
    if not re.fullmatch(r"[\w.:%\[\]-]+", name):
        raise HostsError(f"{source} '{entry}': expected host:slots, but found no host name. "
                         "Write for example -H node-a:4,node-b:4.")
    if not (slots.isdecimal() and int(slots) > 0):
        raise HostsError(f"{source} '{entry}': slots must be a number of at least 1, but it is '{slots}'. "
                         f"Write for example {name}:4.")
    return Host(name, int(slots))


def _distinct(hosts: list[Host]) -> list[Host]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise HostsError(f"hosts '{','.join(map(str, hosts))}': each host may stand there once, but '{name}' "
                             f"stands there {names.count(name)} times. Add its slots up.")
    return hosts
