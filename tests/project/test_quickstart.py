"""Runs bin/quickstart as a newcomer does, in the environment of the tests, and reads what it says."""

from __future__ import annotations

import glob
import os
import re
import runpy
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import needs
import pytest

QUICKSTART = Path(__file__).parents[2] / "bin" / "quickstart"


def run(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [QUICKSTART, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(os.environ, RINGTRAIN_VENV=sys.prefix, OMP_NUM_THREADS="1", **variables),
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_quickstart_trains_on_two_ranks_as_one_process_would() -> None:
    said = run("-np", "2", "--epochs", "8", RINGTRAIN_STALL_WARNING_SECONDS="1")  # of 30
    assert not re.search("barrier .* waiting", said), "nobody is warned while rank 0 trains alone, as on a slow machine"
    assert float(re.search(r"test accuracy: ([\d.]+)", said)[1]) >= 0.95
    assert all(float(rate) > 0 for rate in re.search(r"samples/s: (\d+) on 1 rank, (\d+) on 2 ranks", said).groups())
    assert "parameters of 2 ranks: equal bit for bit" in said
    assert float(re.search(r"relative difference ([\d.e+-]+)", said)[1]) < 1e-4


def test_figures_that_disappoint_are_explained() -> None:
    why = runpy.run_path(str(QUICKSTART.parents[1] / "examples" / "quickstart.py"))["why_not_faster"]
    assert why(1000, 1900, ranks=2, cores=2) == "" == why(1000, 990, ranks=1, cores=2)
    assert "not faster: other programs may use the 2 cores too" in why(3816, 3463, ranks=2, cores=2)
    assert "not faster: 4 ranks share 2 cores" in why(3816, 3463, ranks=4, cores=2)


def test_help_says_what_can_be_chosen() -> None:
    said = run("--help")
    for word in ("-np N", "RINGTRAIN_TORCH", "RINGTRAIN_VENV", "PYTHON"):
        assert word in said


CUDA_PACKAGES = ("nvidia-cublas", "cuda-toolkit")


def index_of(folder: Path, *versions: str) -> Path:
    """A folder of wheels for pip: torch in these versions, those without "+cpu" with packages of CUDA."""
    wheels = {("torch", version): () if "+cpu" in version else CUDA_PACKAGES for version in versions}
    wheels |= {(name, "1.0"): () for name in CUDA_PACKAGES}
    folder.mkdir()
    for (name, version), needed in wheels.items():
        about = f"{name.replace('-', '_')}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {each}\n" for each in needed)
        with zipfile.ZipFile(folder / f"{about.removesuffix('.dist-info')}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{about}/METADATA", metadata)
            wheel.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{about}/RECORD", "")
    return folder


@pytest.mark.long
@needs.machine("needs a machine without a GPU" if glob.glob("/dev/nvidia[0-9]*") else "")
@pytest.mark.parametrize(
    "versions, asked, said",
    [
        (["99.1"], "", "installs torch's CPU build (usually about 200 MB) by uv"),
        (["99.1", "99.1+cpu"], "", "installs torch 99.1+cpu (a CPU build"),
        (["99.1", "98.0+cpu", "99.0+cpu"], "", "installs torch 99.0+cpu (a CPU build"),
        (["99.1", "99.0+cpu"], "torch==99.0+cpu", "installs torch 99.0+cpu (a CPU build"),
        (["99.1", "99.0+cpu"], "torch", "installs torch 99.1 (a CUDA build with 2 packages: usually several GB"),
    ],
)
def test_without_a_gpu_no_gigabytes_of_cuda_are_installed(
    versions: list[str], asked: str, said: str, tmp_path: Path
) -> None:
    """Where pip finds builds of both kinds, or of CUDA alone; unless somebody asks for one."""
    folder = index_of(tmp_path / "wheels", *versions)
    venv.create(tmp_path / "v", with_pip=True)
    environment = {
        **os.environ,
        "RINGTRAIN_VENV": str(tmp_path / "v"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
    }
    environment |= {"PIP_CONFIG_FILE": os.devnull, "RINGTRAIN_TORCH": asked}
    done = subprocess.run([QUICKSTART, "--dry-run"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("quickstart: " + said), done.stdout
