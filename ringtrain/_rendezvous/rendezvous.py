"""Where the ranks of a world meet if `ringtrainrun` did not start them: what `init`'s arguments, torchrun and Slurm say.

A store of torch's (`stores`), an address at which rank 0 listens (`by_address`), or a folder (`by_files`).
"""

import hashlib
import importlib
import ipaddress
import os
import re
import socket
import struct
import time
import zlib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain._rendezvous import by_address
from ringtrain._rendezvous.by_address import Address
from ringtrain._rendezvous.introducing import call_of
from ringtrain._rendezvous.launcher import Launcher
from ringtrain._rendezvous.meeting import SECRET_BYTES, Introduction, endpoint
from ringtrain.errors import InvalidArgumentError, TimeoutError, UnsupportedError

SECRET = "RINGTRAIN_SECRET"
_LEAST_SECRET = 16  # bytes
LISTEN = "RINGTRAIN_LISTEN"
INTERFACES = "RINGTRAIN_NETWORK_INTERFACES"
PORTS = "RINGTRAIN_PORT_RANGE"
ELSEWHERE = "192.0.2.1"  # belongs to nobody (RFC 5737): the way there is the default route
_SIOCGIFADDR = 0x8915
_LEAST_STORE_SECONDS = 10.0  # torch asks again after pauses that grow
_SEVERAL = 2  # hosts, where their number is not known
_SECONDS_TO_ASK_AGAIN = 0.5  # for a name


class Place(NamedTuple):
    """A rank that meets the others without a launcher of ours.

    Attributes:
        rank: this one's number.
        size: number of ranks.
        store: a store of torch's, an `Address`, or the path of a folder, the same for all.
        secret: 32 bytes that they all know; b"" without one.
        towards: a host from which the address is seen at which this rank listens; "" for the loopback.
        hosts: how many there are, 0 if that is not known.
    """

    rank: int
    size: int
    store: Any
    secret: bytes = b""
    towards: str = ""
    hosts: int = 0


def checked(
    rank: object, size: object, rendezvous: object, secret: object, environ: Mapping[str, str] | None = None
) -> Place | None:
    """The place that ``init``'s arguments name, None if they name none. Raises InvalidArgumentError, UnsupportedError."""
    given = {"rank": rank, "size": size, "rendezvous": rendezvous}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given) and secret is None:
        return None
    if missing:
        raise InvalidArgumentError(
            f"init: rank, size and rendezvous must be given together, but {', '.join(missing)} is missing. "
            "Give all three, or none where a launcher has started the ranks."
        )
    if not _is_number(size, 1) or not _is_number(rank, 0) or rank >= size:  # type: ignore[operator]
        raise InvalidArgumentError(
            f"init: rank and size must be whole numbers with 0 <= rank < size, but are {rank!r} and {size!r}."
        )
    where = _place_of(rendezvous)
    if where is None:
        raise InvalidArgumentError(
            "init: rendezvous must be 'host:port' of rank 0, 'file:///folder', or a store such as "
            f"torch.distributed.TCPStore, but is {rendezvous!r}. Give the same on each rank."
        )
    environ = environ or {}
    if secret is not None and (not isinstance(secret, (bytes, bytearray)) or len(secret) != SECRET_BYTES):
        raise InvalidArgumentError(
            f"init: secret must be {SECRET_BYTES} bytes, the same on all ranks, but is something else. "
            "Draw it with secrets.token_bytes."
        )
    known = bytes(secret) if isinstance(secret, (bytes, bytearray)) else secret_of(environ)
    towards = where.host if isinstance(where, Address) else _host_of(where) or environ.get("MASTER_ADDR", "")
    return Place(rank, size, where, known, towards, _hosts_of_torchrun(environ))  # type: ignore[arg-type]


def _place_of(rendezvous: object) -> Any:
    """A store, `Address` or path; None if it is none of them."""
    if isinstance(rendezvous, str):
        if rendezvous.startswith("file:///"):
            return Path(rendezvous.removeprefix("file://"))
        return by_address.parse(rendezvous)
    if isinstance(rendezvous, os.PathLike):
        return Path(rendezvous).absolute()
    return rendezvous if _is_store(rendezvous) else None


def _is_store(given: object) -> bool:
    """Whether it has the functions of a store of torch's that are used."""
    return all(callable(getattr(given, name, None)) for name in ("set", "get", "check"))


def _host_of(store: Any) -> str:
    """The host of a ``TCPStore``, also below prefixes; "" for another store, and for anything else."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", "")


def secret_of(environ: Mapping[str, str]) -> bytes:
    """The secret that RINGTRAIN_SECRET says, b"" without it: 64 hexadecimal digits are its bytes, other text is hashed.

    Raises InvalidArgumentError if it could be guessed.
    """
    text = environ.get(SECRET, "")
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text)
    said = text.encode(errors="surrogateescape")
    if text and len(said) < _LEAST_SECRET:
        raise InvalidArgumentError(
            f"RINGTRAIN_SECRET: it must have {_LEAST_SECRET} bytes at least, but has {len(said)}, and could be guessed. Draw one, the "
            "same for all ranks: export RINGTRAIN_SECRET=$(openssl rand -hex 32)"
        )
    return hashlib.sha256(b"ringtrain secret " + said).digest() if text else b""


def of_torchrun(environ: Mapping[str, str], seconds: float) -> Place | None:
    """The place that torchrun's agent has given to this process, with the agent's store; None without it.

    Raises:
        TimeoutError: the store has not answered within ``seconds``, or some more.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() not in ("1", "true") or "RANK" not in environ:
        return None
    distributed = importlib.import_module("torch.distributed")
    patience = max(seconds, _LEAST_STORE_SECONDS)
    try:
        store, rank, size = next(distributed.rendezvous("env://", timeout=timedelta(seconds=patience)))
    except RuntimeError as problem:  # torch's errors of stores and of the network
        where = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
        raise TimeoutError(
            f"init: the store of torchrun's agent at {where} must answer within {patience:g} s, but does not: "
            f"{str(problem).partition(chr(10))[0]} The agent there has ended, or cannot be reached from this host. See what "
            "torchrun has said."
        ) from problem
    # torch's keys have the number of restarts in front, which agents of several hosts count apart.
    job = f"ringtrain/{environ.get('TORCHELASTIC_RUN_ID', '')}"
    store = distributed.PrefixStore(job, getattr(store, "underlying_store", store))
    towards = environ.get("MASTER_ADDR", "")
    return Place(rank, size, store, secret_of(environ), towards, _hosts_of_torchrun(environ))


def of_variables(environ: Mapping[str, str]) -> Place | None:
    """The place that RANK, WORLD_SIZE and MASTER_ADDR name, with which AzureML, Kubeflow and others start processes for torch.

    It is a port of that host's beside MASTER_PORT, which is torch.distributed's. None without the variables, and in a job
    of ringtrainrun, which sets them too; and without RINGTRAIN_SECRET, since any process that reaches the port could join,
    unless the host is written as the loopback, where the kernel says whose process it is.
    """
    rank, size, host = (environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    if "RINGTRAIN_LAUNCHER" in environ or not (rank.isdigit() and size.isdigit() and host) or int(size) < 2:
        return None
    secret = secret_of(environ)
    address = Address(host, _port_of(environ.get("MASTER_PORT", ""), _ports(environ)))
    is_here = by_address.names_this_host(address)
    if not secret and not is_here:
        return None
    hosts = 0 if is_here else _SEVERAL
    return Place(int(rank), int(size), address, secret, host, hosts)


def _hosts_of_torchrun(environ: Mapping[str, str]) -> int:
    """How many agents there are, one on a host as a rule; 0 without them."""
    hosts = environ.get("GROUP_WORLD_SIZE", "")
    return int(hosts) if hosts.isdigit() else 0


def of_slurm(started_by: Launcher, environ: Mapping[str, str]) -> Place | None:
    """The place where the tasks of a step of Slurm's meet that no MPI connects; None if this is no such task.

    With RINGTRAIN_SECRET it is a port of the first host, else a folder in the user's home.
    """
    if not started_by.step or started_by.rank is None or started_by.size is None:
        return None
    count = environ.get("SLURM_STEP_NUM_NODES", "") or environ.get("SLURM_NNODES", "")
    hosts = int(count) if count.isdigit() else 0
    if secret := secret_of(environ):
        first = first_host(environ.get("SLURM_STEP_NODELIST", "") or environ.get("SLURM_JOB_NODELIST", ""))
        address = Address(first, _port_of(started_by.step, _ports(environ)))
        return Place(started_by.rank, started_by.size, address, secret, first, hosts)
    folder = Path(environ.get("HOME", "") or "/", ".cache", "ringtrain", f"slurm-{started_by.step}")
    towards = environ.get("SLURM_LAUNCH_NODE_IPADDR", "") if hosts > 1 else ""
    return Place(started_by.rank, started_by.size, folder, b"", towards, hosts)


def first_host(listed: str) -> str:
    """The first of a list as Slurm writes it: "node-[03-05,8],other" is node-03 and more. Pure."""
    matched = re.match(r"([^,\[]+)(?:\[(\w+)[^]]*\]([^,\[]*))?", listed)
    return "".join(part or "" for part in matched.groups()) if matched else ""


def _port_of(job: str, ports: str) -> int:
    """The same on all ranks of a job: the last one of the range, or one that the system does not give out by itself."""
    return int(ports.partition("-")[2]) if "-" in ports else 20000 + zlib.crc32(job.encode()) % 12000


def meet(place: Place, listens: str, addresses: str, seconds: float) -> Introduction:
    """Waits until all ranks have come to the place, and returns what they were told.

    Args:
        place: this rank's.
        listens: where a rank may listen here, from `listening_addresses`.
        addresses: where this rank listens.
        seconds: how long to wait for the others.

    Raises:
        InvalidArgumentError, UnsupportedError: the ranks do not fit together, or cannot meet there.
        TimeoutError: some rank did not come; the text names it.
    """
    call = call_of(place.rank, place.size, addresses, seconds)
    if isinstance(place.store, Address):
        return by_address.meet(place.store, call, place.secret)
    if isinstance(place.store, Path):
        from ringtrain._rendezvous import by_files as way
    else:
        from ringtrain._rendezvous import stores as way  # type: ignore[no-redef]
    return way.meet(place.store, call, listens, place.secret)


# ---- where a rank listens ----


def listening_addresses(environ: Mapping[str, str], towards: str = "", hosts: int = 0, seconds: float = 0.0) -> str:
    """Where a rank listens, as the core reads it.

    What RINGTRAIN_LISTEN says; else its addresses of the networks in RINGTRAIN_NETWORK_INTERFACES; else its address
    towards a host; the loopback without any. Ports of RINGTRAIN_PORT_RANGE.

    Args:
        environ: with these variables.
        towards: a host, "" for none.
        hosts: how many there are, 0 if that is not known.
        seconds: how long the host's name may take to be known, in a pod: there DNS learns it once that host is up.

    Raises:
        InvalidArgumentError: a variable that cannot be used.
        UnsupportedError: there is no way to the host, or none of the networks.
    """
    if given := environ.get(LISTEN, ""):
        return given
    ports = _ports(environ)
    if names := environ.get(INTERFACES, ""):
        own = [address for name in names.split(",") if (address := _address_in(name))]
        if not own:
            raise UnsupportedError(
                f"RINGTRAIN_NETWORK_INTERFACES '{names}': this host must have an address in one of them, but has none. "
                "`ip address` lists both."
            )
        return ",".join(endpoint(address, ports) for address in own)
    if not towards:
        return endpoint("127.0.0.1", ports)
    try:
        own_address = _address_towards_late(towards, seconds if "KUBERNETES_SERVICE_HOST" in environ else 0.0)
    except socket.gaierror as error:
        raise InvalidArgumentError(
            f"init: '{towards}', where the ranks meet, must be an address or a name that this host knows, but: "
            f"{error.strerror}. Look for a misspelt name, or write the address."
        ) from None
    except OSError as error:
        raise UnsupportedError(
            f"init: this host must have a way to '{towards}', where the ranks meet, but: {error}. "
            f"Name a network of all hosts in {INTERFACES}, such as 10.0.0.0/24."
        ) from None
    if (
        hosts > 1 and ipaddress.ip_address(own_address).is_loopback
    ):  # the host's own name, as Debian's /etc/hosts has it
        try:
            own_address = _address_towards(ELSEWHERE)
        except OSError:  # no default route: other ranks will say so
            pass
    return endpoint(own_address, ports)


def _ports(environ: Mapping[str, str]) -> str:
    text = environ.get(PORTS, "") or "0"
    matched = re.fullmatch(r"([0-9]{1,5})[-:]([0-9]{1,5})", text)
    if text != "0" and not (matched and 1024 <= int(matched[1]) < int(matched[2]) <= 65535):
        raise InvalidArgumentError(
            f"RINGTRAIN_PORT_RANGE '{text}': it must be FIRST-LAST within 1024-65535, with FIRST below LAST. "
            "Write for example 20000-20999."
        )
    return text.replace(":", "-")


def _address_towards_late(host: str, seconds: float) -> str:
    """`_address_towards`, once the host's name is known."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _address_towards(host)
        except socket.gaierror:
            if time.monotonic() + _SECONDS_TO_ASK_AGAIN >= deadline:
                raise
        time.sleep(_SECONDS_TO_ASK_AGAIN)


def _address_towards(host: str) -> str:
    """This host's address on the way to another. Sends nothing: it only chooses a route."""
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _address_in(name: str) -> str:
    """This host's address at an interface, or in a network such as 10.0.0.0/24; "" if it has none."""
    try:
        if "/" in name:
            network = ipaddress.ip_network(name, strict=False)
            own = _address_towards(str(network[1]))
            return own if ipaddress.ip_address(own) in network else ""
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            told = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
        return socket.inet_ntoa(told[20:24])
    except (OSError, ValueError):
        return ""


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
