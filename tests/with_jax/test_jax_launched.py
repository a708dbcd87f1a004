"""``ringtrain.jax`` on two ranks that the launcher starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from environments import rank_environment, ringtrainrun


@pytest.mark.long
@pytest.mark.tcp  # an MPI's launcher ends the others before they can tell
@pytest.mark.timeout(700)
def test_two_ranks() -> None:
    done = subprocess.run(
        ringtrainrun("tcp", 2, "python", str(Path(__file__).parent / "jax_ranks.py")),
        capture_output=True,
        text=True,
        timeout=600,
        env=rank_environment(RINGTRAIN_DEAD_AFTER_SECONDS="2"),
        stdin=subprocess.DEVNULL,
    )
    said = done.stdout + done.stderr
    assert done.stdout.count("sums are right") == 2, said
    assert "told: " in done.stdout and "rank 1 on host" in done.stdout.split("told: ")[1], said
    last = done.stderr.splitlines()[-1]
    assert done.returncode != 0 and "because of another rank: rank 1 on host" in last, said


PARTS = """
import jax, jax.numpy as jnp, optax
import ringtrain.jax as hvd

hvd.init()
optimizer = hvd.DistributedGradientTransformation(optax.sgd(0.1))
weights = jnp.array([1.0, float(hvd.rank())])
state = optimizer.init(weights)

@jax.jit
def step(weights, state):
    updates, state = optimizer.update(jax.grad(lambda w: (w * w).sum())(weights), state, weights)
    return optax.apply_updates(weights, updates), state

for _ in range(5):
    weights, state = step(weights, state)
print(weights.sum())
"""


@pytest.mark.tcp
@pytest.mark.timeout(700)
def test_replicas_that_part_in_a_program_are_told_in_one_sentence(tmp_path: Path) -> None:
    """Behind the frame of the script; JAX logs its own stacks before that."""
    program = tmp_path / "train.py"
    program.write_text(PARTS)
    command = ringtrainrun("tcp", 2, sys.executable, str(program))
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=rank_environment())
    said = [line.removeprefix("[0] ") for line in done.stderr.splitlines() if line.startswith("[0] ")]
    place = max(place for place, line in enumerate(said) if line.startswith(f'  File "{program}"'))
    assert any(line.startswith("ringtrain.errors.MismatchError: step 'gradients'") for line in said[place:]), (
        done.stderr
    )
    assert "JaxRuntimeError" not in "".join(said[place:]), done.stderr
