"""`python -m benchmarks compress` and `accuracy`: each mode has its row, and one that sends too much or a wrong sum is WRONG."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from environments import python_with, rank_environment, ringtrainrun

from benchmarks import __main__ as further
from benchmarks.compress_further import as_matrix, factor_bytes
from ringtrain._training.powersgd import PowerSGD
from ringtrain.bench import __main__ as command_line
from ringtrain.errors import UnsupportedError
from ringtrain.launch.modes import MODES

ROOT = Path(__file__).parents[2]


def compress(written: Path, program: list[str], *arguments: str) -> subprocess.CompletedProcess:
    """On two ranks, each a simulated host, which need no root."""
    line = [*program, "compress", "--bytes", "2MB", "--tensors", "4", "--step-ms", "5", "--repetitions", "1",
            "--json", str(written), *arguments]  # fmt: skip
    environment = rank_environment(PYTHONPATH=str(ROOT), RINGTRAIN_HOST_LAYOUT="1+1", RINGTRAIN_TRANSPORT="tcp")
    return subprocess.run(ringtrainrun("tcp", 2, *line), capture_output=True, text=True, timeout=600, env=environment)


BENCH = ["python", "-m", "benchmarks"]


@pytest.mark.tcp
def test_each_mode_sends_what_it_says(tmp_path: Path) -> None:
    written = tmp_path / "compress.json"
    done = compress(written, BENCH, "--free-cores", "none", "--modes", ",".join(mode.name for mode in MODES))
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout + done.stderr
    found = json.loads(written.read_text())
    assert found["hosts"] == 2
    assert [each["mode"] for each in found["results"]] == [mode.name for mode in MODES]
    for each, mode in zip(found["results"], MODES, strict=True):
        assert each["verified"] and each["free_cores"] == "none" and each["tensors"] == 4
        assert each["bytes_sent"] == pytest.approx(each["bytes"] / mode.shrinks / mode.batches, rel=0.01)
        assert (each["codec_seconds_min"] > 0) is (mode.compression != "none")
        assert min(each[f"{part}_seconds_min"] for part in ("exchange", "computing")) > 0
        assert each["of_computing"] == pytest.approx(each["seconds_median"] / each["computing_seconds_median"])
        assert each["foretold_seconds"] == pytest.approx(
            mode.batch_seconds(
                each["computing_seconds_median"],
                max(found["results"][0]["exchange_seconds_median"] / mode.shrinks, each["codec_seconds_median"]),
            )
        )


@pytest.mark.tcp
@pytest.mark.long
def test_factors_and_fragments_send_what_the_formulas_say(tmp_path: Path) -> None:
    written = tmp_path / "compress.json"
    done = compress(written, BENCH, "--free-cores", "none", "--modes", "float32,powersgd-2,fragments=4")
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout + done.stderr
    exact, factors, fragments = json.loads(written.read_text())["results"]
    assert [each["mode"] for each in (exact, factors, fragments)] == ["float32", "powersgd-2", "fragments=4"]
    assert exact["bytes"] == 4 * 4 * 256 * 512
    assert factors["bytes_sent"] == pytest.approx(4 * 4 * 2 * (256 + 512), rel=0.01)  # four matrices, of rank 2
    assert fragments["bytes_sent"] == pytest.approx(exact["bytes"] / 32, rel=0.01)


def test_gradients_become_matrices_as_square_as_they_can_be() -> None:
    how = PowerSGD(2)
    for size, shape, sent in ((390_625, (625, 625), 2 * 1250), (125_000, (250, 500), 2 * 750), (101, (1, 101), 101)):
        matrix = as_matrix(np.zeros(size, np.float32))
        assert matrix.shape == shape and factor_bytes(how, shape) == 4 * sent


FAULTS = {
    "averages": "rt.Sum = rt.Average",
    "a compression that does not compress": "rt.Compression.int8 = 'none'",
}


@pytest.mark.tcp
@pytest.mark.parametrize(
    "fault", [pytest.param("averages", marks=pytest.mark.long), "a compression that does not compress"]
)
def test_a_wrong_mode_is_seen(fault: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        f"import sys\nimport ringtrain as rt\nfrom benchmarks import __main__\n{FAULTS[fault]}\nsys.exit(__main__.main())\n"
    )
    done = compress(tmp_path / "out.json", ["python", str(broken)], "--free-cores", "none", "--modes", "int8")
    assert done.returncode == 1
    assert [line.split()[-1] for line in done.stdout.splitlines() if " int8 " in line] == ["WRONG"], done.stdout


@pytest.mark.tcp
@pytest.mark.parametrize(
    "others",
    [
        pytest.param([], marks=pytest.mark.long),  # three trainings
        pytest.param(
            [
                "powersgd-2",
                "ddp-powersgd-2",
                "every-32-fragments",
                "every-32-diloco-half",
                "delay-1",
                "delay-1-int8",
                "alone",
            ],
            marks=pytest.mark.long,
        ),
    ],
)
def test_accuracy_compares_trainings(others: list[str], tmp_path: Path) -> None:
    """Two seeds of a few steps: the modes differ by little, and nothing is sent by ranks that train alone."""
    written = tmp_path / "accuracy.json"
    ways = ["float32", "int8", *others]
    done = subprocess.run(
        [python_with("tcp"), "-m", "benchmarks", "accuracy", "--tasks", "bytes", "--ways", ",".join(ways), "--seeds",
         "2", "--steps", "20", "--json", str(written)],
        capture_output=True, text=True, timeout=600, env=rank_environment(RINGTRAIN_TRANSPORT="tcp"),
    )  # fmt: skip
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout + done.stderr
    results = {each["system"]: each for each in json.loads(written.read_text())["results"]}
    assert list(results) == ways
    exact, int8 = results["float32"], results["int8"]
    assert exact["seeds"] == 2 and exact["loss_spread"] > 0
    assert 2 < exact["loss"] < 5.5 and 0 < exact["accuracy"] < 1
    assert int8["loss_beyond_exact"] == pytest.approx(int8["loss"] - exact["loss"]) and int8["loss"] != exact["loss"]
    assert abs(int8["loss_beyond_exact"]) < 0.1
    assert 3.5 < exact["bytes_sent"] / int8["bytes_sent"] < 4
    for other in others:
        assert results[other]["loss_beyond_exact"] > 0
    if others:
        assert results["alone"]["bytes_sent"] == 0
        assert 5 < exact["bytes_sent"] / results["powersgd-2"]["bytes_sent"] < 100


@pytest.mark.long
@pytest.mark.openmpi
def test_train_one_by_one_in_each_mode(tmp_path: Path) -> None:
    """Each is right by what it may lose, and a step of four passes has four batches' samples."""
    written = tmp_path / "train.json"
    peers = ["fp16", "bf16", "int8", "int4", "4-passes", "every-32"]
    line = [
        "python",
        "-m",
        "ringtrain.bench",
        "train",
        "--networks",
        "convnet",
        "--peers",
        ",".join(peers),
        "--one-by-one",
        "--repetitions",
        "1",
    ]
    done = subprocess.run(
        ringtrainrun("openmpi", 2, *line, "--json", str(written)), capture_output=True, text=True, timeout=600,
        env=rank_environment(PYTHONPATH=str(ROOT), RINGTRAIN_HOST_LAYOUT="1+1"),
    )  # fmt: skip
    assert done.returncode == 0 and "WRONG" not in done.stdout, done.stdout + done.stderr
    results = json.loads(written.read_text())["results"]
    assert [each["system"] for each in results] == ["ringtrain", *(f"ringtrain-{peer}" for peer in peers), "alone"]
    for each in results:
        passes = {"ringtrain-4-passes": 4, "ringtrain-every-32": 32}.get(each["system"], 1)
        assert each["verified"]
        assert each["samples_per_second"] == pytest.approx(2 * 32 * passes / each["seconds_median"])


def test_the_command_line_names_what_there_is() -> None:
    """It does so without torch, which takes seconds to import."""
    from benchmarks.accuracy import WAYS
    from benchmarks.torch_tasks import TASKS
    from ringtrain.bench.torch_networks import NETWORKS
    from ringtrain.bench.torch_systems import PEERS

    assert further.WAYS == tuple(WAYS) and further.TASKS == tuple(TASKS)
    assert command_line.NETWORKS == tuple(NETWORKS) and command_line.TRAINING_PEERS == tuple(PEERS)


def test_digits_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.torch_tasks import TASKS

    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UnsupportedError, match="task 'digits': scikit-learn must be installed"):
        TASKS["digits"].data(0)
