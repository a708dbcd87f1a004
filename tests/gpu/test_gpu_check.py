"""bin/gpu-check on the fakes: the parts that a machine with a GPU runs are right here, and say so when they are not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import fakes
import pytest
from environments import EACH_MPI, EACH_STARTER, python_with

from gpu import baggage, check, kernels, machine

ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, *parts: str, python: str = sys.executable, **settings: object) -> tuple[int, list[dict]]:
    """The exit code and the results of some parts."""
    built = fakes.folder()  # here, and not within a part's deadline
    file = tmp_path / "results.json"
    done = subprocess.run(
        [ROOT / "bin" / "gpu-check", "--device=fake", "--seconds", "200", "--json", file, *parts],
        env=os.environ | {"PYTHON": python, "RINGTRAIN_TEST_FAKES": str(built)} | {name: str(value) for name, value in settings.items()},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert file.exists(), done.stdout
    return done.returncode, json.loads(file.read_text())["results"]


LONG = (
    "machine arrays tensorflow steps memory memcheck nccl-killed staging graphs torch-ddp torch-fsdp torch-modes elastic "
    "load floors torch killed"
).split()


@pytest.mark.parametrize(
    "part",
    [
        *("kernels", "order", "staged-threads"),
        *(pytest.param(name, marks=pytest.mark.long) for name in LONG),
    ],
)
def test_parts_are_right_on_the_fakes(part, tmp_path):
    code, results = run(tmp_path, part)
    wrong = [each for each in results if not each["right"]]
    assert results and not wrong, wrong
    assert code == 0


@EACH_MPI
@pytest.mark.parametrize("part", ["staged", "nccl"])
def test_ranks_that_are_processes(mpi, part, tmp_path):
    code, results = run(tmp_path, part, python=str(python_with(mpi)))
    assert [each for each in results if not each["right"]] == [] and len(results) >= 5
    assert code == 0


@pytest.mark.long
@EACH_STARTER
def test_further_parts_of_ranks_that_are_processes(mpi, tmp_path):
    code, results = run(
        tmp_path, "smoke", "staged", "nccl-nccl", "nccl-scatter", "nccl-ordered", python=str(python_with(mpi)),
        **{"RINGTRAIN_TRANSPORT": "tcp"} if mpi == "tcp" else {},
    )  # fmt: skip
    assert [each for each in results if not each["right"]] == [] and len(results) == 2 + 5 + 4 * 4
    assert code == 0


@pytest.mark.long  # PyTorch is imported on both ranks and compared with gloo
@pytest.mark.openmpi
def test_torch_on_two_ranks(tmp_path):
    code, results = run(tmp_path, "torch-ranks", python=str(python_with("openmpi")))
    assert [each for each in results if not each["right"]] == [] and len(results) == 3
    assert code == 0


def test_the_adapter_for_torch_orders_streams():
    """On tensors that say they are CUDA's: a torch without CUDA has no others."""
    environment = fakes.environment(
        FAKE_DELAY_US=200, NCCL_MULTI_RANK_GPU_ENABLE=1, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}"
    )
    done = subprocess.run([sys.executable, "-m", "gpu.torch_stand_in"], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_what_is_wrong_is_said(tmp_path):
    """The driver refuses memory from the start: the part ends with an error, and the table has it."""
    code, results = run(tmp_path, "kernels", FAKE_CUDA_FAIL="cuMemAlloc:1+=2")
    assert code == 1
    assert [each["right"] for each in results] == [False] and "cuMemAlloc returned 2" in results[0]["figure"]


def test_a_part_without_an_end_is_ended():
    endless = check.Part("endless", "load", 1, 1, check.ALONE, "")
    last = [*check.run(endless, "fake", 0.05)][-1]
    assert not last["right"] and last["what"] == "the part came to no end in 0 s"


@pytest.mark.long  # the script of a session on a GPU, and no user's
def test_a_call_that_is_cut_off_has_lost_nothing_but_its_last_part(tmp_path):
    """As where a machine is taken back: killed with all its processes. The next call does the rest."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    command = [ROOT / "bin" / "gpu-check", "--device=fake", "load", "kernels"]
    environment = os.environ | {"PYTHON": sys.executable, "RINGTRAIN_TEST_FAKES": str(fakes.folder())}
    cut = subprocess.Popen([*command, "--json", first], env=environment, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not (first.exists() and "kernels" in {each["part"] for each in json.loads(first.read_text())["results"]}):
        assert time.monotonic() < until and cut.poll() is None
        time.sleep(0.02)
    cut.send_signal(signal.SIGKILL)
    cut.wait()
    left = json.loads(first.read_text())
    assert left["whole"] == ["load"] and 0 < len(left["results"])
    subprocess.run(
        [*command, "--json", second, "--after", first], env=environment, stdout=subprocess.DEVNULL, check=True
    )
    whole = json.loads(second.read_text())
    assert whole["whole"] == ["load", "kernels"]
    of_load = [each for each in whole["results"] if each["part"] == "load"]
    assert of_load == [each for each in left["results"] if each["part"] == "load"]
    assert len(whole["results"]) == len(of_load) + 11


def test_a_part_that_would_not_fit_is_left(tmp_path):
    parts = [
        check.Part("beside", "none", 1, 1, check.BESIDE, ""),
        check.Part("long", "none", 1, 600, check.BESIDE, ""),
        check.Part("other", "none", 1, 1, check.ALONE, ""),
    ]
    record = check.Record(tmp_path / "results.json", None, "")
    left = check.run_all(parts, "fake", 300, time.monotonic() + check.GRACE + 60, record)
    assert [part.name for part in left] == ["long"]
    assert record.whole == ["beside", "other"] and [each["right"] for each in record.results] == [False, False]


def test_parts_fit_into_calls_of_ten_minutes():
    """On a machine of sixteen cores, which runs eight of those at a time that do not measure."""
    assert max(part.seconds for part in check.PARTS) + check.GRACE <= 9 * 60
    seconds = [
        sum(part.seconds for part in check.PARTS if part.alone is alone) for alone in (check.BESIDE, check.ALONE)
    ]
    assert seconds[0] / 8 + seconds[1] <= 9 * 60


def test_wheels_are_installed_without_a_registry(tmp_path):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with pytest.raises(FileNotFoundError, match="expected wheels but found none"):
        baggage.unpack(wheels, site)
    about = "carried-1.0.dist-info"
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("carried.py", "WELL = True\n")
        archive.writestr(
            f"{about}/METADATA",
            "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\nRequires-Dist: nowhere-to-be-found\n",
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    baggage.unpack(wheels, site)
    assert (site / "carried.py").exists()


@pytest.mark.long
@pytest.mark.packaging
def test_a_checkout_that_nobody_has_built_takes_all_from_the_wheels(tmp_path):
    """On a machine with NumPy, and neither a network nor a compiler: what --pack has filled suffices."""
    unwanted = shutil.ignore_patterns(".git", ".venv*", "build", "*.so", "__pycache__", "*.egg-info")
    copy = shutil.copytree(ROOT, tmp_path / "checkout", ignore=unwanted)
    wheels = tmp_path / "wheels"
    names = [path.name for path in baggage.pack(wheels, f"{sys.version_info[0]}.{sys.version_info[1]}")]
    assert len(names) == 1 + len(baggage.NEEDED)
    venv.create(tmp_path / "bare", with_pip=True)
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "numpy"], check=True)
    file = tmp_path / "results.json"
    done = subprocess.run(
        [copy / "bin" / "gpu-check", "--device=fake", "--wheels", wheels, "--json", file, "load", "order", "staged"],
        env={"PYTHON": str(python), "RINGTRAIN_TEST_FAKES": str(fakes.folder()), "PATH": "/usr/bin:/bin", "PIP_INDEX_URL": "http://127.0.0.1:1"},
        text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(file.read_text())["whole"] == ["load", "order", "staged"]


def test_every_kernel_has_its_check():
    text = (ROOT / "native" / "device" / "pack.def").read_text()
    assert all(f"RT_PACKING({tensor}_{buffer}," in text for tensor, buffer in kernels.PAIRS) and len(kernels.PAIRS) == 5
    assert kernels.CHUNK == 16384 and machine.SPIN.count(b".entry") == 1
