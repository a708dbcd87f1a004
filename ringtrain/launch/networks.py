"""Which networks the hosts of a job share, decided from a connection test; pure. Used by `preflight`.

Not by name: interfaces are called differently on each host, and one such as docker0 has the same address everywhere and
leads nowhere. Each agent listens on all its addresses and tries those of others; see `agent.Networks`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ringtrain.launch.agent.host_networks import LOSES_LARGE


@dataclass(frozen=True)
class HostAddress:
    """An address of one host, on which its agent listens. mtu: of its interface."""

    interface: str
    address: str
    prefix: int
    port: int
    mtu: int = 1500

    @property
    def version(self) -> int:
        """4 or 6."""
        return ipaddress.ip_address(self.address).version

    @property
    def network(self) -> str:
        """The network it belongs to, such as 10.0.0.0/24."""
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False))


@dataclass(frozen=True)
class Chosen:
    """What carries the tensors: networks, and each host's interfaces to them, by its name.

    addresses: those of each host in these networks, in their order. rdma_ports: each host's ports of InfiniBand.
    left_out: sentences on networks that would serve if large packets arrived.
    """

    networks: tuple[str, ...]
    interfaces: Mapping[str, tuple[str, ...]]
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rdma_ports: Mapping[str, Sequence[str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def is_ipv6(self) -> bool:
        """Whether they are networks of IPv6, which are chosen only where none of IPv4 will do."""
        return is_ipv6(self.networks)


def is_ipv6(networks: Sequence[str]) -> bool:
    """Whether networks such as fd00:1::/64 are those of IPv6; all are of one version."""
    return any(":" in network for network in networks)


def names_loopback(interfaces: Sequence[str]) -> bool:
    """Whether --network-interfaces names the loopback, or a network of it, over which the ranks of one host may talk."""
    return any(
        name == "lo" or ("/" in name and ipaddress.ip_network(name, strict=False).is_loopback) for name in interfaces
    )


MOST_THAT_ALL_CALL = 8  # hosts of which each calls all others

# (from, to, address) -> "" if the host `from` reached the host `to` at the address, else why not; of those that were tried
Reached = Mapping[tuple[str, str, str], str]
Way = tuple[str, str, HostAddress]  # who calls, who is called, and where


def callees(hosts: Sequence[str], news: Collection[str] = ()) -> dict[str, list[str]]:
    """Whom each host calls in a test: all others; of many hosts those that are 1, 2, 4, ... places further, and the first.

    So the hosts of any part of them call the rest and are called, in connections that grow as N log N. All ranks call the first
    host when they meet, and their neighbour in rings.

    news: hosts that come to the others, which have been tested: calls between those are left out.
    """
    count = len(hosts)
    steps = range(1, count) if count <= MOST_THAT_ALL_CALL else [1 << each for each in range((count - 1).bit_length())]
    called = {}
    for place, host in enumerate(hosts):
        own = dict.fromkeys([*(hosts[(place + step) % count] for step in steps), hosts[0]])
        called[host] = [each for each in own if each != host and (not news or host in news or each in news)]
    return called


def choose(
    addresses: Mapping[str, Sequence[HostAddress]],
    reached: Reached,
    others: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Chosen | str:
    """The networks over which every host reaches every other, or a sentence that says who cannot reach whom.

    others: addresses of each host that may not be used, for people.

    Those of IPv4 if there are any, else those of IPv6. Networks in which all hosts have an address come first, all of
    them, so that several links are used; without one, all addresses that are reached from everywhere, as between routed
    networks.
    """
    useful = {
        host: [address for address in own if _is_reached_by_all(host, address, addresses, reached)]
        for host, own in addresses.items()
    }
    for version in (4, 6):
        of_version = {host: [address for address in own if address.version == version] for host, own in useful.items()}
        if all(of_version.values()):
            shared = _shared(of_version)
            return replace(shared, left_out=_lossy(addresses, reached, shared.networks))
    lonely = [host for host, own in useful.items() if not own]
    if not lonely:
        return _explain_versions(useful)
    host = max(lonely, key=lambda host: _ways_lost(host, addresses, reached))  # the first of equals
    losing = [each for each in _losing(addresses, reached) if host in each[:2]]
    if not addresses[host]:
        return _explain_none(host, others.get(host, ()))
    return _explain_large(losing) if losing else _explain(host, addresses, reached)


def _shared(useful: Mapping[str, Sequence[HostAddress]]) -> Chosen:
    """All networks that are shared, of which each leads over a cable that no other before it does on all its hosts."""
    common = set.intersection(*({address.network for address in own} for own in useful.values()))
    networks: list[str] = []
    interfaces: dict[str, set[str]] = {host: set() for host in useful}
    for network in sorted(common or {address.network for own in useful.values() for address in own}):
        its = {
            host: {address.interface for address in own if address.network == network} for host, own in useful.items()
        }
        if any(its[host] - interfaces[host] for host in useful):
            networks.append(network)
            interfaces = {host: names | its[host] for host, names in interfaces.items()}
    addresses = {
        host: tuple(address.address for network in networks for address in own if address.network == network)
        for host, own in useful.items()
    }
    return Chosen(tuple(networks), {host: tuple(sorted(names)) for host, names in interfaces.items()}, addresses)


def _is_reached_by_all(host: str, address: HostAddress, addresses: Mapping[str, object], reached: Reached) -> bool:
    return all(reached.get((other, host, address.address), "") == "" for other in addresses if other != host)


def _ways_lost(host: str, addresses: Mapping[str, Sequence[HostAddress]], reached: Reached) -> int:
    """How many ways between this host and another there are none of, each direction counted."""

    def is_lost(one: str, other: str) -> bool:
        return not any(reached.get((one, other, address.address), "") == "" for address in addresses[other])

    return sum(is_lost(one, other) for pair in addresses if pair != host for one, other in ((pair, host), (host, pair)))


# ---- large packets ----


def _losing(addresses: Mapping[str, Sequence[HostAddress]], reached: Reached) -> list[Way]:
    """Wherever small packets pass and large ones do not."""
    return [
        (one, other, address)
        for other, own in addresses.items()
        for address in own
        for one in addresses
        if one != other and reached.get((one, other, address.address)) == LOSES_LARGE
    ]


def _subject(losing: Sequence[Way]) -> str:
    """The host that has part in all of it, or else all that have a part."""
    pairs = [{one, other} for one, other, _ in losing]
    common = set.intersection(*pairs)
    hosts = common if len(common) == 1 else set.union(*pairs)
    return f"host '{common.pop()}'" if len(common) == 1 else f"hosts '{','.join(sorted(hosts))}'"


def _lossy(
    addresses: Mapping[str, Sequence[HostAddress]], reached: Reached, networks: Sequence[str]
) -> tuple[str, ...]:
    """A sentence for each network that is not among those chosen because large packets are lost there."""
    losing = _losing(addresses, reached)
    lossy = sorted({address.network for *_, address in losing} - set(networks))
    return tuple(
        f"network {network} is left out, because of {_subject([each for each in losing if each[2].network == network])}: "
        f"{LOSES_LARGE}."
        for network in lossy
    )


# ---- what is said ----


def _explain_large(losing: Sequence[Way]) -> str:
    caller, called, address = losing[0]
    size = address.mtu - (28 if address.version == 4 else 48)  # without the headers of ping's packets
    return (
        f"{_subject(losing)}: packets of {address.mtu} bytes, as its interface allows, must pass to and from every other "
        f"host, but {LOSES_LARGE} (from {called} at {address.address} ({address.interface}) to {caller}). What is between, "
        "such as a tunnel or a VPN, carries smaller ones, and its ICMP message that says so is lost. Lower the MTU of "
        f"the interfaces (ip link set dev {address.interface} mtu 1400, or less), or let ICMP through. "
        f"To see it: ssh {caller} ping -c 1 -M do -s {size} {address.address}"
    )


def _explain_none(host: str, others: Sequence[str]) -> str:
    return (
        f"host '{host}': it must have a network interface with an address that --network-interfaces allows, and a free port, "
        f"but has {', '.join(others) or 'no interface that is up'}. Name one that all hosts have, or a network: "
        "--network-interfaces 10.0.0.0/24."
    )


def _explain(host: str, addresses: Mapping[str, Sequence[HostAddress]], reached: Reached) -> str:
    failed = [
        next((other, address) for other in addresses if other != host and reached.get((other, host, address.address)))
        for address in addresses[host]
    ]
    # An address that the caller has itself, as each host has that of docker0, leads nowhere and says nothing.
    failed = [way for way in failed if not _has(addresses[way[0]], way[1])] or failed
    tried = [
        f"from {other} at {address.address} ({address.interface}): {reached[other, host, address.address]}"
        for other, address in failed
    ]
    caller, called = next((way for way in failed if _is_near(addresses[way[0]], way[1])), failed[0])
    return (
        f"host '{host}': every other host must reach it, but none of its addresses answers to all: "
        f"{'; '.join(tried)}. Open the firewall between them (--port-range names the ports), or name the right "
        f"interface with --network-interfaces. To see it: ssh {caller} ping -c 1 {called.address}"
    )


def _has(own: Sequence[HostAddress], address: HostAddress) -> bool:
    return any(each.address == address.address for each in own)


def _is_near(own: Sequence[HostAddress], address: HostAddress) -> bool:
    """Whether one of these addresses is in the network of the other."""
    return any(each.network == address.network for each in own)


def _explain_versions(useful: Mapping[str, Sequence[HostAddress]]) -> str:
    listed = "; ".join(f"{host}: {', '.join(address.address for address in own)}" for host, own in useful.items())
    return (
        f"hosts '{','.join(useful)}': all must have an IPv4 address that the others reach, or all an IPv6 address, but "
        f"some have only the one and some the other ({listed}). Give all of them addresses of one kind."
    )
