"""Every example in docs/examples trains on two ranks, as its own first lines say, and reaches what it should.

Those of NumPy and PyTorch that have a test of their steps elsewhere run on ranks that are threads.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import environments
import pytest
from test_docs import run_on_two_ranks

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PAGES = EXAMPLES.parent
SHORT = [  # from the simplest on
    "numpy_line", "torch_blobs", "digits_amp", "keras_fit", "tensorflow_tape", "jax_line", "local_steps", "embeddings",
    "elastic", "keras_elastic", "elastic_uneven",
]  # fmt: skip
MOST_LINES = 79

pytestmark = pytest.mark.timeout(700)


def run(name: str, *arguments: object, mpi: str = "openmpi", flags: tuple[str, ...] = ()) -> str:
    """What rank 0 of an example prints. flags: ringtrainrun's."""
    python = environments.python_with(mpi)
    command = environments.ringtrainrun(mpi, 2, *flags, python, str(EXAMPLES / f"{name}.py"), *map(str, arguments))
    done = subprocess.run(command, capture_output=True, text=True, env=environments.rank_environment(), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def last(pattern: str, said: str) -> float:
    return float(re.findall(pattern, said)[-1])


def run_in_threads(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What both ranks of an example print."""
    monkeypatch.setattr(sys, "argv", [name])
    run_on_two_ranks((EXAMPLES / f"{name}.py").read_text(), page=name)
    return capsys.readouterr().out


@pytest.mark.parametrize("name, pattern, bound", [
    ("torch_blobs", r"test accuracy ([\d.]+)", -0.95),  # at least
    ("local_steps", r"test loss ([\d.]+)", 0.3),
    ("embeddings", r"step 200: loss ([\d.]+)", 0.05),
    ("elastic", r"epoch 9: loss ([\d.]+)", 0.3),
    ("elastic_uneven", r"epoch 9: largest error of a weight ([\d.]+)", 0.05),
])  # fmt: skip
def test_those_that_are_short_learn(name, pattern, bound, monkeypatch, capsys):
    found = last(pattern, run_in_threads(name, monkeypatch, capsys))
    assert found >= -bound if bound < 0 else found <= bound


def test_the_smallest_program_finds_the_line(monkeypatch, capsys):
    said = run_in_threads("numpy_line", monkeypatch, capsys)
    assert abs(last(r"slope ([\d.]+)", said) - 3) < 0.1 and abs(last(r"offset ([\d.]+)", said) - 1) < 0.1


@pytest.mark.long  # in processes: ranks as threads would share XLA's
def test_jax_learns_a_line():
    assert last(r"step 200: loss ([\d.]+)", run("jax_line", mpi="tcp")) < 0.1


@pytest.mark.long  # its parts are tested in test_launch_elastic and test_torch_constant_batch
def test_elastic_examples_run_as_elastic_jobs(tmp_path):
    flags = ("--elastic", "--batch", "constant")
    assert "host 0 rank 1: 500" in run("elastic_uneven", mpi="tcp", flags=flags)
    assert "epoch 2" in run("elastic", "--epochs", 3, "--folder", tmp_path, mpi="tcp", flags=flags[:1])
    assert "epoch 2" not in run("elastic", "--epochs", 4, "--folder", tmp_path, mpi="tcp", flags=flags[:1])


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
    monkeypatch.chdir(tmp_path)  # Trainer makes a folder where it runs
    flags = ("-x", "LOCAL_RANK=-1") if arguments else ()
    said = run("hugging_face", *arguments, "--epochs", 5, flags=flags)
    assert last(r"test accuracy: ([\d.]+)", said) > 0.5  # guessing: 0.1
    assert "parameters of all ranks are equal" in said


def test_every_example_is_tested():
    sources = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    sources = re.sub(r"^SHORT = .*?^\]", "", sources, flags=re.MULTILINE | re.DOTALL)
    assert all(f'"{path.stem}"' in sources for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", SHORT)
def test_a_short_example_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= MOST_LINES


def rows(page: str) -> dict[str, str]:
    """Of the table in the examples' page: a program, and the page that it belongs to."""
    return dict(re.findall(r"^\| \[\w+\.py\]\(([\w./]+)\) \|.*\]\(([\w./-]+)(?:#[\w-]+)?\) \|$", page, re.MULTILINE))


def unlinked(page: str) -> list[str]:
    """The programs to which the page that they belong to has no link."""
    return [
        program
        for program, about in rows(page).items()
        if f"]({os.path.relpath(EXAMPLES / program, (EXAMPLES / about).resolve().parent)})"
        not in (EXAMPLES / about).read_text()
    ]


def test_each_example_is_linked_from_its_page():
    page = (EXAMPLES / "README.md").read_text()
    assert rows(page).keys() - {"../../examples/quickstart.py"} == {path.name for path in EXAMPLES.glob("*.py")}
    assert [f"{name}.py" for name in SHORT] == list(rows(page))[: len(SHORT)]
    assert unlinked(page) == []


def test_a_page_without_a_link_is_found():
    assert unlinked("| [gan.py](gan.py) | two models | [JAX](../jax.md) |") == ["gan.py"]


@pytest.mark.long  # tables are compared with one process in with_torch
def test_dlrm_learns_clicks():
    """On ranks of their own."""
    said = run("dlrm", "--steps", 300)
    assert last(r"best possible ([\d.]+)", said) > last(r"curve ([\d.]+)", said) > 0.82
