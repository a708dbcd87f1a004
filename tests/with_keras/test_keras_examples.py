"""The examples of Keras and TensorFlow train on two ranks; a run that resumes ends with the same bits."""

import pytest
from test_examples import last, run, run_in_threads


def test_fit_learns(monkeypatch, capsys):
    assert last(r"epoch 7: loss ([\d.]+)", run_in_threads("keras_fit", monkeypatch, capsys)) < 0.03


def test_a_tape_learns(monkeypatch, capsys):
    assert last(r"epoch 9: loss ([\d.]+)", run_in_threads("tensorflow_tape", monkeypatch, capsys)) < 0.03


@pytest.mark.long  # its parts are tested in test_elastic_frameworks
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_an_elastic_fit_learns_and_resumes(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    arguments = ("--folder", tmp_path)
    said = run("keras_elastic", "--epochs", 6, *arguments, mpi="tcp", flags=("--elastic",))
    assert last(r"epoch 5: loss ([\d.]+)", said) < 0.1 and last(r"of other samples ([\d.]+), on 2 ranks", said) < 0.1
    said = run("keras_elastic", "--epochs", 8, *arguments, mpi="tcp", flags=("--elastic",))
    assert "epoch 5" not in said and "epoch 6" in said and last(r"epoch 7: loss ([\d.]+)", said) < 0.1


@pytest.mark.long  # what resumes is compared in test_keras_files, too
def test_fit_saves_resumes_and_ends_with_the_same_bits(tmp_path):
    whole = run("keras_digits", "--epochs", 4, "--folder", tmp_path)
    resumed = run("keras_digits", "--epochs", 4, "--resume", tmp_path / "epoch-02.keras")
    assert last(r"test accuracy ([\d.]+)", whole) > 0.85
    assert len(whole.splitlines()) == 6 and whole.splitlines()[2:] == resumed.splitlines()


@pytest.mark.long  # its steps are those of test_tensorflow_training
def test_a_loop_with_the_tape():
    said = run("keras_digits", "--loop", "--epochs", 3)
    assert last(r"test accuracy ([\d.]+)", said) > 0.8 and len(said.splitlines()) == 5
