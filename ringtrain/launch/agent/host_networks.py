"""Which networks of a host reach other hosts: its addresses, a listener on each, and attempts to connect to those of others."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import threading
import time

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringtrain._rendezvous.agent_protocol import Listening, Target

SECONDS_TO_CONNECT = 3.0
# For packets as large as the interface allows. A kernel that looks for the size that passes (tcp_mtu_probing) begins after
# 3 s, and needs 7 s in all.
SECONDS_FOR_LARGE = 10.0
AT_ONCE = 256  # connections of one process, which may have 1024 descriptors
NONCE_BYTES = 16
LOSES_LARGE = "small packets pass, large ones do not: MTU"
LARGE_BYTES = 32 << 10  # some packets of an Ethernet with jumbo frames, and few enough for the first flight of TCP


class Networks:
    """Finds out which hosts can reach this one, by a listener on each of its addresses that says who it is.

    selector: of the listeners; whoever has it on a selector of its own calls `answer` when it is ready.
    """

    def __init__(self) -> None:
        self.listeners: list[socket.socket] = []
        self.left_out: list[str] = []  # addresses on which nobody listens, for people
        self.selector = selectors.DefaultSelector()
        self._nonce = b""
        self._has_thread = False

    def listen(self, nonce: str, ports: Sequence[int], interfaces: Sequence[str]) -> list[Listening]:
        """Listens on every address that --network-interfaces allows; returns Listening of each."""
        found: list[Listening] = []
        self._nonce = bytes.fromhex(nonce)
        for interface, address, prefix in ipv4_addresses() + ipv6_addresses():
            is_wanted = is_allowed(interface, address, interfaces)
            listener = bind_within(address, ports) if is_wanted else None
            if listener is None:
                why = f", without a free port within {ports[0]}-{ports[1]}" if is_wanted else ""
                self.left_out.append(f"{interface} ({address}/{prefix}{why})")
            else:
                self.listeners.append(listener)
                found.append((interface, address, prefix, listener.getsockname()[1], mtu_of(interface)))
        for listener in self.listeners:
            listener.setblocking(False)
            self.selector.register(listener, selectors.EVENT_READ, listener)
        return found

    def answer_beside(self) -> None:
        """Answers whoever calls, by a thread, until `close`."""
        self._has_thread = True
        threading.Thread(target=self._answer_all, daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        for listener in self.listeners:
            listener.close()
        self.listeners = []
        if not self._has_thread:
            self.selector.close()

    def _answer_all(self) -> None:
        while self.listeners:
            self.answer(1.0)
        self.selector.close()

    def answer(self, seconds: float) -> None:
        """Sends the nonce and what fills large packets to whoever connects until then, and reads nothing."""
        for key, _ in self.selector.select(seconds):
            try:
                connection, _ = key.data.accept()
                with connection:
                    greet(connection, self._nonce)
            except OSError:  # whoever it was has gone, or the test is over
                pass


def greet(connection: socket.socket, nonce: bytes) -> None:
    """Sends a nonce in a small packet, and behind it large ones, which the kernel delivers after the socket is closed."""
    connection.setblocking(False)  # or one path that loses packets would keep all others waiting
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.send(nonce)
    connection.send(bytes(LARGE_BYTES))


def is_allowed(interface: str, address: str, wanted: Sequence[str]) -> bool:
    """Whether an interface, or a network that contains the address, is among those wanted; () for any."""
    if not wanted or interface in wanted:
        return True
    import ipaddress  # takes milliseconds, and few jobs name networks

    return any(
        ipaddress.ip_address(address) in ipaddress.ip_network(name, strict=False) for name in wanted if "/" in name
    )


def ipv4_addresses() -> list[tuple[str, str, int]]:
    """(interface, address, prefix length) of each interface that is up, but the loopback."""
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:

        def ask(request: int, name: str) -> bytes:
            return fcntl.ioctl(asked, request, struct.pack("256s", name.encode()))

        for _, name in socket.if_nameindex():
            try:
                flags = struct.unpack("H", ask(0x8913, name)[16:18])[0]  # SIOCGIFFLAGS
                address, mask = (ask(request, name)[20:24] for request in (0x8915, 0x891B))  # SIOCGIFADDR, -NETMASK
            except OSError:  # no IPv4 address
                continue
            if flags & 1 and not flags & 8:  # up, and not the loopback
                found.append((name, socket.inet_ntoa(address), bin(int.from_bytes(mask, "big")).count("1")))
    return found


def mtu_of(interface: str) -> int:
    """Bytes of the largest packet that an interface takes; those of Ethernet where it does not say."""
    import fcntl

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            answer = fcntl.ioctl(asked, 0x8921, struct.pack("256s", interface.encode()))  # SIOCGIFMTU
    except OSError:
        return 1500
    return struct.unpack("i", answer[16:20])[0]


def ipv6_addresses(table: str | os.PathLike[str] = "/proc/self/net/if_inet6") -> list[tuple[str, str, int]]:
    """(interface, address, prefix length) of each IPv6 address that is good for more than one cable or this host."""
    try:
        with open(table) as file:  # address, number of the interface, prefix length, scope, flags, interface
            rows = [line.split() for line in file]
    except OSError:  # this kernel has no IPv6
        return []
    return [
        (name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)), int(prefix, 16))
        for address, _, prefix, scope, _, name in rows
        if int(scope, 16) == 0
    ]


def rdma_ports(folder: str | os.PathLike[str] = "/sys/class/infiniband") -> list[str]:
    """Ports of InfiniBand and its relatives, as UCX calls them: mlx5_0:1."""
    return [
        f"{device}:{port}"
        for device in sorted(list_folder(folder))
        for port in sorted(list_folder(os.path.join(folder, device, "ports")))
    ]


def list_folder(folder: str | os.PathLike[str]) -> list[str]:
    """Names in a folder; none if it is not there."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def new_socket(address: str) -> socket.socket:
    """A TCP socket of the address's family."""
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)


def bind_within(address: str, ports: Sequence[int]) -> socket.socket | None:
    """A listener on the address at a free port within (first, last); None if there is none."""
    for port in range(ports[0], ports[1] + 1):
        listener = new_socket(address)
        try:
            listener.bind((address, port))
            listener.listen(1024)
            return listener
        except OSError:
            listener.close()
    return None


def free_port(address: str, ports: Sequence[int]) -> int:
    """A port that nobody listens on now, at any address of this host, for a program that will; 0 if there is none.

    Within (first, last) it is the highest: the lowest ones are those that the ranks take, one after the other. If any
    will do it is one that the system never chooses by itself, or a rank's own sockets could take it before the program.
    """
    candidates = list(range(ports[1], ports[0] - 1, -1)) if ports[1] else _ports_that_stay_free()
    anywhere = "::" if ":" in address else "0.0.0.0"
    for port in candidates:
        if listener := bind_within(anywhere, (port, port)):
            with listener:
                return listener.getsockname()[1]
    return 0


def _ports_that_stay_free() -> list[int]:
    first_chosen = first_port_chosen_by_system()
    never_chosen = range(first_chosen // 2, first_chosen)
    start = int.from_bytes(os.urandom(4), "little")
    return [*(never_chosen[(start + each) % len(never_chosen)] for each in range(64)), 0]


def first_port_chosen_by_system() -> int:
    """The lowest port that the kernel gives to a socket that asks for any; 32768 on most machines."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def connect_all(targets: Sequence[Target]) -> list[str]:
    """Tries to connect to each (address, port, nonce), many at once; for each "" if the right host answered, else why not."""
    return [
        answer for first in range(0, len(targets), AT_ONCE) for answer in connect_some(targets[first : first + AT_ONCE])
    ]


def connect_some(targets: Sequence[Target]) -> list[str]:
    """``connect_all`` for no more than there are descriptors."""
    attempts = Attempts(targets)
    while not attempts.have_ended():
        attempts.take(max(0.0, attempts.deadline - time.monotonic()))
    attempts.close()
    return attempts.results


class Attempts:
    """Connections to some targets, all at once.

    selector: of those that are under way, for whoever has it on a selector of its own. deadline: until when `take` is to be
    called, at the latest. results: as those of `connect_all`, once they are over.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        self.selector = selectors.DefaultSelector()
        self.results = ["no answer"] * len(targets)
        self._targets = targets
        for index, (address, port, _) in enumerate(targets):
            self._begin(index, address, port)
        self._awaits_large = 0
        self._heard()

    def have_ended(self) -> bool:
        """Whether all have been answered, or the time for it is over."""
        return not self.selector.get_map() or time.monotonic() >= self.deadline

    def close(self) -> None:
        """Keeps nothing open."""
        for key in list(self.selector.get_map().values()):
            self._end(key.fileobj)  # type: ignore[arg-type]
        self.selector.close()

    def take(self, seconds: float) -> None:
        """Takes the answers that come until then."""
        for key, _ in self.selector.select(seconds):
            before = self.results[key.data]
            self.results[key.data] = answer_of(key.fileobj, bytes.fromhex(self._targets[key.data][2]), before)  # type: ignore[arg-type]
            self._awaits_large += (self.results[key.data] == LOSES_LARGE) - (before == LOSES_LARGE)
            if self.results[key.data] != LOSES_LARGE:
                self._end(key.fileobj)  # type: ignore[arg-type]
            self._heard()

    def _begin(self, index: int, address: str, port: int) -> None:
        attempt = new_socket(address)
        attempt.setblocking(False)
        error = attempt.connect_ex((address, port))
        if error in (0, errno.EINPROGRESS):
            self.selector.register(attempt, selectors.EVENT_READ, index)
        else:
            self.results[index] = os.strerror(error)
            attempt.close()

    def _heard(self) -> None:
        """Another answer has come: the others have time again."""
        self.deadline = time.monotonic() + (SECONDS_FOR_LARGE if self._awaits_large else SECONDS_TO_CONNECT)

    def _end(self, attempt: socket.socket) -> None:
        self.selector.unregister(attempt)
        attempt.close()


def answer_of(connection: socket.socket, nonce: bytes, before: str) -> str:
    """What has come of a connection, after `before`: "" once the peer has sent this nonce and what was large behind it."""
    is_known = before == LOSES_LARGE
    try:
        answer = connection.recv(1 if is_known else NONCE_BYTES)
    except OSError as error:
        return os.strerror(error.errno or 0)
    if is_known:
        return ""
    return LOSES_LARGE if answer == nonce else "another host answered"
