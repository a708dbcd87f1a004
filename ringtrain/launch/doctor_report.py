"""The findings of `ringtrain doctor` for a person. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringtrain.launch import links
from ringtrain.launch.doctor_advice import mbit, names_of, wants_sites
from ringtrain.launch.modes import LATE_INT8, LITTLE, STREAMING, streaming_batch_seconds

SHARE_OF_FLOOR = 0.9  # below it, something is wrong
MOST_LINKS_SHOWN = 16  # the slowest; of the others how fast they are


def report(found: Mapping[str, Any]) -> list[str]:
    """The findings for a person."""
    hosts, megabytes = found["hosts"], found["model_bytes"] / 1e6
    lines = [f"{len(hosts)} host{'s' * (len(hosts) > 1)}, {found['ranks']} rank{'s' * (found['ranks'] > 1)}"]
    lines += table(
        ["host", "ranks", "cores", "Python", "ringtrain", "MPI", "torch", "TensorFlow", "CUDA", "copy", "add"],
        [_host_row(host) for host in hosts],
    )
    if any(host["site"] for host in found["hosts"]):
        lines.append(f"sites: {_report_of_sites(found['hosts'])}")
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
        longest = 2 * max(link["latency_seconds"] for link in found["links"])
        lines.append(
            f"ringtrain uses only {100 * floor / now['float32']:.0f} % of the slowest link: "
            + (
                f"a round trip takes {_ms(longest)}, and each loss some more (docs/long-lines.md)."
                if longest >= 2 * links.LONG
                else "are other jobs running on these hosts, or do they have fewer cores than ranks?"
            )
        )
    if wants_sites(found):
        lines.append(
            "Some hosts are far from others, and some near: name their sites (site= in a host file), so that sums cross "
            "the long lines once (docs/long-lines.md)."
        )
    lines += [
        f"- {each['change']}: {_ms(each['before'])} -> {_ms(each['after'])} ({each['why']})" for each in found["advice"]
    ]
    if not found["advice"]:
        return [*lines, "Nothing to change for the network: one host uses none."]
    return [*lines, "", *_report_of_modes(found)]


def _report_of_sites(hosts: Sequence[Mapping[str, Any]]) -> str:
    """Which hosts are at each, in the order of their first ones."""
    names = {host["site"]: [each["name"] for each in hosts if each["site"] == host["site"]] for host in hosts}
    return ", ".join(f"{site or 'none'} ({', '.join(listed)})" for site, listed in names.items())


def _report_of_links(found: Mapping[str, Any]) -> list[str]:
    by = "MPI" if found["transport"] == "mpi" else "TCP"
    shown = sorted(found["links"], key=lambda link: min(link["at_once_rates"] + link["alone_rates"]))
    shown = [link for link in found["links"] if link in shown[:MOST_LINKS_SHOWN]]
    lines = [f"links of the ring, measured through {by}; in an allreduce all hosts send at once, to the next one"]
    lines += table(
        ["from, to", "latency", "alone", "back", "all at once", "back"],
        [
            [
                names_of(found, link["between"], ", "),
                f"{link['latency_seconds'] * 1e6:.0f} us",
                *(mbit(rate) for rate in link["alone_rates"] + link["at_once_rates"]),
            ]
            for link in shown
        ],
    )
    if 2 * len(found["links"]) > links.MOST_ALONE:
        lines.append("(alone: ways between different hosts at a time, the slowest once more by themselves)")
    if found["tcp"]:
        lines.append(_report_of_tcp(found["tcp"]))
    if len(shown) < len(found["links"]):
        others = [rate for link in found["links"] if link not in shown for rate in link["at_once_rates"]]
        lines.append(
            f"{len(found['links']) - len(shown)} others: {mbit(min(others))} to {mbit(max(others))} all at once"
        )
    return lines


def _report_of_tcp(lines: Sequence[Mapping[str, Any]]) -> str:
    """What TCP has taken for the longest way, and why."""
    line = max(lines, key=lambda each: each["round_trip_seconds"])
    several = line["streams"] > 1
    taken = f"TCP took {line['streams']} connection{'s' * several} for tensors over each link, {line['congestion']}"
    found = f"the round trip takes {_ms(line['round_trip_seconds'])}"
    if line["round_trip_seconds"] < 2 * links.LONG:
        return f"{taken}: {found}, which is short"
    return f"{taken}: {found}, of late {mbit(line['rate'])}, {100 * line['loss']:.2g} % of the packets sent again"


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


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
