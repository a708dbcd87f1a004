"""Which networks the hosts of a job share, decided from a connection test; pure. Used by `preflight`.

Not by name: interfaces are called differently on each host, and one such as docker0 has the same address everywhere and
leads nowhere. Each agent listens on all its addresses and tries those of all the others; see `agent.Networks`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Address:
    """An address of one host, on which its agent listens."""

    interface: str
    address: str
    prefix: int
    port: int

    @property
    def network(self) -> str:
        """The network it belongs to, such as 10.0.0.0/24."""
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False))

    def is_named_by(self, wanted: Sequence[str]) -> bool:
        """Whether some of the names is its interface, or a network that contains it."""
        return any(name == self.interface or "/" in name and
                   ipaddress.ip_address(self.address) in ipaddress.ip_network(name, strict=False) for name in wanted)


@dataclass(frozen=True)
class Chosen:
    """What carries the tensors: networks, and each host's interfaces to them, by its name."""

    networks: tuple[str, ...]
    interfaces: Mapping[str, tuple[str, ...]]


# (from, to, address) -> "" if the host `from` reached the host `to` at the address, else why not
Reached = Mapping[tuple[str, str, str], str]


def choose(addresses: Mapping[str, Sequence[Address]], reached: Reached) -> Chosen | str:
    """The networks over which every host reaches every other, or a sentence that says who cannot reach whom.

    Networks in which all hosts have an address come first, all of them, so that several links are used; without one,
    all addresses that are reached from everywhere, as between routed networks.
    """
    useful = {host: [address for address in own if _is_reached_by_all(host, address, addresses, reached)]
              for host, own in addresses.items()}
    lonely = [host for host, own in useful.items() if not own]
    if lonely:
        return _explain(lonely[0], addresses, reached)
    common = set.intersection(*({address.network for address in own} for own in useful.values()))
    kept = {host: [address for address in own if not common or address.network in common]
            for host, own in useful.items()}
    networks = sorted({address.network for own in kept.values() for address in own})
    return Chosen(tuple(networks), {host: tuple(sorted({address.interface for address in own}))
                                    for host, own in kept.items()})


def _is_reached_by_all(host: str, address: Address, addresses: Mapping[str, object], reached: Reached) -> bool:
    return all(reached[other, host, address.address] == "" for other in addresses if other != host)


def _explain(host: str, addresses: Mapping[str, Sequence[Address]], reached: Reached) -> str:
    if not addresses[host]:
        return (f"host '{host}': it must have a network interface with an IPv4 address that --network-interfaces allows, "
                "but has none.")
    tried = []
    for address in addresses[host]:
        other, why = next((other, reached[other, host, address.address]) for other in addresses
                          if other != host and reached[other, host, address.address])
        tried.append(f"from {other} at {address.address} ({address.interface}): {why}")
        blocked = other, address.address
    return (f"host '{host}': every other host must reach it, but none of its IPv4 addresses answers to all: "
            f"{'; '.join(tried)}. Open the firewall between them (--port-range names the ports), or name the right "
            f"interface with --network-interfaces. To see it: ssh {blocked[0]} ping -c 1 {blocked[1]}")
