"""`ringtrain bench wire`: it makes its hosts, and what it prints and writes is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import needs
import pytest
from environments import rank_environment, ringtrainrun

from ringtrain.bench import __main__ as bench
from ringtrain.bench import namespaces, shaped

ROOT = Path(__file__).parents[2]
TWO_HOSTS = "2 hosts" + (" with cores of its own each" if len(os.sched_getaffinity(0)) >= 2 else "")


def on_links(test: Callable) -> Callable:
    """A test that needs links, and what measures them."""
    return needs.hosts(needs.package("iperf3", "iperf3")(test))


def test_cores_are_shared_out_equally() -> None:
    ours = sorted(os.sched_getaffinity(0))
    assert namespaces.cores_of_each(1) == [ours]
    assert namespaces.cores_of_each(len(ours)) == [[core] for core in ours]
    assert namespaces.cores_of_each(len(ours) + 1) == [[]] * (len(ours) + 1), "so each may use all"


@on_links
def test_a_host_with_cores_of_its_own_uses_no_others() -> None:
    with namespaces.HostNetwork({"node-a": "eth0", "node-b": "eth0"}, useless=None, cores_apart=True) as network:
        for host in network.hosts.values():
            used = f"import os; print(sorted(os.sched_getaffinity(0)) == {list(host.cores or os.sched_getaffinity(0))})"
            seen = host.run("ssh", "-o", "StrictHostKeyChecking=no", host.name, sys.executable, "-c", f"'{used}'")
            assert seen.stdout == "True\n", seen.stderr


@pytest.mark.long
@on_links
def test_wire_fills_the_links_and_writes_what_it_measured(tmp_path: Path) -> None:
    """At 200 Mbit/s, where even a crowded machine has time: a tensor takes the floor's time or a little more."""
    written = tmp_path / "wire.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ringtrain.bench",
            "wire",
            "--rate",
            "200mbit",
            "--ranks-per-host",
            "2",
            "--sizes",
            "1KB,4MB",
            "--compressions",
            "fp16,int8,int4",
            "--repetitions",
            "2",
            "--json",
            str(written),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    assert f"{TWO_HOSTS}, links of 200mbit each way: " in done.stdout
    found = json.loads(written.read_text())
    assert 5e6 < found["bytes_per_second"] < 50e6 and found["hosts"] == 2
    results = {(result["system"], result["bytes"]): result for result in found["results"]}
    systems = [
        f"ringtrain-{transport}{codec}" for transport in ("mpi", "tcp") for codec in ("", "-fp16", "-int8", "-int4")
    ]
    assert set(results) == {(name, size) for name in systems for size in (1024, 4 << 20)}
    for transport in ("mpi", "tcp"):
        large = results[f"ringtrain-{transport}", 4 << 20]
        assert large["verified"] and large["np"] == 4
        assert large["floor_seconds"] == pytest.approx((4 << 20) / found["bytes_per_second"])
        assert large["seconds_median"] > 0.5 * large["floor_seconds"], "faster than the link: it was not on the wire"
        assert 0.05 < large["processor_seconds_per_gb"] < 100
        for codec, bytes_of_one in (("fp16", 2), ("int8", 260 / 256), ("int4", 66 / 128)):
            narrow = results[f"ringtrain-{transport}-{codec}", 4 << 20]
            assert narrow["verified"]
            assert narrow["floor_seconds"] == pytest.approx(large["floor_seconds"] * bytes_of_one / 4)


@pytest.mark.long
@on_links
def test_tcp_fills_links_of_different_rates(tmp_path: Path) -> None:
    """Faster than the faster link alone, and than twice the slower one: pieces go where there is room."""
    written = tmp_path / "wire.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ringtrain.bench", "wire", "--rate", "300mbit,100mbit", "--transports", "tcp"),
            *("--ranks-per-host", "1", "--sizes", "32MB", "--repetitions", "2", "--pythons", sys.executable),
            *("--json", str(written)),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{TWO_HOSTS}, links of 300mbit and 100mbit each way" in done.stdout
    found = json.loads(written.read_text())
    assert 40e6 < found["bytes_per_second"] < 60e6, "the rates of both links"
    assert {result["system"] for result in found["results"]} == {"ringtrain-tcp", "ringtrain-tcp-fp16"}
    large = next(result for result in found["results"] if result["system"] == "ringtrain-tcp")
    assert large["verified"] and large["floor_seconds"] / large["seconds_min"] > 0.78


@pytest.mark.long
@on_links
@pytest.mark.parametrize(
    "operation, code, words",
    [("allreduce", 0, "in 7 tensors"), ("send", 1, "--tensors: several tensors must be summed")],
)
def test_a_sum_may_have_several_tensors(operation: str, code: int, words: str, tmp_path: Path) -> None:
    written = tmp_path / "wire.json"
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "ringtrain.bench",
                "wire",
                "--rate",
                "200mbit",
                "--tensors",
                "7",
                "--peers",
                "gloo",
            ),
            *("--transports", "tcp", "--ranks-per-host", "1", "--sizes", "1KB", "--repetitions", "2"),
            *("--operation", operation, "--json", str(written)),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )
    assert done.returncode == code and words in done.stdout + done.stderr, done.stdout + done.stderr
    if code == 0:
        found = json.loads(written.read_text())
        assert found["tensors"] == 7 and all(each["verified"] for each in found["results"])
        assert {each["system"] for each in found["results"]} == {"ringtrain-tcp", "ringtrain-tcp-fp16", "gloo"}


@pytest.mark.parametrize(
    "starter, transports",
    [pytest.param("openmpi", "mpi,tcp", marks=pytest.mark.openmpi), pytest.param("tcp", "tcp", marks=pytest.mark.tcp)],
)
def test_overlap_compares_a_step_with_its_parts(starter: str, transports: str, tmp_path: Path) -> None:
    """On the ranks of a job of one host, which need no root; also of one that no MPI has started."""
    written = tmp_path / "overlap.json"
    done = subprocess.run(
        ringtrainrun(
            starter,
            2,
            "python",
            "-m",
            "benchmarks",
            "overlap",
            "--transports",
            transports,
            "--bytes",
            "1MB",
            "--tensors",
            "4",
            "--repetitions",
            "2",
            "--json",
            str(written),
        ),
        capture_output=True,
        text=True,
        timeout=100,
        env=rank_environment(PYTHONPATH=str(ROOT)),
    )
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout + done.stderr
    found = json.loads(written.read_text())["results"]
    cases = [(each["free_cores"], each["system"]) for each in found]
    systems = [f"ringtrain-{transport}" for transport in transports.split(",")]
    expected = [(free, system) for free in ("none", "one") for system in systems]
    assert cases == expected[: len(systems) * len(os.sched_getaffinity(0))]
    for each in found:
        parts = (each["computing_seconds_median"], each["sending_seconds_median"])
        assert min(parts) > 0 and each["tensors"] == 4 and each["verified"]
        assert each["beyond_the_larger"] == pytest.approx((each["seconds_median"] - max(parts)) / min(parts))


def test_wire_says_what_it_needs() -> None:
    script = (
        "import sys\nfrom ringtrain.bench import __main__, namespaces\nnamespaces.missing = lambda: 'no namespaces here'\n"
        "sys.exit(__main__.main(['wire']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2 and "no namespaces here" in done.stderr and "apt-get install" in done.stderr


@on_links
def test_rates_that_are_fewer_than_the_links_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["wire", "--rate", "1gbit,2gbit", "--links", "3"]) == 2
    assert "one for each of 3 links, but names 2" in capfd.readouterr().err


@on_links
def test_ranks_that_do_not_fill_their_hosts_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["train", "--rate", "1gbit", "-np", "3", "--ranks-per-host", "2"]) == 2
    assert "must be a multiple of --ranks-per-host, 2, but is 3" in capfd.readouterr().err


REPORT = json.dumps(
    {"end": {"sum_received": {"bits_per_second": 8e8}, "sum_received_bidir_reverse": {"bits_per_second": 7.2e8}}}
)
REFUSED = json.dumps({"end": {}, "error": "unable to connect to server: Connection refused"})


class Host:
    """A host on which iperf3 gives these reports one after the other, then the last one for ever."""

    name = address = "host"
    addresses = (address,)

    def __init__(self, *reports: str):
        self.reports = list(reports)
        self.server: subprocess.Popen | None = None

    def run(self, *line: str) -> subprocess.CompletedProcess:
        report = self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]
        return subprocess.CompletedProcess(line, 0, report, "")  # iperf3 returns 0 whatever happens

    def start(self, *line: str, **options) -> subprocess.Popen:
        self.server = subprocess.Popen(["sleep", "60"])
        return self.server

    def signal_to(self, process: subprocess.Popen, number: int) -> None:
        process.send_signal(number)


def test_rate_is_the_slower_ways_once_the_server_answers() -> None:
    server = Host()
    assert shaped.measured_rate(Host(REFUSED, "", REPORT), server) == 9e7
    assert server.server.returncode is not None, "the server was left running"


@pytest.mark.parametrize(
    "report, words",
    [
        (REFUSED, "Connection refused"),
        ("", "nothing"),
        ("no JSON", "no JSON"),
        ('{"end": {"sum_received": {}}}', "sum_received"),
    ],
)
def test_a_rate_that_is_not_found_is_an_error_with_the_words_of_iperf(
    report: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shaped, "SECONDS_FOR_IPERF", 0.0)
    with pytest.raises(RuntimeError, match=words) as problem:
        shaped.measured_rate(Host(report), Host())
    assert "raw rate from 'host' to 'host'" in str(problem.value)
