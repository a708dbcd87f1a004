"""Where ranks may run: the hosts and slots of `-H`, of host files and of Slurm. Pure, but for which host this is."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass, replace

MOST_CHARACTERS, MOST_OF_A_PART = 253, 64  # of a host's name: RFC 1035, whose 63 Linux exceeds by one
MOST_SHOWN = 80  # characters of an entry, in an error
ANY_PORT = 9


class HostsError(ValueError):
    """A host list that cannot be read, or has too few slots."""


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks it may run."""

    name: str
    slots: int
    is_here: bool = False  # whether it is the machine that the launcher runs on
    site: str = ""  # where it is, among hosts that long lines connect

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str, slots: int = 1) -> list[Host]:
    """Reads `-H a:4,b:4`; `slots` are those of a host without a number.

    Raises HostsError for an empty name, an IPv6 address, slots that are not a positive number, and a host named twice.
    """
    entries = [entry.strip() for entry in text.split(",")]
    return _distinct([_host(entry, str(slots), f"-H '{_shown(entry)}'") for entry in entries])


def parse_hostfile(text: str, path: str, slots: int = 1) -> list[Host]:
    """Reads a host file: `host slots=4 site=ams`, `host:4`, or `host` a line, `#` begins a comment. Raises HostsError.

    An error names the line as `path:number`, and what it says.
    """
    lines = [(number, line.split("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    hosts = [_of_a_line(line, slots, f"{path}:{number} '{_shown(line)}'") for number, line in lines if line]
    if not hosts:
        raise HostsError(f"{path}: at least one line 'host slots=N' is needed, but it names no host.")
    return _distinct(hosts)


def place(hosts: list[Host], ranks: int) -> list[Host]:
    """The hosts that `ranks` ranks occupy, filled in their order. Raises HostsError if there are too few slots."""
    placed, left = [], ranks
    for host in hosts:
        if left:
            placed.append(replace(host, slots=min(host.slots, left)))
            left -= placed[-1].slots
    if left:
        listed = ",".join(map(str, hosts))
        raise HostsError(
            f"hosts '{listed}': -np {ranks} needs {ranks} slots, but there are {ranks - left}. "
            "Give hosts more slots (host:slots), name more hosts, or lower -np."
        )
    return placed


def parse_slurm(names: list[str], tasks_per_node: str) -> list[Host]:
    """The hosts of an allocation with Slurm's count of tasks for each, such as "4(x2),3". Raises HostsError."""
    counts: list[int] = []
    for group in tasks_per_node.split(","):
        matched = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", group)
        if not matched:
            raise HostsError(
                f"SLURM_TASKS_PER_NODE '{tasks_per_node}': expected numbers such as 4(x2),3, but found "
                f"'{group}'. Name the hosts with -H."
            )
        counts += [int(matched[1])] * int(matched[2] or 1)
    if len(counts) != len(names):
        raise HostsError(
            f"SLURM_TASKS_PER_NODE '{tasks_per_node}': expected {len(names)} hosts as in the allocation, but "
            f"found {len(counts)}. Name the hosts with -H."
        )
    return [Host(name, count) for name, count in zip(names, counts, strict=True)]


def find_here(hosts: list[Host]) -> list[Host]:
    """The hosts, with the one that the launcher runs on marked."""
    return [replace(host, is_here=is_this_host(host.name)) for host in hosts]


def is_this_host(name: str) -> bool:
    """Whether a name means the machine that the launcher runs on."""
    own = socket.gethostname()
    if name in ("localhost", own, own.split(".")[0]) or name.startswith("127.") or _is_own_long_name(name, own):
        return True
    try:
        family, kind, _, _, address = socket.getaddrinfo(name, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing; to an address of its own this machine speaks from that
            return probe.getsockname()[0] == address[0]
    except (OSError, UnicodeError):  # it is another's address, or none: then reaching it says what is wrong
        return False


def _is_own_long_name(name: str, own: str) -> bool:
    """Whether this machine's whole name begins so: a pod has it in /etc/hosts before its cluster's DNS can tell."""
    return name.startswith(own.split(".")[0] + ".") and f"{socket.getfqdn(own)}.".startswith(f"{name}.")


def _of_a_line(line: str, default_slots: int, where: str) -> Host:
    name, *fields = re.sub(r"\s*=\s*", "=", line).split()
    unknown = [field for field in fields if not field.startswith(("slots=", "site="))]
    if unknown:
        raise HostsError(
            f"{where}: behind a host's name there may be slots= and site=, but found '{_shown(unknown[0])}'. Write for "
            "example node-a slots=4 site=ams."
        )
    for key in ("slots", "site"):
        if sum(field.startswith(f"{key}=") for field in fields) > 1:
            raise HostsError(f"{where}: {key}= may be there once, but is there again. Leave one out.")
    values = dict(field.split("=", 1) for field in fields)
    if "slots" in values and ":" in name and not _is_ipv6(name):
        raise HostsError(f"{where}: its slots must be behind ':' or in slots=, but are in both. Leave one out.")
    host = _host(name, values.get("slots", str(default_slots)), where)
    return replace(host, site=_site(values["site"], where)) if "site" in values else host


def _site(name: str, where: str) -> str:
    if re.fullmatch(rf"[\w.-]{{1,{MOST_OF_A_PART}}}", name):
        return name
    raise HostsError(
        f"{where}: site= must be one name of at most {MOST_OF_A_PART} letters, digits, '.', '_' and '-', but is "
        f"'{_shown(name)}'. Write for example node-a slots=4 site=ams."
    )


def _host(entry: str, default_slots: str, where: str) -> Host:
    if _is_ipv6(entry):
        raise HostsError(
            f"{where}: expected a host's name or IPv4 address, but found an IPv6 address. "
            "Give it a name, for example in /etc/hosts."
        )
    name, _colon, slots = entry.rpartition(":") if ":" in entry else (entry, "", default_slots)
    if "@" in name:
        raise HostsError(
            f"{where}: expected host:slots, but found a user's name as well. Put it into ~/.ssh/config: Host and User."
        )
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise HostsError(f"{where}: expected host:slots, but found no host name. Write for example node-a:4.")
    if len(name) > MOST_CHARACTERS or any(len(part) > MOST_OF_A_PART for part in name.split(".")):
        raise HostsError(
            f"{where}: a host's name must have at most {MOST_CHARACTERS} characters, and {MOST_OF_A_PART} between dots, "
            f"but has {len(name)}. Check for a missing comma."
        )
    if not re.fullmatch(r"0*[1-9][0-9]{0,5}", slots):
        raise HostsError(
            f"{where}: slots must be a number of at least 1, but it is '{_shown(slots)}'. Write for example {name}:4."
        )
    return Host(name, int(slots))


def _shown(text: str) -> str:
    """A text of a user's as errors repeat it."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _is_ipv6(entry: str) -> bool:
    """Whether an entry is an IPv6 address, with or without brackets, and slots behind these."""
    try:
        ipaddress.IPv6Address(re.sub(r"^\[(.*)\](:\d*)?$", r"\1", entry))
        return True
    except ValueError:
        return False


def _distinct(hosts: list[Host]) -> list[Host]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise HostsError(
                f"hosts '{','.join(map(str, hosts))}': each host may stand there once, but '{name}' "
                f"stands there {names.count(name)} times. Add its slots up."
            )
    return hosts
