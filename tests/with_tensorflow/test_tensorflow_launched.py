"""ringtrain.tensorflow with ranks as processes, under each MPI; one start for all checks, as imports take seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from environments import EACH_MPI, rank_environment, ringtrainrun


@EACH_MPI  # the operations know no MPI
@pytest.mark.timeout(200)
def test_two_ranks(mpi: str) -> None:
    script = Path(__file__).parent / "tensorflow_ranks.py"
    done = subprocess.run(
        ringtrainrun(mpi, 2, "python", str(script)),
        capture_output=True,
        text=True,
        timeout=180,
        env=rank_environment(TF_CONFIG='{"cluster": {}}', TF_CPP_MIN_LOG_LEVEL="3"),
        stdin=subprocess.DEVNULL,
    )
    said = done.stdout + done.stderr
    assert {"[0] weight 1.494140625", "[1] weight 1.494140625"} <= set(done.stdout.splitlines()), said
    assert said.count("TF_CONFIG is set, and ignored") == 1, said
    assert "rank 0 raised the cause" in done.stdout, said
    assert done.returncode != 0 and "LookupError: this batch is broken" in done.stderr


PARTS = """
import tensorflow as tf
import ringtrain.tensorflow as hvd

hvd.init()
weights = tf.Variable([1.0, float(hvd.rank())])

@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights * weights)
    weights.assign_sub(0.01 * hvd.DistributedGradientTape(tape).gradient(loss, [weights])[0])

def train():
    for _ in range(30):
        step()

train()
"""


@pytest.mark.tcp
@pytest.mark.timeout(200)
def test_replicas_that_part_in_a_graph_are_told_in_one_sentence(tmp_path: Path) -> None:
    """Under the frames of the program, and without those of TensorFlow."""
    program = tmp_path / "train.py"
    program.write_text(PARTS)
    done = subprocess.run(
        ringtrainrun("tcp", 2, sys.executable, str(program)),
        capture_output=True, text=True, timeout=180, env=rank_environment(TF_CPP_MIN_LOG_LEVEL="3"),
    )  # fmt: skip
    said = [line.removeprefix("[0] ") for line in done.stderr.splitlines() if line.startswith("[0] ")]
    begin = said.index("Traceback (most recent call last):")
    frames = [place for place, line in enumerate(said) if place > begin and line.startswith("  File")]
    assert [said[place].partition(", in ")[2] for place in frames][:2] == ["<module>", "train"], done.stderr
    assert said[frames[1] + 2].startswith("ringtrain.errors.MismatchError: step 'step/grad': parameter 'Variable:0'")
    assert "Detected at node" not in done.stderr and "script_ops.py" not in done.stderr, done.stderr
