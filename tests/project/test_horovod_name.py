"""ringtrain-horovod: programs that import horovod, unchanged, in environments where it was installed from its wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from environments import PATHS

from ringtrain.launch import horovodrun

ROOT = Path(__file__).parents[2]
TRAIN = """
import torch
import horovod.torch as hvd
from horovod.torch.compression import Compression
from horovod.common.exceptions import HorovodInternalError

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=Compression.none)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
weights = hvd.allgather_object(model.weight.tolist())
assert weights[0] == weights[1] and hvd.size() == 2, weights
assert issubclass(HorovodInternalError, RuntimeError)
print("trained")
"""
MODULES = [
    "common", "common.basics", "common.elastic", "common.exceptions", "common.process_sets", "common.util",
    "runner", "runner.launch",
    "torch", "torch.compression", "torch.elastic", "torch.elastic.sampler", "torch.elastic.state", "torch.functions",
    "torch.mpi_ops", "torch.optimizer", "torch.sync_batch_norm",
]  # fmt: skip
SAME = f"""
import importlib, horovod, ringtrain
for name in {MODULES!r}:
    assert importlib.import_module("horovod." + name) is importlib.import_module("ringtrain." + name), name
    assert importlib.import_module("ringtrain." + name).__spec__.name == "ringtrain." + name, name
import horovod.torch.elastic.state, ringtrain.torch
assert horovod.torch is ringtrain.torch and horovod.run is ringtrain.run
for name in ("ray", "torch.nothing"):
    assert importlib.util.find_spec("horovod." + name) is None, name
"""

pytestmark = pytest.mark.packaging


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has what pip installs, but for the package that it depends on."""
    folder = tmp_path_factory.mktemp("horovod")
    unwanted = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT / "ringtrain-horovod", folder / "source", ignore=unwanted)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, source], check=True)
    wheel = next(folder.glob("ringtrain_horovod-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if "dist-info" not in name] == ["horovod/__init__.py"]
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    return folder / "site"


def start(installed: Path, *command: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(installed), PATHS])
    environment = dict(os.environ, PYTHONPATH=paths, RINGTRAIN_TRANSPORT="auto", OMP_NUM_THREADS="1")
    return subprocess.run(
        command, env=environment, cwd=installed, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )


def test_modules_are_those_of_ringtrain(installed: Path) -> None:
    done = start(installed, sys.executable, "-c", SAME)
    assert done.returncode == 0, done.stderr


def test_a_program_for_horovod_trains_under_horovodrun(installed: Path) -> None:
    done = start(installed, sys.executable, str(installed / "bin/horovodrun"), "-np", "2", sys.executable, "-c", TRAIN)
    assert done.returncode == 0 and done.stdout.count("trained") == 2, done.stdout + done.stderr


def test_the_launcher_is_run_as_a_module_too(installed: Path) -> None:
    done = start(installed, sys.executable, "-m", "horovod.runner.launch", "--version")
    assert done.returncode == 0 and done.stdout == "0.28.1\n", done.stderr


def test_its_build_is_told_in_horovods_layout() -> None:
    said = horovodrun.check_build().splitlines()
    assert said[:3] == ["Horovod v0.28.1:", "", "Available Frameworks:"] and "    [X] PyTorch" in said
    assert "    [ ] MXNet" in said and "    [X] Gloo" in said and "Available Tensor Operations:" in said


@pytest.mark.parametrize(
    "given, own, is_elastic",
    [
        (["-np", "2", "python", "train.py", "-v", "--min-np", "3"], ["-np", "2"], False),
        (["--verbose", "python", "-v"], ["--verbose"], False),
        (
            ["--min-np", "2", "--host-discovery-script", "d", "python", "x"],
            ["--min-np", "2", "--host-discovery-script", "d"],
            True,
        ),
        (["--max-np=4", "-np", "2", "x"], ["--max-np=4", "-np", "2"], True),
        (["--elastic", "--min-np", "2", "x"], ["--elastic", "--min-np", "2"], False),
        (["--version"], ["--version"], False),
    ],
)
def test_what_is_horovodruns_own(given: list[str], own: list[str], is_elastic: bool) -> None:
    assert horovodrun.own_arguments(given) == own
    assert horovodrun.with_elastic(given, own) == ["--elastic"] * is_elastic + given


PLACE = """
import os
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
print(*(os.environ["HOROVOD_" + name] for name in names), bool(os.environ["HOROVOD_HOSTNAME"]))
"""


def test_ranks_know_their_place_under_horovods_names(installed: Path) -> None:
    done = start(installed, sys.executable, str(installed / "bin/horovodrun"), "-np", "2", sys.executable, "-c", PLACE)
    assert sorted(done.stdout.splitlines()) == ["[0] 0 2 0 2 0 1 True", "[1] 1 2 1 2 0 1 True"], (
        done.stdout + done.stderr
    )


def test_horovod_itself_beside_it_is_refused(installed: Path, tmp_path: Path) -> None:
    metadata = tmp_path / "horovod-0.28.1.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    done = start(
        installed, sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r}); import horovod.torch"
    )
    assert done.returncode == 1 and "Horovod 0.28.1 is installed, too. Run pip uninstall" in done.stderr, done.stderr
