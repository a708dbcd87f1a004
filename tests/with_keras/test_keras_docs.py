"""The programs of docs/keras.md run on two ranks, on each backend; those of docs/migrate-from-tf-strategies.md as in one process;
those of Keras in docs/elastic-frameworks.md without an elastic job.
"""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from test_docs import blocks, run_on_two_ranks, versions
from test_doctests import NAMES

from ringtrain.errors import InvalidArgumentError

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


ELASTIC_PAGE = "elastic-frameworks.md"
GIVEN = f"""{NAMES["keras"]}
x_test, y_test = x[:50], y[:50]
model.run_eagerly = True  # in a graph threads of TensorFlow, which are no ranks, call
"""


def run_elastic(*programs, epochs=2):
    """Programs of the page in a job that is not elastic, on ranks that are threads, for fewer epochs."""
    whole = "\n".join(programs).replace("epochs=90", f"epochs={epochs}").replace('"mse")', '"mse", run_eagerly=True)')
    first, second = run_on_two_ranks(GIVEN, whole, page=ELASTIC_PAGE)
    for mine, theirs in zip(first["model"].get_weights(), second["model"].get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    return first["model"].history


def test_elastic_fits():
    """As the page has them: with data of each rank, and with those of a sampler."""
    plain, *_, with_sampler, _, _ = blocks(ELASTIC_PAGE, "python")
    assert run_elastic(plain).epoch == run_elastic(with_sampler).epoch == [0, 1]


@pytest.mark.long
@pytest.mark.timeout(700)
def test_an_elastic_fit_with_a_validation(tmp_path):
    """In processes: a sampler of no state is asked by a thread of TensorFlow, which is no rank."""
    *_, with_sampler, with_validation, _ = blocks(ELASTIC_PAGE, "python")
    program = with_sampler.partition("model.fit(")[0] + with_validation.replace("epochs=90", "epochs=2")
    ends = "\nassert model.history.epoch == [0, 1] and len(model.history.history['val_loss']) == 2\n"
    (tmp_path / "train.py").write_text(f"{GIVEN}hvd.init()\n{program}{ends}")
    command = ["-m", "ringtrain.launch", "--elastic", "-np", "2", sys.executable, str(tmp_path / "train.py")]
    environment = dict(os.environ, OMP_NUM_THREADS="1", RINGTRAIN_TRANSPORT="auto")
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_elastic_fit_that_begins_anew(tmp_path):
    program = blocks(ELASTIC_PAGE, "python")[-1].replace("/shared/checkpoints", str(tmp_path))
    assert run_elastic(program).epoch == [0, 1]
    assert run_elastic(program, epochs=3).epoch == [2]


def test_an_epoch_that_was_asked_for_before_resume_is_refused(tmp_path):
    program = blocks(ELASTIC_PAGE, "python")[-1].replace("/shared/checkpoints", str(tmp_path))
    run_elastic(program)
    early = program.replace("elastic.resume(", "first = elastic.epoch\nelastic.resume(")
    early = early.replace("=elastic.epoch", "=first")
    with pytest.raises(InvalidArgumentError, match="initial_epoch must be that of the state, 2, but is 0"):
        run_elastic(early, epochs=3)


KERAS_PAGE = "keras.md"
# By backend, what of the page runs on it: the place of each program.
PROGRAMS = {"tensorflow": (0, 1, 2, 3, 5), "torch": (0, 1, 2, 4, 5), "jax": (0, 1, 2)}


def try_the_page(backend: str) -> None:
    """The programs of the page for the backend of this process, one after the other; ranks then have the same weights."""
    assert keras.backend.backend() == backend
    programs = blocks(KERAS_PAGE, "python")
    assert {*range(len(programs))} == {place for places in PROGRAMS.values() for place in places}
    chosen = [programs[place] for place in PROGRAMS[backend]]
    first, second = run_on_two_ranks(*chosen, page=KERAS_PAGE)
    for mine, theirs in zip(first["model"].get_weights(), second["model"].get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert first["callbacks"]


def test_the_page_about_keras(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = keras.config.dtype_policy()
    try:
        try_the_page("tensorflow")
    finally:
        keras.config.set_dtype_policy(policy)
    assert (tmp_path / "epoch-02.keras").exists()


@pytest.mark.long
@pytest.mark.timeout(700)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_page_about_keras_on_other_backends(backend, tmp_path):
    """In a process of its own, since Keras has one backend in each."""
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join(map(str, (tests.parent, tests, tests / "project", tests / "with_keras")))
    environment = dict(os.environ, KERAS_BACKEND=backend, PYTHONPATH=paths, OMP_NUM_THREADS="1")
    program = f"import test_keras_docs; test_keras_docs.try_the_page({backend!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "epoch-02.keras").exists()
