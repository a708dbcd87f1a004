"""The wheel that bin/wheel makes: its tag, its audits, the same bytes twice, and ranks that train where there is no compiler."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from test_packaging import clean_checkout, run

ROOT = Path(__file__).parents[2]
# Two ranks against one process, as docs/training.md has it.
TRAIN = """
import torch, ringtrain.torch as hvd
hvd.init()
torch.set_num_threads(1)
def train(samples, distributed):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(20):
        optimizer.zero_grad()
        (model(samples) - samples.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return model.weight.detach()
samples = torch.arange(32.0).reshape(8, 4) / 32
mine, alone = train(samples[hvd.rank() :: hvd.size()], True), train(samples, False)
assert hvd.size() == 2 and torch.allclose(mine, alone, atol=1e-6), (mine, alone)
print("trained")
"""
WHAT_TYPES_SAY = "import ringtrain\nreveal_type(ringtrain.rank())\nringtrain.rank() + 'one'\n"

pytestmark = [pytest.mark.packaging, pytest.mark.long, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What bin/wheel makes of a clean copy."""
    return make(tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("tools") / "v")


def make(folder: Path, tools: Path, *flags: str, mask: int = 0o022) -> Path:
    """Runs bin/wheel in a clean copy of the checkout, and compiles everything anew."""
    checkout, into = clean_checkout(folder), folder / "dist"
    before = os.umask(mask)
    try:
        run(checkout / "bin" / "wheel", *flags, into, cwd=checkout, RINGTRAIN_VENV=str(tools), PYTHON=sys.executable,
            CCACHE_DISABLE="1")  # fmt: skip
    finally:
        os.umask(before)
    return into


def wheel_in(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


def test_its_tag_says_which_systems_it_is_for(dist: Path) -> None:
    """All whose C library is as old as the symbols that are used, and no older than this machine's."""
    matched = re.fullmatch(r"ringtrain-[\d.]+-cp310-abi3-manylinux_2_(\d+)_(\w+)\.whl", wheel_in(dist).name)
    assert matched and matched[2] == platform.machine(), wheel_in(dist).name
    assert int(matched[1]) <= int(platform.libc_ver()[1].split(".")[1])


def test_the_same_files_give_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    """In a folder of another name and length, by somebody whose files nobody else may read."""
    again = make(tmp_path / "some other folder", tmp_path / "tools", mask=0o077)
    assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in dist.iterdir())
    for path in dist.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_it_trains_where_there_is_no_compiler(dist: Path, tmp_path: Path) -> None:
    """In an empty environment, with a PATH that has no program but Python's."""
    venv.create(tmp_path / "v", with_pip=True)
    programs = tmp_path / "v" / "bin"
    bare = {"PATH": str(programs), "CC": "/bin/false", "CXX": "/bin/false", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    constraints = ["--constraint", ROOT / "tests" / "constraints.txt"]
    run(programs / "python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *constraints,
        f"{wheel_in(dist)}[torch]", cwd=tmp_path, **bare)  # fmt: skip
    said = run(programs / "python", ROOT / "tests/project/try_installed.py", cwd=tmp_path, **bare)
    assert f"in {tmp_path}" in said, said
    (tmp_path / "train.py").write_text(TRAIN)
    said = run(programs / "ringtrainrun", "-np", "2", "python", "train.py", cwd=tmp_path, **bare)
    assert said.count("trained") == 2, said
    # Its annotations are read where it is installed.
    (tmp_path / "typed.py").write_text(WHAT_TYPES_SAY)
    line = [sys.executable, "-m", "mypy", "--python-executable", programs / "python", "typed.py"]
    told = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True).stdout
    assert 'Revealed type is "int"' in told.replace("builtins.", "") and "Unsupported operand types" in told, told


def test_an_older_c_library_can_be_chosen(tmp_path: Path) -> None:
    """By Zig's compiler: a tag as old as that of the wheels that are published, or older."""
    into = make(tmp_path, tmp_path / "tools", "--glibc", "2.28")
    wheel = wheel_in(into)
    matched = re.search(rf"-cp310-abi3-manylinux_2_(\d+)_{platform.machine()}\.whl$", wheel.name)
    assert matched and int(matched[1]) <= 28, wheel.name
    venv.create(tmp_path / "v", with_pip=True)
    python = tmp_path / "v" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel, PYTHONPATH="")
    said = run(python, ROOT / "tests/project/try_installed.py", cwd=tmp_path, OMP_NUM_THREADS="1", PYTHONPATH="")
    assert f"in {tmp_path}" in said, said
