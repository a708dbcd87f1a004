"""What `ringtrain doctor` makes of what was measured: what to change, and for how much gain. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringtrain.launch import links
from ringtrain.launch.examine import ring_rate
from ringtrain.launch.links import Finding, Way
from ringtrain.launch.modes import Expected, expect, first_that_pays

ACCUMULATED = 4  # micro-batches of the example
MOST_NAMED = 3  # hosts in a sentence on all of them


@dataclass(frozen=True)
class Advice:
    """Something to change: what, the seconds of communication a step before and after, and why."""

    change: str
    before: float
    after: float
    why: str


def rates_of(found: Mapping[str, Any], which: str) -> dict[Way, float]:
    """Bytes per second of each way between neighbours; which: "alone_rates" or "at_once_rates"."""
    return {
        way: rate
        for link in found["links"]
        for way, rate in zip((tuple(link["between"]), tuple(link["between"][::-1])), link[which], strict=True)
    }


def floor_seconds(found: Mapping[str, Any]) -> float:
    """No allreduce of the model can take less: the wire's time, or that of one copy on a single host.

    An allreduce that took less has shown that the slowest link carries more than was measured while its hosts were
    busy.
    """
    count, model = len(found["hosts"]), found["model_bytes"]
    if not found["links"]:
        return model / found["hosts"][0]["copy_rate"]
    reached = [
        seconds for name, seconds in found["allreduce_seconds"].items() if name != "fp16"
    ]  # which sends half of it
    return min(2 * (count - 1) / count * model / ring_rate(found["links"]), *reached)


def advise(found: Mapping[str, Any]) -> list[Advice]:
    """What would shorten the communication of a step, the largest gain first."""
    now = found["allreduce_seconds"]
    if not found["links"]:
        return []
    seconds = now["float32"]
    advice = [
        Advice(
            f"accumulate {ACCUMULATED} micro-batches (backward_passes_per_step={ACCUMULATED})",
            seconds,
            seconds / ACCUMULATED,
            f"per micro-batch; exact, for a batch {ACCUMULATED} times larger",
        )
    ]
    if now["fp16"] < 0.9 * seconds:
        advice.append(
            Advice("send 16 bits between hosts (compression=Compression.fp16)", seconds, now["fp16"], "measured")
        )
    advice += _advise_of_slow_ways(found, seconds) + _advise_of_all_at_once(found, seconds)
    fastest_way = max(rates_of(found, "alone_rates").values())
    nominal = min(max(host["interface_mbit"].values(), default=0) for host in found["hosts"])
    is_near = min(link["latency_seconds"] for link in found["links"]) < links.LONG  # else what is between decides
    if is_near and nominal * 1e6 / 8 > 2 * fastest_way:
        fastest = {host["name"]: _fastest_interface(host) for host in found["hosts"]}
        listed = ", ".join(f"{name} of {host}" for host, name in list(fastest.items())[:MOST_NAMED])
        listed += f" and {len(fastest) - MOST_NAMED} others" if len(fastest) > MOST_NAMED else ""
        is_used = all(fastest[host["name"]] in host.get("interfaces_in_use", ()) for host in found["hosts"])
        advice.append(
            Advice(
                f"find out what slows the interfaces down ({listed})"
                if is_used
                else f"use the faster interface (--network-interfaces): {listed}",
                seconds,
                seconds * fastest_way / (nominal * 1e6 / 8),
                f"every host has one of {nominal} Mbit/s, but only {mbit(fastest_way)} were measured"
                + (
                    ": a switch, a cable, other traffic, or a virtual interface, which names any rate"
                    if is_used
                    else ""
                ),
            )
        )
    alone = now.get("one_rank_a_host")
    if alone is not None and alone < 0.85 * seconds:
        advice.append(
            Advice(
                "start one rank on each host", seconds, alone, "measured; the hosts have too few cores for their ranks"
            )
        )
    return sorted(advice, key=lambda each: each.after)


def _advise_of_slow_ways(found: Mapping[str, Any], seconds: float) -> list[Advice]:
    """What carries much less than other links do, each with nothing beside it; but for the lines between sites."""
    alone, site_of = rates_of(found, "alone_rates"), [host["site"] for host in found["hosts"]]
    fastest = max(alone.values())
    slow = [way for way in links.slow_ways(alone) if len({site_of[place] for place in way}) == 1]
    return [
        Advice(
            _change(found, finding),
            seconds,
            _seconds_without(found, finding.ways, fastest, seconds),
            _why(found, finding),
        )
        for finding in links.explain(slow, alone)
    ]


def _seconds_without(found: Mapping[str, Any], ways: Sequence[Way], rate: float, seconds: float) -> float:
    """Of an allreduce if these ways carried so much, and the others back what they carry alone: while what confirms their
    bytes waits behind other bytes on a slow way, they are slow, too."""
    alone, at_once = rates_of(found, "alone_rates"), rates_of(found, "at_once_rates")
    better = at_once | {way[::-1]: max(alone[way[::-1]], at_once[way[::-1]]) for way in ways}
    better |= {way: max(rate, at_once[way]) for way in ways}
    ring = min(better[way] for way in links.forward(len(found["hosts"])))
    return seconds * ring_rate(found["links"]) / ring


def _advise_of_all_at_once(found: Mapping[str, Any], seconds: float) -> list[Advice]:
    """What carries less once all hosts send, as in an allreduce."""
    alone, at_once = rates_of(found, "alone_rates"), rates_of(found, "at_once_rates")
    hosts = len(found["hosts"])
    held = links.held_back(alone, at_once, links.slow_ways(alone))
    if not held:
        return []
    slowest = min(held, key=lambda way: at_once[way])
    rates = f"{mbit(alone[slowest])} one way, but only {mbit(at_once[slowest])} each way at once"
    half_duplex = links.half_duplex(held, hosts)
    after = _seconds_without(found, held, alone[slowest], seconds)
    if hosts == 2 or half_duplex:
        where = names_of(found, (0, 1)) if hosts == 2 else _listed(found, half_duplex)
        change = f"make the link {'between' if hosts == 2 else 'of'} {where} carry both directions at once"
        return [Advice(change, seconds, after, f"it carries {rates}: half duplex, a hub, or a busy core")]
    rates = f"{mbit(alone[slowest])} alone, but only {mbit(at_once[slowest])} while all hosts send"
    if len(held) > hosts // 2:
        shared = "they share a switch, an uplink or, on one machine, its cores"
        return [Advice("find out what the links share", seconds, after, f"one carries {rates}: {shared}")]
    listed = ", ".join(_from_to(found, way) for way in held)
    return [Advice(f"find out what shares the way {listed}", seconds, after, f"it carries {rates}")]


def wants_sites(found: Mapping[str, Any]) -> bool:
    """Whether some hosts are far from others, and some near, and nobody has said which."""
    latencies = [link["latency_seconds"] for link in found["links"]]
    is_mixed = any(each < links.LONG for each in latencies) and any(each >= links.LONG for each in latencies)
    return is_mixed and not any(host["site"] for host in found["hosts"])


def _fastest_interface(host: Mapping[str, Any]) -> str:
    """One in use, if several have that rate."""
    used, rates = host.get("interfaces_in_use", ()), host["interface_mbit"]
    return max(rates, key=lambda name: (rates[name], name in used))


def modes(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What to expect of each mode of sending, for batches of ``computing_seconds``; one of them ``pays_first``."""
    computing = found["computing_seconds"]
    if not found["links"]:
        return []
    expected = expect(
        found["model_bytes"],
        len(found["hosts"]),
        computing,
        found["allreduce_seconds"]["float32"],
        statistics.median(link["latency_seconds"] for link in found["links"]),
        {name: each * found["model_bytes"] for name, each in found["codec_seconds_per_byte"].items()},
    )
    best = first_that_pays(expected, computing)
    return [_as_finding(each, computing) | {"pays_first": each is best} for each in expected]


def _as_finding(each: Expected, computing: float) -> dict[str, Any]:
    return {
        "mode": each.mode.name, "bytes_sent": each.bytes_sent, "sending_seconds": each.sending_seconds,
        "codec_seconds": each.codec_seconds, "batch_seconds": each.batch_seconds,
        "of_computing": each.batch_seconds / computing, "how": each.mode.how, "risk": each.mode.risk,
    }  # fmt: skip


def _change(found: Mapping[str, Any], finding: Finding) -> str:
    """What to look at."""
    if finding.what == "link":
        return f"check the link between {names_of(found, finding.hosts)}"
    if finding.what == "way":
        return f"check the way {_from_to(found, finding.hosts)}"
    host = f"host {names_of(found, finding.hosts)}"
    if finding.what == "host":
        return f"find out what slows {host} down, in both directions"
    return f"find out what slows down what {host} {finding.what}"


def _why(found: Mapping[str, Any], finding: Finding) -> str:
    """What was measured, and of what that may come."""
    alone, name = rates_of(found, "alone_rates"), lambda place: found["hosts"][place]["name"]
    fastest = mbit(max(alone.values()))
    if finding.what in ("link", "way"):
        back = f", the other way {mbit(alone[finding.ways[0][::-1]])}" if finding.what == "way" else ""
        others = "" if len(found["hosts"]) == 2 else f", another link {fastest}: a ring is as fast as its slowest link"
        return f"{mbit(min(alone[way] for way in finding.ways))}{back}{others}"
    host = finding.hosts[0]
    sent = ", ".join(f"{mbit(rate)} to {name(end)}" for (start, end), rate in alone.items() if start == host)
    received = ", ".join(f"{mbit(rate)} from {name(start)}" for (start, end), rate in alone.items() if end == host)
    return f"{sent}; {received}; another link {fastest}: its port, its cable, a limit on its traffic, or a busy core"


def names_of(found: Mapping[str, Any], places: Sequence[int], between: str = " and ") -> str:
    return between.join(found["hosts"][place]["name"] for place in places)


def _listed(found: Mapping[str, Any], places: Sequence[int]) -> str:
    return f"host{'s' if len(places) > 1 else ''} {names_of(found, places, ', ')}"


def _from_to(found: Mapping[str, Any], way: Sequence[int]) -> str:
    return "from {} to {}".format(*(found["hosts"][place]["name"] for place in way))


def mbit(bytes_per_second: float) -> str:
    return f"{bytes_per_second * 8e-6:.0f} Mbit/s"
