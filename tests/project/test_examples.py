"""Every example in docs/examples trains on two ranks, as its own first lines say, and reaches what it should."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import environments
import pytest

pytest.importorskip("torch", reason="needs torch")
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

pytestmark = pytest.mark.timeout(240)


def run(name: str, *arguments: object, mpi: str = "openmpi", flags: tuple[str, ...] = ()) -> str:
    """What rank 0 of an example prints. flags: ringtrainrun's."""
    python = environments.python_with(mpi)
    command = environments.ringtrainrun(mpi, 2, *flags, python, str(EXAMPLES / f"{name}.py"), *map(str, arguments))
    done = subprocess.run(command, capture_output=True, text=True, env=environments.rank_environment(), timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def last(pattern: str, said: str) -> float:
    return float(re.findall(pattern, said)[-1])


@pytest.mark.long  # its steps are those of test_torch_amp
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_digits_in_mixed_precision(dtype):
    said = run("digits_amp", "--dtype", dtype, "--epochs", 5)
    assert last(r"test accuracy ([\d.]+)", said) > 0.9
    assert last(r"scale ([\d.e+]+)", said) >= (1 if dtype == "bfloat16" else 1024)


@pytest.mark.long  # what resumes is compared in test_resuming, too
def test_gpt_resumes_with_the_same_bits(tmp_path):
    whole = run("gpt", "--steps", 25, "--save-every", 12, "--folder", tmp_path)
    resumed = run("gpt", "--steps", 25, "--resume", tmp_path / "checkpoint-12.pt")
    after = r"step 20: .*|parameters after step 25: .*"
    assert len(re.findall(after, whole)) == 2 and re.findall(after, whole) == re.findall(after, resumed)
    assert last(r"loss ([\d.]+)", whole) < 5.0  # guessing costs the logarithm of 256, 5.5


@pytest.mark.long  # its steps are those of test_torch_gan
def test_gan_finds_the_modes():
    assert last(r"(\d) of 8 modes", run("gan", "--steps", 400, "--report-every", 200)) >= 6


@pytest.mark.parametrize("arguments", [pytest.param((), id="own loop"), pytest.param(("--trainer",), id="Trainer")])
@pytest.mark.long  # every run has Accelerate, in with_torch
def test_hugging_face(arguments, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="needs transformers")
    if arguments:
        pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    monkeypatch.chdir(tmp_path)  # Trainer makes a folder where it runs
    flags = ("-x", "LOCAL_RANK=-1") if arguments else ()
    said = run("hugging_face", *arguments, "--epochs", 5, flags=flags)
    assert last(r"test accuracy: ([\d.]+)", said) > 0.5  # guessing: 0.1
    assert "parameters of all ranks are equal" in said


def test_every_example_is_tested():
    sources = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert all(f'"{path.stem}' in sources for path in EXAMPLES.glob("*.py"))


@pytest.mark.long  # tables are compared with one process in with_torch
def test_dlrm_learns_clicks():
    """On ranks of their own."""
    said = run("dlrm", "--steps", 300)
    assert last(r"best possible ([\d.]+)", said) > last(r"curve ([\d.]+)", said) > 0.82
