"""tests/sitecustomize.py spares PyTorch what it needs for nothing, and nobody else.

What TensorFlow is spared ``with_tensorflow/test_tensorflow_alone.py`` asks.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTORCH = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(model.parameters(), 0.1)

def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).square().sum()
    loss.backward()
    return loss

losses = [float(optimizer.step(closure)) for _ in range(3)]
optimizer.load_state_dict(optimizer.state_dict())
assert losses[2] < losses[0] and torch.is_grad_enabled()
print("torch._dynamo" in sys.modules)
"""

COMPILED = """
import torch, torch._dynamo
from torch._dynamo.utils import counters
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def step():
    optimizer.zero_grad()
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()

compiled = torch.compile(step, backend="eager")
for _ in range(3):
    compiled()
print(sorted(counters["graph_break"].values()), sorted(counters["stats"].items()), model.weight.tolist())
"""

KERAS_ON_PYTORCH = """
import keras, sys
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
model.compile(keras.optimizers.SGD(0.1), "mse")
x = keras.random.normal((8, 3), seed=1)
model.fit(x, x[:, :2], batch_size=4, verbose=0)
model.save("model.keras")
assert keras.models.load_model("model.keras").count_params() == 8
print([name for name in ("torch._dynamo", "tensorflow") if name in sys.modules])
import tensorflow, torch._dynamo
assert callable(torch._dynamo.optimize) and tensorflow.constant(1)
"""


def said(program: str, folder: Path | None = None, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **variables}
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_optimizer_of_pytorch_steps_without_the_compiler():
    assert said(PYTORCH) == "False\n"


@pytest.mark.long
def test_keras_on_pytorch_saves_and_draws_without_the_compiler_and_tensorflow(tmp_path: Path):
    """And finds both where it imports them."""
    assert said(KERAS_ON_PYTORCH, tmp_path, KERAS_BACKEND="torch") == "[]\n"


@pytest.mark.long
def test_the_compiler_meets_pytorch_as_it_is():
    assert said(COMPILED) == said(COMPILED, PYTHONPATH="")
