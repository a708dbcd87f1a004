"""`ringtrain bench wire`: it makes its hosts, and what it prints and writes is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import rank_environment, ringtrainrun

from ringtrain.bench import hosts, shaped

MISSING = hosts.missing() or ("" if hosts.find_program("iperf3") else "iperf3 is not installed")
ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_wire_fills_the_links_and_writes_what_it_measured(tmp_path: Path) -> None:
    """At 200 Mbit/s, where even a crowded machine has time: a tensor takes the floor's time or a little more."""
    written = tmp_path / "wire.json"
    done = subprocess.run([sys.executable, "-m", "ringtrain.bench", "wire", "--rate", "200mbit", "--ranks-per-host", "2",
                           "--sizes", "1KB,4MB", "--repetitions", "2", "--json", str(written)], capture_output=True,
                          text=True, timeout=200, env=dict(os.environ, PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 hosts, links of 200mbit each way" in done.stdout and "WRONG" not in done.stdout
    found = json.loads(written.read_text())
    assert 5e6 < found["bytes_per_second"] < 50e6 and found["hosts"] == 2
    results = {(result["system"], result["bytes"]): result for result in found["results"]}
    assert set(results) == {(name, size) for name in ("ringtrain", "ringtrain-fp16") for size in (1024, 4 << 20)}
    large = results["ringtrain", 4 << 20]
    assert large["verified"] and large["np"] == 4
    assert large["floor_seconds"] == pytest.approx((4 << 20) / found["bytes_per_second"])
    assert large["seconds_median"] > 0.5 * large["floor_seconds"], "faster than the link: it was not on the wire"


@pytest.mark.openmpi
def test_overlap_compares_a_step_with_its_parts(tmp_path: Path) -> None:
    """On the ranks of a job of one host, which need no root."""
    written = tmp_path / "overlap.json"
    done = subprocess.run(ringtrainrun("openmpi", 2, "python", "-m", "ringtrain.bench", "overlap", "--bytes", "1MB", "--tensors",
                                       "4", "--repetitions", "2", "--json", str(written)), capture_output=True, text=True,
                          timeout=100, env=rank_environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout + done.stderr
    found = json.loads(written.read_text())["results"]
    assert [each["free_cores"] for each in found] == ["none", "one"][: len(os.sched_getaffinity(0))]
    for each in found:
        parts = (each["computing_seconds_median"], each["sending_seconds_median"])
        assert min(parts) > 0 and each["tensors"] == 4 and each["verified"]
        assert each["beyond_the_larger"] == pytest.approx((each["seconds_median"] - max(parts)) / min(parts))


def test_wire_says_what_it_needs() -> None:
    script = ("import sys\nfrom ringtrain.bench import __main__, hosts\nhosts.missing = lambda: 'no namespaces here'\n"
              "sys.exit(__main__.main(['wire']))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2 and "no namespaces here" in done.stderr and "apt-get install" in done.stderr


REPORT = json.dumps({"end": {"sum_received": {"bits_per_second": 8e8}, "sum_received_bidir_reverse": {"bits_per_second": 7.2e8}}})
REFUSED = json.dumps({"end": {}, "error": "unable to connect to server: Connection refused"})


class Host:
    """A host on which iperf3 gives these reports one after the other, then the last one for ever."""

    name = address = "host"

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


@pytest.mark.parametrize("report, words", [(REFUSED, "Connection refused"), ("", "nothing"), ("no JSON", "no JSON"),
                                           ('{"end": {"sum_received": {}}}', "sum_received")])
def test_a_rate_that_is_not_found_is_an_error_with_the_words_of_iperf(report: str, words: str,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaped, "SECONDS_FOR_IPERF", 0.0)
    with pytest.raises(RuntimeError, match=words) as problem:
        shaped.measured_rate(Host(report), Host())
    assert "raw rate from 'host' to 'host'" in str(problem.value)
