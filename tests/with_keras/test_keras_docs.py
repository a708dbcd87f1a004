"""The programs of docs/keras.md run on two ranks, on each backend; those of docs/migrate-from-tf-strategies.md as in one process."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_docs import blocks, run_on_two_ranks, versions

PAGE = "migrate-from-tf-strategies.md"


def in_one_process(weights, data_of_ranks, rate, change):
    """A linear layer after a step for each batch, by the mean of the ranks' gradients of the mean square."""
    kernel, bias = (weight.astype(np.float64) for weight in weights)
    for of_step in zip(*data_of_ranks, strict=True):
        of_kernel, of_bias = [], []
        for x, y in ((x.numpy(), y.numpy()) for x, y in of_step):
            error = 2 * (x @ kernel + bias - y) / len(x)
            of_kernel.append(x.T @ error)
            of_bias.append(error.sum(0))
        gradients = change([np.mean(of_kernel, axis=0), np.mean(of_bias, axis=0)])
        kernel, bias = kernel - rate * gradients[0], bias - rate * gradients[1]
    return kernel, bias


def clipped(gradients):
    norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
    return [gradient / max(norm, 1.0) for gradient in gradients]


def test_migration_from_strategies():
    program, commands = blocks(PAGE, "diff")
    before, after = versions(program)
    compile(before, PAGE, "exec")
    steps, clips = blocks(PAGE, "python")
    head, loop = steps.split("\nfor x, y in data:")
    fixed = "data = list(data)  # which would shuffle anew\n"
    noted = "{} = model.get_weights()\n"
    first, second = run_on_two_ranks(
        after, fixed, head, noted.format("begin"), f"for x, y in data:{loop}", noted.format("middle"), clips, page=PAGE
    )
    middle = in_one_process(first["begin"], [first["data"], second["data"]], 0.02, lambda gradients: gradients)
    for expected, found in zip(middle, first["middle"], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    end = in_one_process(first["middle"], [first["data"], second["data"]], 0.01, clipped)
    for expected, found in zip(end, first["model"].get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(first["model"].get_weights(), second["model"].get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert first["norms"] == second["norms"] and int(first["optimizer"].iterations) == 4
    assert versions(commands)[1].startswith("ringtrainrun -np 2")


def test_keras_equals_one_process():
    """The page's program compares; here too, whether it has trained at all."""
    program = blocks("one-process.md", "python")[1]
    compared = "\nbegun = alone.get_weights()\nmodel.compile("
    first, second = run_on_two_ranks(program.replace("\nmodel.compile(", compared), page="one-process.md")
    for mine, theirs, begun in zip(
        first["model"].get_weights(), second["model"].get_weights(), first["begun"], strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
        assert abs(mine - begun).max() > 1e-3


KERAS_PAGE = "keras.md"
# By backend, what of the page runs on it: the place of each program.
PROGRAMS = {"tensorflow": (0, 1, 2, 3, 5), "torch": (0, 1, 2, 4, 5), "jax": (0, 1, 2)}


def try_the_page(backend: str) -> None:
    """The programs of the page for the backend of this process, one after the other; ranks then have the same weights."""
    import keras

    assert keras.backend.backend() == backend
    programs = blocks(KERAS_PAGE, "python")
    assert {*range(len(programs))} == {place for places in PROGRAMS.values() for place in places}
    chosen = [programs[place] for place in PROGRAMS[backend]]
    first, second = run_on_two_ranks(*chosen, page=KERAS_PAGE)
    for mine, theirs in zip(first["model"].get_weights(), second["model"].get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert first["callbacks"]


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "backend", ["tensorflow", *(pytest.param(each, marks=pytest.mark.long) for each in ("torch", "jax"))]
)
def test_the_page_about_keras(backend, tmp_path):
    """In a process of its own, since Keras has one backend in each, and the page sets a policy."""
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join(map(str, (tests.parent, tests, tests / "project", tests / "with_keras")))
    environment = dict(os.environ, KERAS_BACKEND=backend, PYTHONPATH=paths, OMP_NUM_THREADS="1")
    program = f"import test_keras_docs; test_keras_docs.try_the_page({backend!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "epoch-02.keras").exists()
