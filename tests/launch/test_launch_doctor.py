"""`ringtrain doctor`: its advice follows from its findings, and it finds what shaped links carry."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import needs
import pytest
from environments import python_with

from ringtrain.bench import namespaces
from ringtrain.launch.doctor_advice import advise, floor_seconds, modes
from ringtrain.launch.doctor_report import report
from ringtrain.launch.examine import interfaces_in_use, part_to_measure, seconds_of_all
from ringtrain.launch.modes import MODES, SendingMode, streaming_batch_seconds

ROOT = Path(__file__).parents[2]
GIGABIT = 119e6  # bytes per second
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def link(one: int, other: int, alone: float, at_once: float, latency: float = 5e-5) -> dict:
    """Between two hosts, the same both ways."""
    return {
        "between": [one, other],
        "latency_seconds": latency,
        "alone_rates": [alone, alone],
        "at_once_rates": [at_once, at_once],
    }


def ring(count: int, rate: float = GIGABIT, slow: tuple[tuple[int, int], ...] = ()) -> dict:
    """Findings on so many hosts; the slow ways carry a tenth of the rate."""
    found = findings()
    found["hosts"] = [{**found["hosts"][0], "name": f"node-{letter}"} for letter in LETTERS[:count]]
    found["links"] = [link(one, (one + 1) % count, rate, rate) for one in range(count)]
    for each in found["links"]:
        for number, way in enumerate((tuple(each["between"]), tuple(each["between"][::-1]))):
            if way in slow:
                each["alone_rates"][number] = each["at_once_rates"][number] = rate / 10
    found["allreduce_seconds"] = {"float32": 20.0, "fp16": 10.0}
    found["floor_seconds"] = floor_seconds(found)
    found["advice"] = [vars(each) for each in advise(found)]
    return found


def findings(
    one_way: float = GIGABIT,
    both: float = GIGABIT,
    nominal: int = 1000,
    latency: float = 5e-5,
    step_ms: float | None = None,
    **seconds: float,
) -> dict:
    """Two hosts of two ranks, on one link, with 100 MB of gradients."""
    host = {
        "name": "node-a",
        "python": "3.11.2",
        "ringtrain": "0.1.0",
        "mpi": "Open MPI v5",
        "torch": "2.13.0",
        "gpu_libraries": {},
        "mpi_is_cuda_aware": False,
        "tensorflow": "not installed",
        "cuda_devices_of_torch": 0,
        "cores": 8,
        "interface_mbit": {"eth0": nominal},
        "copy_rate": 8e9,
        "add_rate": 5e9,
        "ranks": 2,
        "site": "",
    }
    found = {
        "model_bytes": 100_000_000,
        "measured_bytes": 100_000_000,
        "ranks": 4,
        "transport": "mpi",
        "hosts": [host, {**host, "name": "node-b"}],
        "links": [link(0, 1, one_way, both, latency)],
        "tcp": [],
        "codec_seconds_per_byte": {"bf16": 1e-10, "fp16": 1e-10, "int8": 2.5e-10, "int4": 2e-10},
        "allreduce_seconds": {"float32": 0.85, "fp16": 0.43, "one_rank_a_host": 0.845, **seconds},
    }
    found["floor_seconds"] = floor_seconds(found)
    found["advice"] = [vars(each) for each in advise(found)]
    if step_ms is not None:
        found["computing_seconds"] = step_ms / 1e3
        found["modes"] = modes(found)
    return found


def changes(found: dict) -> str:
    return "; ".join(each["change"] for each in found["advice"])


def test_gpus_are_told_with_the_versions_of_their_libraries() -> None:
    found = findings()
    for host in found["hosts"]:
        host |= {
            "cuda_devices_of_torch": 4,
            "gpu_libraries": {"cuda": ("13.0", "/lib/libcuda.so.1"), "nccl": ("", "there is none")},
        }
    assert "4 GPUs for torch, cuda 13.0, no nccl  " in "\n".join(report(found))
    found["hosts"][0]["mpi_is_cuda_aware"] = True
    assert "4 GPUs for torch, cuda 13.0, no nccl, MPI reports that it is CUDA-aware" in "\n".join(report(found))


def test_floor_is_that_of_the_slowest_link() -> None:
    assert findings()["floor_seconds"] == pytest.approx(100e6 / GIGABIT)
    assert floor_seconds(ring(3)) == pytest.approx(4 / 3 * 100e6 / GIGABIT)
    closing = ring(3, slow=((2, 0),))
    assert floor_seconds(closing) == pytest.approx(4 / 3 * 100e6 / (GIGABIT / 10))
    assert floor_seconds(ring(3, slow=((0, 2),))) == floor_seconds(ring(3)), "an allreduce goes around one way"


def test_an_allreduce_below_the_floor_lowers_it() -> None:
    """The link was measured while something else ran on the hosts: no share of the floor is above 100 %."""
    found = findings(both=0.5 * GIGABIT, float32=1.25, one_rank_a_host=1.0)
    assert found["floor_seconds"] == 1.0
    assert re.search(
        r"as it is +1250.0 ms +80 %\n.*\none rank on each host +1000.0 ms +100 %", "\n".join(report(found))
    )


def test_a_good_link_leaves_fewer_bytes_as_the_only_gain() -> None:
    assert changes(findings()) == (
        "accumulate 4 micro-batches (backward_passes_per_step=4); "
        "send 16 bits between hosts (compression=Compression.fp16)"
    )


@pytest.mark.parametrize(
    "found, words",
    [
        (
            findings(both=0.5 * GIGABIT, float32=1.7),
            "make the link between node-a and node-b carry both directions at once",
        ),
        (findings(nominal=10_000), "--network-interfaces"),
        (findings(one_rank_a_host=0.5), "one rank on each host"),
    ],
)
def test_each_fault_has_its_advice(found: dict, words: str) -> None:
    assert words in changes(found)
    assert words in "\n".join(report(found))


@pytest.mark.parametrize(
    "used, words",
    [
        (["eth0"], "use the faster interface (--network-interfaces): ens5 of node-a, ens5 of node-b"),
        (["eth0", "ens5"], "find out what slows the interfaces down (ens5 of node-a, ens5 of node-b)"),
    ],
)
def test_an_interface_that_is_in_use_is_not_advised(used: list[str], words: str) -> None:
    found = findings()
    for host in found["hosts"]:
        host |= {"interface_mbit": {"eth0": 1000, "ens5": 10_000, "ens6": 10_000 if "ens5" in used else 100}}
        host["interfaces_in_use"] = interfaces_in_use({"NCCL_SOCKET_IFNAME": f"={','.join(used)}"})
    assert words in [each.change for each in advise(found)]


@pytest.mark.parametrize(
    "count, slow, change, why",
    [
        (3, ((2, 0),), "check the way from node-c to node-a", "95 Mbit/s, the other way 952 Mbit/s, another link 952"),
        (3, ((2, 0), (0, 2)), "check the link between node-a and node-c", "95 Mbit/s, another link 952 Mbit/s"),
        (
            3,
            ((1, 2), (1, 0)),
            "find out what slows down what host node-b sends",
            "95 Mbit/s to node-a, 95 Mbit/s to node-c; 952 Mbit/s from node-a",
        ),
        (12, ((9, 10), (11, 10)), "find out what slows down what host node-k receives", "95 Mbit/s from node-l"),
        (12, ((9, 10), (11, 10), (10, 11), (10, 9)), "find out what slows host node-k down, in both directions", ""),
        (2, ((1, 0),), "check the way from node-b to node-a", "95 Mbit/s, the other way 952 Mbit/s"),
    ],
)
def test_what_is_slow_is_named_where_it_is(count: int, slow: tuple, change: str, why: str) -> None:
    """And nothing else is: not its healthy neighbour, nor other jobs, nor half duplex."""
    found = findings() if count == 2 else ring(count, slow=slow)
    if count == 2:
        found["links"][0] |= {"alone_rates": [GIGABIT, GIGABIT / 10], "at_once_rates": [0.6 * GIGABIT, GIGABIT / 10]}
        found["advice"] = [vars(each) for each in advise(found)]
    (said,) = (each for each in found["advice"] if "95 Mbit/s" in each["why"])
    assert said["change"] == change and why in said["why"]
    assert len(found["advice"]) == 3, "beside accumulation and 16 bits"
    forward = any((end - start) % count == 1 for start, end in slow)
    assert (said["after"] < 0.5 * said["before"]) == forward, "of the allreduce, which uses one direction"
    assert f"- {change}: " in "\n".join(report(found))


def test_what_is_slow_only_while_all_send_is_named() -> None:
    duplex = ring(4)
    for place in (0, 1):  # to node-b, and from there
        duplex["links"][place]["at_once_rates"][0] = 0.5 * GIGABIT
    assert "make the link of host node-b carry both directions at once" in "\n".join(
        each.change for each in advise(duplex)
    )
    for each in duplex["links"]:
        each["at_once_rates"] = [0.5 * GIGABIT] * 2
    assert "find out what the links share" in [each.change for each in advise(duplex)]
    shared = ring(4)
    shared["links"][3]["at_once_rates"][0] = 0.5 * GIGABIT
    assert "find out what shares the way from node-d to node-a" in [each.change for each in advise(shared)]


def test_of_many_links_the_slowest_are_shown_and_the_others_counted() -> None:
    said = report(ring(20, slow=((19, 0),)))
    rows = [line for line in said if re.match(r"node-., node-", line)]
    assert len(rows) == 16 and any(row.startswith("node-t, node-a ") for row in rows)
    assert "4 others: 952 Mbit/s to 952 Mbit/s all at once" in said
    assert any("the slowest once more by themselves" in line for line in said)
    assert not any("others" in line or "by themselves" in line for line in report(ring(4)))


def test_a_wire_that_is_not_filled_is_said() -> None:
    assert "% of the slowest link" in "\n".join(report(findings(float32=2.0)))
    assert "% of the slowest link" not in "\n".join(report(findings()))


def test_what_is_between_far_hosts_is_no_fault_of_theirs() -> None:
    said = "\n".join(report(findings(float32=2.0, nominal=10_000, latency=0.025)))
    assert "a round trip takes 50.0 ms, and each loss some more" in said
    assert "interface" not in said and "other jobs" not in said


def test_sites_are_told_and_the_line_between_them_is_not_blamed() -> None:
    between = ((1, 2), (2, 1), (3, 0), (0, 3))
    found = ring(4, slow=between)
    assert "check" in changes(found) or "find out" in changes(found)
    for one in (1, 3):
        found["links"][one]["latency_seconds"] = 0.01
    asked = "Some hosts are far from others, and some near: name their sites"
    assert any(line.startswith(asked) for line in report(found))
    for host, site in zip(found["hosts"], ("ams", "ams", "fra", "fra"), strict=True):
        host["site"] = site
    found["advice"] = [vars(each) for each in advise(found)]
    assert "check" not in changes(found) and "find out" not in changes(found)
    assert "sites: ams (node-a, node-b), fra (node-c, node-d)" in report(found)
    assert not any(line.startswith(asked) for line in report(found))


def test_a_part_of_the_model_waits_for_the_longest_way_only_once() -> None:
    far = [link(0, 1, GIGABIT, GIGABIT, latency=0.025)]
    assert seconds_of_all(0.25, 4.0, far) == pytest.approx(0.05 + 0.8)
    assert seconds_of_all(0.04, 4.0, far) == pytest.approx(0.04)
    assert seconds_of_all(0.25, 4.0, []) == pytest.approx(1.0)


def test_one_host_has_no_network_to_change() -> None:
    alone = findings()
    alone.update(hosts=alone["hosts"][:1], links=[], advice=[], floor_seconds=0.0125)
    assert advise(alone) == [] and "Nothing to change" in report(alone)[-1]
    assert report(alone)[0] == f"1 host, {alone['ranks']} ranks"


@pytest.mark.parametrize(
    "rate, measured", [(float("inf"), 100_000_000), (1e9, 100_000_000), (25e6, 10_000_000), (1e3, 64 << 10)]
)
def test_a_model_that_takes_long_is_measured_by_a_part(rate: float, measured: int) -> None:
    assert part_to_measure(100_000_000, rate) == measured
    assert "measured with 10 MB of them" in "\n".join(report({**findings(), "measured_bytes": 10_000_000}))


def test_what_tcp_took_for_the_longest_way_is_told_with_its_reason() -> None:
    short = {"rank": 1, "streams": 1, "congestion": "cubic", "round_trip_seconds": 1e-4, "rate": 1e8, "loss": 0.0}
    far = {"rank": 2, "streams": 12, "congestion": "cubic", "round_trip_seconds": 0.05, "rate": 24e6, "loss": 1.1e-4}
    lines = report({**findings(), "tcp": [far, short]})
    assert (
        "TCP took 12 connections for tensors over each link, cubic: the round trip takes 50.0 ms, of late 192 Mbit/s, "
        "0.011 % of the packets sent again" in lines
    )
    lines = report({**findings(), "tcp": [short]})
    taken = "TCP took 1 connection for tensors over each link, cubic: the round trip takes 0.1 ms, which is short"
    assert taken in lines
    assert not any("TCP took" in line for line in report(findings()))


def test_without_the_time_of_a_step_no_mode_is_judged() -> None:
    assert "--step-ms" in report(findings())[-1]


def test_what_is_expected_of_the_modes() -> None:
    """At 1 Gbit/s: an exchange of int8 takes a quarter of float32's, a batch little more than to compute it."""
    found = findings(step_ms=480)
    expected = {each["mode"]: each for each in found["modes"]}
    assert list(expected) == [mode.name for mode in MODES]
    assert expected["float32"]["sending_seconds"] == pytest.approx(0.85)
    assert expected["float32"]["batch_seconds"] == pytest.approx(0.85 + 0.15 * 0.48)
    assert expected["int8"]["bytes_sent"] == pytest.approx(100e6 / 3.938, rel=1e-3)
    assert expected["int8"]["sending_seconds"] == pytest.approx(0.85 / 3.938, rel=1e-3)
    assert expected["int8"]["batch_seconds"] == pytest.approx(0.48 + 0.15 * 0.2159, rel=1e-3)
    assert expected["int8"]["codec_seconds"] == pytest.approx(0.025)
    assert expected["4 batches"]["batch_seconds"] == pytest.approx((3 * 0.48 + 0.85 + 0.15 * 0.48) / 4)
    assert expected["4 batches"]["bytes_sent"] == pytest.approx(25e6)
    assert expected["one step late"]["batch_seconds"] == pytest.approx(0.85)
    assert [name for name, each in expected.items() if each["pays_first"]] == ["bf16"]
    said = "\n".join(report(found))
    assert re.search(r"int8 +25.4 MB +215.9 ms +25.0 ms +512.4 ms +1.07 +8 bits", said)
    assert re.search(r"one step late .*the step before; compare the loss", said) and re.search(
        r"powersgd\(rank=2\), .*compare the loss", said
    )
    assert (
        "LocalSteps(every=32, fragments=4, overlap=4), whose parts travel while training goes on: 480.0 ms for a batch"
        in said
    )
    assert "mode=OneStepLate(), compression=Compression.int8: 480.0 ms for a batch; 8 bits of" in said
    assert streaming_batch_seconds(0.05, 0.85, 32, 4, 2) == pytest.approx(0.05 + 4 * (0.2125 - 0.1) / 32)
    assert said.endswith("bf16 pays first (compression=Compression.bf16): of what costs little time, it risks least.")


@pytest.mark.parametrize(
    "step_ms, mode, words",
    [
        (2000, "float32", "send float32"),
        (400, "int8", "int8 pays first"),
        (220, "int8", "int8 pays first"),
        (130, "int4", "int4 pays first"),
        (60, "32 local steps", "32 local steps is the fastest (mode=LocalSteps(every=32)), and still 1.4 times"),
    ],
)
def test_the_mode_of_least_risk_that_costs_little_pays_first(step_ms: float, mode: str, words: str) -> None:
    found = findings(step_ms=step_ms)
    assert [each["mode"] for each in found["modes"] if each["pays_first"]] == [mode]
    assert words in report(found)[-1]
    late = max(step_ms, 215.9)  # what an exchange takes, where that is longer
    assert f"OneStepLate(), compression=Compression.int8: {late:.1f} ms" in "\n".join(report(found))


def test_fewer_bytes_gain_nothing_where_latency_or_the_codec_decides() -> None:
    """Three latencies are in an exchange of any size; and on a fast network the codec takes longer than the wire."""
    slow = {each["mode"]: each["sending_seconds"] for each in findings(latency=0.25, step_ms=100)["modes"]}
    assert slow["int8"] == pytest.approx(0.75 + 0.1 / 3.938, rel=1e-3)
    fast = findings(one_way=1e10, both=1e10, step_ms=100, float32=0.01, one_rank_a_host=0.01)
    sending = {each["mode"]: each["sending_seconds"] for each in fast["modes"]}
    assert sending["float32"] == pytest.approx(0.01) and sending["int8"] == pytest.approx(0.025)


def test_what_does_not_overlap_follows_the_last_batch() -> None:
    """As averages between many batches of one's own do."""
    local = SendingMode(
        "32 local steps", "another algorithm", argument="mode=LocalSteps(every=32)", batches=32, overlaps=False
    )
    assert local.batch_seconds(0.48, 0.85) == pytest.approx(0.48 + 0.85 / 32)


@pytest.mark.calm
@needs.hosts
@pytest.mark.parametrize(
    "mpi", [pytest.param("openmpi", marks=pytest.mark.openmpi), pytest.param("tcp", marks=pytest.mark.tcp)]
)
def test_it_finds_what_the_links_carry(mpi: str, tmp_path: Path) -> None:
    """Over TCP of three hosts, of which the last sends slowly to the first: the link that closes the ring."""
    written = tmp_path / "found.json"
    ranks = {"node-a": 1, "node-b": 2} | ({"node-c": 1} if mpi == "tcp" else {})
    interfaces = {"node-a": "eth0", "node-b": "ens5", "node-c": "enp3s0"}
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{name} slots={slots} site=ams\n" for name, slots in ranks.items()))
    with namespaces.HostNetwork({name: interfaces[name] for name in ranks}, rate="200mbit") as network:
        if mpi == "tcp":
            network.slow_down("node-c", "40mbit", to="node-a")
        done = network["node-a"].run(
            python_with(mpi),
            "-m",
            "ringtrain.launch.commands",
            "doctor",
            "-hostfile",
            str(hosts),
            "--model-mb",
            "15",
            "--step-ms",
            "100",
            "--json",
            str(written),
            timeout=200,
            env=dict(os.environ, PYTHONPATH=str(ROOT), RINGTRAIN_TRANSPORT="tcp" if mpi == "tcp" else "mpi"),
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(written.read_text())
    assert {host["name"]: host["ranks"] for host in found["hosts"]} == ranks
    assert f"sites: ams ({', '.join(ranks)})" in done.stdout
    assert found["transport"] == ("tcp" if mpi == "tcp" else "mpi")
    assert [each["between"] for each in found["links"]] == ([[0, 1], [1, 2], [2, 0]] if mpi == "tcp" else [[0, 1]])
    rate = min(each["at_once_rates"][0] for each in found["links"])
    assert 0 < rate < (10e6 if mpi == "tcp" else 50e6), "faster than the link"
    assert found["measured_bytes"] < found["model_bytes"] == 15_000_000
    assert found["allreduce_seconds"]["float32"] > 0.5 * found["model_bytes"] / rate, "the part was taken for the whole"
    assert set(found["allreduce_seconds"]) == {"float32", "fp16", "one_rank_a_host"}
    codecs = found["codec_seconds_per_byte"]
    assert set(codecs) == {"bf16", "fp16", "int8", "int4"}
    assert all(1e-11 < each < 1e-7 for each in codecs.values()), codecs
    int8 = next(each for each in found["modes"] if each["mode"] == "int8")
    assert int8["batch_seconds"] < found["modes"][0]["batch_seconds"], "on 200 Mbit/s bytes decide"
    assert "is the fastest" in done.stdout or "pays first" in done.stdout
    assert "node-a, node-b" in done.stdout and "16 bits between hosts" in done.stdout
    assert ("check the way from node-c to node-a" in done.stdout) == (mpi == "tcp")
