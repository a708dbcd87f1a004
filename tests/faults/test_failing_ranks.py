"""One rank fails in its own way: the others are told which and why, the job ends with its code, and the launcher names it."""

import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
from environments import python_with, rank_environment, ringtrainrun

# How rank 1 ends while the others go on.
PLAIN = """
import os, signal, sys, numpy as np
if way == "import" and os.environ["RINGTRAIN_RANK"] == "1":
    raise ImportError("rank 1 lacks a module")
import ringtrain as rt
rt.init()
rt.allreduce(np.ones(10), name="before")
if rt.rank() == 1:
    if way == "exit":
        sys.exit(3)
    if way == "at once":
        os._exit(7)
    if way == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    if way == "return":
        sys.exit()
rt.allreduce(np.ones(10), name="after")
"""
TORCH = """
import torch, ringtrain.torch as rt
rt.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = rt.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
for step in range(5):
    if step == 3 and rt.rank() == 1:
        raise ValueError("batch 3 is broken")
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
KERAS = """
import keras, numpy as np, ringtrain.keras as rt
rt.init()

class Breaks(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and rt.rank() == 1:
            raise ValueError("batch 3 is broken")

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(rt.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
data = np.ones((64, 4), "float32")
model.fit(data, data[:, :1], batch_size=4, verbose=0, callbacks=[rt.callbacks.BroadcastGlobalVariablesCallback(0), Breaks()])
"""
# Run in the same process, so that what a rank hears is its uncaught exception; an engine may swallow what is printed.
HEAR = """
import os, sys, traceback
earlier, way, folder = sys.excepthook, sys.argv[1], sys.argv[2]
def hear(kind, problem, trace):
    with open(f"{folder}/{os.environ['RINGTRAIN_RANK']}", "w") as heard:
        heard.write(f"{kind.__name__}: {problem}")
    earlier(kind, problem, trace)
sys.excepthook = hear
"""
RAISED = "rank 1 ended with an uncaught exception: ValueError: batch 3 is broken"
LEFT = "allreduce 'after': rank 1 called shutdown() or ended without submitting it"


def run(mpi: str, way: str, program: str, folder: Path) -> tuple[subprocess.CompletedProcess, dict[int, str]]:
    """A job of three ranks, and what each heard."""
    script = folder / "rank.py"
    script.write_text(textwrap.dedent(HEAR) + program)
    heard = folder / "heard"
    heard.mkdir()
    command = ringtrainrun(mpi, 3, python_with(mpi), str(script), way, str(heard))
    done = subprocess.run(
        command, env=rank_environment(TF_CPP_MIN_LOG_LEVEL="3"), timeout=200, capture_output=True, text=True
    )
    return done, {int(path.name): path.read_text() for path in heard.iterdir()}


def is_blamed(rank: int, code: int, done: subprocess.CompletedProcess) -> bool:
    """Whether the launcher's last account is of this rank."""
    said = [line for line in done.stderr.splitlines() if line.startswith("ringtrainrun: ")]
    return said[-1].startswith(f"ringtrainrun: rank {rank} (host ") and f"exit code {code}" in said[-1]


WAYS = {
    # how rank 1 ends: program, exit code of the job, what the others hear if they live that long
    "exit": (PLAIN, 3, LEFT),
    "at once": (PLAIN, 7, "rank 1 on host"),
    "import": (PLAIN, 1, ""),
    "exception in torch": (TORCH, 1, RAISED),
    "exception in keras": (KERAS, 1, RAISED),
}


@pytest.mark.openmpi
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.long if "keras" in way else ()) for way in WAYS])
def test_the_others_hear_which_rank_failed_and_why(way, tmp_path):
    program, code, text = WAYS[way]
    done, heard = run("openmpi", way, program, tmp_path)
    assert done.returncode == code, done.stderr
    assert is_blamed(1, code, done), done.stderr
    others = {rank: words for rank, words in heard.items() if rank != 1}
    assert all(text in words for words in others.values()), others
    if text == RAISED:
        assert set(others) == {0, 2}, done.stderr
        assert "ValueError: batch 3 is broken" in done.stderr.splitlines()[-1]


@pytest.mark.openmpi
def test_a_rank_that_is_interrupted_is_named(tmp_path):
    done, heard = run("openmpi", "interrupted", PLAIN, tmp_path)
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    others = {rank: words for rank, words in heard.items() if rank != 1}
    assert set(others.values()) <= {"PeerLostError: rank 1 ended with an uncaught exception: KeyboardInterrupt"}, others


@pytest.mark.openmpi
def test_a_rank_that_returns_early_is_named_by_those_that_wait_for_it(tmp_path):
    """It has ended well for itself, so the job's failure is theirs; one that hears it from another hears the same words."""
    done, heard = run("openmpi", "return", PLAIN, tmp_path)
    assert done.returncode == 1, done.stderr
    assert heard and all(words.partition(": ")[2].startswith(LEFT) for words in heard.values()), heard
