"""`ringtrain doctor`: what hosts and links can do, what ringtrain makes of it, and what to change for how much gain.

`examine` measures on the ranks; here are the command, the report and the advice, which is a pure function.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ringtrain.launch import links, progress
from ringtrain.launch.examine import examine, ring_rate
from ringtrain.launch.function import RunError, run
from ringtrain.launch.hosts import HostsError, parse_hostfile, parse_hosts
from ringtrain.launch.links import Finding, Way
from ringtrain.launch.modes import (
    LATE_INT8,
    LITTLE,
    STREAMING,
    Expected,
    expect,
    first_that_pays,
    streaming_batch_seconds,
)
from ringtrain.launch.settings import once

ACCUMULATED = 4  # micro-batches of the example
SHARE_OF_FLOOR = 0.9  # below it, something is wrong
MOST_NAMED = 3  # hosts in a sentence on all of them
MOST_LINKS_SHOWN = 16  # the slowest; of the others how fast they are


@dataclass(frozen=True)
class Advice:
    """Something to change: what, the seconds of communication a step before and after, and why."""

    change: str
    before: float
    after: float
    why: str


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "-H",
    "--hosts",
    multiple=True,
    callback=once,
    help="hosts and ranks on each, such as node-a:2,node-b:2 (default: 2 ranks here)",
)
@click.option("-hostfile", "--hostfile", multiple=True, callback=once, help="hosts and ranks on each, from a file")
@click.option(
    "--model-mb",
    type=click.FloatRange(min=0.001),
    default=100.0,
    show_default=True,
    help="bytes of all gradients of the model, in MB (float32: 4 for each parameter)",
)
@click.option(
    "--step-ms",
    type=click.FloatRange(min=0.001),
    help="what a batch takes on one host, which sends nothing, in ms: says which mode of sending pays",
)
@click.option("--ssh-port", type=int)
@click.option("--ssh-identity-file")
@click.option("--network-interfaces", help="as for ringtrainrun")
@click.option("--json", "written", type=click.Path(dir_okay=False), help="also writes the findings to this file")
def doctor(
    hosts: str | None, hostfile: str | None, model_mb: float, step_ms: float | None, written: str | None, **flags: Any
) -> None:
    """Examines hosts and the links between them; mostly takes less than 20 seconds."""
    try:
        listed = (
            parse_hostfile(Path(hostfile).read_text(), hostfile) if hostfile else parse_hosts(hosts) if hosts else []
        )
    except (HostsError, OSError) as error:
        raise click.UsageError(str(error)) from None
    environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    try:
        found = run(
            examine,
            (int(model_mb * 1e6),),
            np=sum(host.slots for host in listed) or 2,
            env=environment | progress.for_ranks(),
            hosts=",".join(map(str, listed)) or None,
            share_gpus=True,
            **flags,
        )[0]
    except RunError as error:  # the launcher has said why
        sys.exit(error.code or 1)
    found["floor_seconds"] = floor_seconds(found)
    found["advice"] = [vars(advice) for advice in advise(found)]
    if step_ms is not None:
        found["computing_seconds"] = step_ms / 1e3
        found["modes"] = modes(found)
    click.echo("\n".join(report(found)))
    if written:
        try:
            Path(written).write_text(json.dumps(found, indent=1) + "\n")
        except OSError as error:
            raise click.ClickException(
                f"--json '{written}': it must be a file that can be written, but: {error.strerror}."
            ) from None


# ---- judging, pure ----


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
    if nominal * 1e6 / 8 > 2 * fastest_way:
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
                f"every host has one of {nominal} Mbit/s, but only {_mbit(fastest_way)} were measured"
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
    """What carries much less than other links do, each with nothing beside it."""
    alone = rates_of(found, "alone_rates")
    fastest = max(alone.values())
    return [
        Advice(
            _change(found, finding),
            seconds,
            _seconds_without(found, finding.ways, fastest, seconds),
            _why(found, finding),
        )
        for finding in links.explain(links.slow_ways(alone), alone)
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
    rates = f"{_mbit(alone[slowest])} one way, but only {_mbit(at_once[slowest])} each way at once"
    half_duplex = links.half_duplex(held, hosts)
    after = _seconds_without(found, held, alone[slowest], seconds)
    if hosts == 2 or half_duplex:
        where = _names(found, (0, 1)) if hosts == 2 else _listed(found, half_duplex)
        change = f"make the link {'between' if hosts == 2 else 'of'} {where} carry both directions at once"
        return [Advice(change, seconds, after, f"it carries {rates}: half duplex, a hub, or a busy core")]
    rates = f"{_mbit(alone[slowest])} alone, but only {_mbit(at_once[slowest])} while all hosts send"
    if len(held) > hosts // 2:
        shared = "they share a switch, an uplink or, on one machine, its cores"
        return [Advice("find out what the links share", seconds, after, f"one carries {rates}: {shared}")]
    listed = ", ".join(_from_to(found, way) for way in held)
    return [Advice(f"find out what shares the way {listed}", seconds, after, f"it carries {rates}")]


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


# ---- saying ----


def report(found: Mapping[str, Any]) -> list[str]:
    """The findings for a person."""
    hosts, megabytes = found["hosts"], found["model_bytes"] / 1e6
    lines = [f"{len(hosts)} host{'s' * (len(hosts) > 1)}, {found['ranks']} rank{'s' * (found['ranks'] > 1)}"]
    lines += table(
        ["host", "ranks", "cores", "Python", "ringtrain", "MPI", "torch", "TensorFlow", "CUDA", "copy", "add"],
        [_host_row(host) for host in hosts],
    )
    if found["links"]:
        lines += ["", *_report_of_links(found)]
    floor, now = found["floor_seconds"], found["allreduce_seconds"]
    lines += [
        "",
        f"allreduce of {megabytes:g} MB of gradients; the floor is {_ms(floor)} "
        f"({'the slowest link' if found['links'] else 'one copy of them'})",
    ]
    if found["measured_bytes"] < found["model_bytes"]:
        part = found["measured_bytes"] / 1e6
        lines.append(f"(measured with {part:.{0 if part >= 1 else 2}f} MB of them)")
    labels = {"float32": "as it is", "fp16": "16 bits between hosts", "one_rank_a_host": "one rank on each host"}
    # Half of the bytes, and not all of them go around the ring.
    floors = {"fp16": min(floor / 2, now["fp16"])} if "fp16" in now else {}
    lines += table(
        ["", "time", "of its floor"],
        [[labels[name], _ms(taken), f"{100 * floors.get(name, floor) / taken:.0f} %"] for name, taken in now.items()],
    )
    lines.append("")
    if found["links"] and floor / now["float32"] < SHARE_OF_FLOOR:
        lines.append(
            f"ringtrain uses only {100 * floor / now['float32']:.0f} % of the slowest link: are other jobs running "
            "on these hosts, or do they have fewer cores than ranks?"
        )
    lines += [
        f"- {each['change']}: {_ms(each['before'])} -> {_ms(each['after'])} ({each['why']})" for each in found["advice"]
    ]
    if not found["advice"]:
        return [*lines, "Nothing to change for the network: one host uses none."]
    return [*lines, "", *_report_of_modes(found)]


def _report_of_links(found: Mapping[str, Any]) -> list[str]:
    by = "MPI" if found["transport"] == "mpi" else "TCP"
    shown = sorted(found["links"], key=lambda link: min(link["at_once_rates"] + link["alone_rates"]))
    shown = [link for link in found["links"] if link in shown[:MOST_LINKS_SHOWN]]
    lines = [f"links of the ring, measured through {by}; in an allreduce all hosts send at once, to the next one"]
    lines += table(
        ["from, to", "latency", "alone", "back", "all at once", "back"],
        [
            [
                _names(found, link["between"], ", "),
                f"{link['latency_seconds'] * 1e6:.0f} us",
                *(_mbit(rate) for rate in link["alone_rates"] + link["at_once_rates"]),
            ]
            for link in shown
        ],
    )
    if 2 * len(found["links"]) > links.MOST_ALONE:
        lines.append("(alone: ways between different hosts at a time, the slowest once more by themselves)")
    if len(shown) < len(found["links"]):
        others = [rate for link in found["links"] if link not in shown for rate in link["at_once_rates"]]
        lines.append(
            f"{len(found['links']) - len(shown)} others: {_mbit(min(others))} to {_mbit(max(others))} all at once"
        )
    return lines


_POWERSGD = (
    "not calculated: compression=Compression.powersgd(rank=2), which sends large matrices as two thin ones, 100 times "
    "smaller or more, takes a core some 2 s for each GB, and risks more than int4: compare the loss"
)


def _report_of_modes(found: Mapping[str, Any]) -> list[str]:
    if "modes" not in found:
        return ["Which mode of sending pays: --step-ms, what a batch takes on one host, lets this say it."]
    lines = [f"what to expect of a batch that takes {_ms(found['computing_seconds'])} to compute, with a core to send"]
    lines += table(
        ["mode", "a host sends", "exchange", "codec", "batch", "/ computing", "risk"],
        [
            [
                each["mode"],
                f"{each['bytes_sent'] / 1e6:.1f} MB",
                _ms(each["sending_seconds"]),
                _ms(each["codec_seconds"]),
                _ms(each["batch_seconds"]),
                f"{each['of_computing']:.2f}",
                each["risk"],
            ]
            for each in found["modes"]
        ],
    )
    best = next(each for each in found["modes"] if each["pays_first"])
    return [*lines, _POWERSGD, _late_int8(found), _streaming(found), _verdict(best)]


def _late_int8(found: Mapping[str, Any]) -> str:
    int8 = next(each for each in found["modes"] if each["mode"] == "int8")
    seconds = LATE_INT8.batch_seconds(found["computing_seconds"], int8["sending_seconds"])
    return f"not in the table: {LATE_INT8.how}: {_ms(seconds)} for a batch; {LATE_INT8.risk}"


def _streaming(found: Mapping[str, Any]) -> str:
    exact = next(each for each in found["modes"] if each["mode"] == "float32")
    seconds = streaming_batch_seconds(found["computing_seconds"], exact["sending_seconds"], **STREAMING)
    arguments = ", ".join(f"{name}={value}" for name, value in STREAMING.items())
    return (
        f"not in the table: LocalSteps({arguments}), whose parts travel while training goes on: {_ms(seconds)} for a batch; another "
        "algorithm: compare the loss"
    )


def _verdict(best: Mapping[str, Any]) -> str:
    if not best["how"]:
        return "The network costs little as it is: send float32."
    if best["of_computing"] <= LITTLE:
        return f"{best['mode']} pays first ({best['how']}): of what costs little time, it risks least."
    return (
        f"{best['mode']} is the fastest ({best['how']}), and still {best['of_computing']:.1f} times as long as computing: "
        "exchange less often still, with larger batches or longer periods of local steps."
    )


def _host_row(host: Mapping[str, Any]) -> list[str]:
    devices, libraries = host["cuda_devices_of_torch"], host["gpu_libraries"]
    found = [f"{name} {version}" if version else f"no {name}" for name, (version, _) in libraries.items()]
    found += ["MPI reports that it is CUDA-aware"] if host["mpi_is_cuda_aware"] else []
    cuda = ", ".join(([] if devices is None else [f"{devices} GPUs for torch"]) + found) if libraries else "none"
    return [host["name"], str(host["ranks"]), str(host["cores"]), host["python"], host["ringtrain"], host["mpi"],
            host["torch"], host["tensorflow"], cuda, f"{host['copy_rate'] * 1e-9:.1f} GB/s",
            f"{host['add_rate'] * 1e-9:.1f} GB/s"]  # fmt: skip


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns."""
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [headings, *rows]
    ]


def _change(found: Mapping[str, Any], finding: Finding) -> str:
    """What to look at."""
    if finding.what == "link":
        return f"check the link between {_names(found, finding.hosts)}"
    if finding.what == "way":
        return f"check the way {_from_to(found, finding.hosts)}"
    host = f"host {_names(found, finding.hosts)}"
    if finding.what == "host":
        return f"find out what slows {host} down, in both directions"
    return f"find out what slows down what {host} {finding.what}"


def _why(found: Mapping[str, Any], finding: Finding) -> str:
    """What was measured, and of what that may come."""
    alone, name = rates_of(found, "alone_rates"), lambda place: found["hosts"][place]["name"]
    fastest = _mbit(max(alone.values()))
    if finding.what in ("link", "way"):
        back = f", the other way {_mbit(alone[finding.ways[0][::-1]])}" if finding.what == "way" else ""
        others = "" if len(found["hosts"]) == 2 else f", another link {fastest}: a ring is as fast as its slowest link"
        return f"{_mbit(min(alone[way] for way in finding.ways))}{back}{others}"
    host = finding.hosts[0]
    sent = ", ".join(f"{_mbit(rate)} to {name(end)}" for (start, end), rate in alone.items() if start == host)
    received = ", ".join(f"{_mbit(rate)} from {name(start)}" for (start, end), rate in alone.items() if end == host)
    return f"{sent}; {received}; another link {fastest}: its port, its cable, a limit on its traffic, or a busy core"


def _names(found: Mapping[str, Any], places: Sequence[int], between: str = " and ") -> str:
    return between.join(found["hosts"][place]["name"] for place in places)


def _listed(found: Mapping[str, Any], places: Sequence[int]) -> str:
    return f"host{'s' if len(places) > 1 else ''} {_names(found, places, ', ')}"


def _from_to(found: Mapping[str, Any], way: Sequence[int]) -> str:
    return "from {} to {}".format(*(found["hosts"][place]["name"] for place in way))


def _mbit(bytes_per_second: float) -> str:
    return f"{bytes_per_second * 8e-6:.0f} Mbit/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
