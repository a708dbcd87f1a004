"""`ringtrain doctor`: its advice follows from its findings, and it finds what shaped links carry."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from environments import python_with

from ringtrain.bench import hosts
from ringtrain.launch.doctor import advise, floor_seconds, report
from ringtrain.launch.examine import part_to_measure

ROOT = Path(__file__).parents[1]
GIGABIT = 119e6  # bytes per second


def findings(one_way: float = GIGABIT, both: float = GIGABIT, nominal: int = 1000, **seconds: float) -> dict:
    """Two hosts of two ranks, on one link, with 100 MB of gradients."""
    host = {"name": "node-a", "python": "3.11.2", "ringtrain": "0.1.0", "mpi": "Open MPI v5", "torch": "2.13.0", "gpu_libraries": {},
            "mpi_is_cuda_aware": False, "tensorflow": "not installed", "cuda_devices_of_torch": 0, "cores": 8, "interface_mbit": {"eth0": nominal},
            "copy_rate": 8e9, "add_rate": 5e9, "ranks": 2}  # fmt: skip
    found = {"model_bytes": 100_000_000, "measured_bytes": 100_000_000, "ranks": 4, "hosts": [host, {**host, "name": "node-b"}],
             "links": [{"between": [0, 1], "latency_seconds": 5e-5, "one_way_rate": one_way, "both_ways_rate": both}],
             "allreduce_seconds": {"float32": 0.85, "fp16": 0.43, "one_rank_a_host": 0.845, **seconds}}  # fmt: skip
    found["floor_seconds"] = floor_seconds(found)
    found["advice"] = [vars(each) for each in advise(found)]
    return found


def changes(found: dict) -> str:
    return "; ".join(each["change"] for each in found["advice"])


def test_gpus_are_told_with_the_versions_of_their_libraries() -> None:
    found = findings()
    for host in found["hosts"]:
        host |= {"cuda_devices_of_torch": 4, "gpu_libraries": {"cuda": ("13.0", "/lib/libcuda.so.1"), "nccl": ("", "there is none")}}
    assert "4 GPUs for torch, cuda 13.0, no nccl  " in "\n".join(report(found))
    found["hosts"][0]["mpi_is_cuda_aware"] = True
    assert "4 GPUs for torch, cuda 13.0, no nccl, CUDA-aware MPI by its own account" in "\n".join(report(found))


def test_floor_is_that_of_the_slowest_link() -> None:
    assert findings()["floor_seconds"] == pytest.approx(100e6 / GIGABIT)
    three = findings()
    three["hosts"].append(three["hosts"][0])
    three["links"].append({"between": [1, 2], "latency_seconds": 5e-5, "one_way_rate": 50e6, "both_ways_rate": 50e6})
    three["allreduce_seconds"] = dict.fromkeys(three["allreduce_seconds"], 4.0)
    assert floor_seconds(three) == pytest.approx(4 / 3 * 100e6 / 50e6)


def test_an_allreduce_below_the_floor_lowers_it() -> None:
    """The link was measured while something else ran on the hosts: no share of the floor is above 100 %."""
    found = findings(both=0.5 * GIGABIT, float32=1.25, one_rank_a_host=1.0)
    assert found["floor_seconds"] == 1.0
    assert re.search(r"as it is +1250.0 ms +80 %\n.*\none rank on each host +1000.0 ms +100 %", "\n".join(report(found)))


def test_a_good_link_leaves_fewer_bytes_as_the_only_gain() -> None:
    assert changes(findings()) == ("accumulate 4 micro-batches (backward_passes_per_step=4); "
                                   "send 16 bits between hosts (compression=Compression.fp16)")


@pytest.mark.parametrize("found, words", [
    (findings(both=0.5 * GIGABIT, float32=1.7), "node-a and node-b carry both ways at once"),
    (findings(nominal=10_000), "--network-interfaces"), (findings(one_rank_a_host=0.5), "one rank on each host")])
def test_each_fault_has_its_advice(found: dict, words: str) -> None:
    assert words in changes(found)
    assert words in "\n".join(report(found))


def test_a_wire_that_is_not_filled_is_said() -> None:
    assert "does not fill the wire" in "\n".join(report(findings(float32=2.0)))
    assert "does not fill the wire" not in "\n".join(report(findings()))


def test_one_host_has_no_network_to_change() -> None:
    alone = findings()
    alone.update(hosts=alone["hosts"][:1], links=[], advice=[], floor_seconds=0.0125)
    assert advise(alone) == [] and "Nothing to change" in report(alone)[-1]


@pytest.mark.parametrize("rates, measured", [([], 100_000_000), ([1e9, 2e9], 100_000_000), ([1e9, 25e6], 10_000_000),
                                            ([1e3], 1 << 20)])
def test_a_model_that_takes_long_is_measured_by_a_part(rates: list[float], measured: int) -> None:
    assert part_to_measure(100_000_000, [{"both_ways_rate": rate} for rate in rates]) == measured
    assert "measured with 10 MB of them" in "\n".join(report({**findings(), "measured_bytes": 10_000_000}))


@pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing())
def test_it_finds_what_the_links_carry(tmp_path: Path) -> None:
    written = tmp_path / "found.json"
    with hosts.Network({"node-a": "eth0", "node-b": "ens5"}, rate="200mbit") as network:
        done = network["node-a"].run(
            python_with("openmpi"), "-m", "ringtrain.launch.commands", "doctor", "-H", "node-a:1,node-b:2", "--model-mb", "15",
            "--json", str(written), timeout=200, env=dict(os.environ, PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stderr
    found = json.loads(written.read_text())
    assert [(host["name"], host["ranks"]) for host in found["hosts"]] == [("node-a", 1), ("node-b", 2)]
    rate = found["links"][0]["both_ways_rate"]
    assert rate < 50e6, "faster than the link"
    assert found["measured_bytes"] < found["model_bytes"] == 15_000_000
    assert found["allreduce_seconds"]["float32"] > 0.5 * found["model_bytes"] / rate, "the part was taken for the whole"
    assert set(found["allreduce_seconds"]) == {"float32", "fp16", "one_rank_a_host"}
    assert "node-a and node-b" in done.stdout and "16 bits between hosts" in done.stdout
