"""The examples of Keras and TensorFlow train on two ranks; a run that resumes ends with the same bits."""

import pytest
from test_examples import last, run, run_in_threads

pytestmark = pytest.mark.timeout(300)


def test_fit_learns(monkeypatch, capsys):
    assert last(r"epoch 7: loss ([\d.]+)", run_in_threads("keras_fit", monkeypatch, capsys)) < 0.03


def test_a_tape_learns(monkeypatch, capsys):
    assert last(r"epoch 9: loss ([\d.]+)", run_in_threads("tensorflow_tape", monkeypatch, capsys)) < 0.03


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
