"""``ringtrain doctor --speed``: what a script's ranks compute, and what shares by speed would bring."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from environments import python_with, rank_environment

from ringtrain._runtime.statistics import Share
from ringtrain.launch.doctor_speed import Speeds, speed_report

TRAINING = """
import time
import numpy as np
import ringtrain as rt, ringtrain.elastic
rt.init()
sampler = rt.elastic.BatchSampler(12, batch_size=6)
state = rt.elastic.State(weights=np.zeros(3), sampler=sampler)
for epoch in state.epochs(EPOCHS):
    for indices in sampler:
        time.sleep(0.005 * len(indices) * (1 + 3 * rt.rank()))
        state.weights -= state.allreduce(np.ones(3), name="gradient")
"""


def doctor(folder: Path, epochs: int, *flags: str) -> subprocess.CompletedProcess:
    script = folder / "train.py"
    script.write_text(TRAINING.replace("EPOCHS", str(epochs)))
    line = [
        python_with("tcp"),
        "-m",
        "ringtrain.launch.commands",
        "doctor",
        *flags,
        "--",
        python_with("tcp"),
        str(script),
    ]
    return subprocess.run(line, capture_output=True, text=True, timeout=280, env=rank_environment())


@pytest.mark.tcp
def test_a_slow_rank_is_found(tmp_path: Path) -> None:
    done = doctor(tmp_path, 100_000, "--speed", "--json", str(tmp_path / "found"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("a batch of 12 samples\n") and "+" in done.stdout.splitlines()[-1], done.stdout
    shares = json.loads((tmp_path / "found").read_text())["shares"]
    assert [rank for rank, *_ in shares] == [0, 1] and shares[0][2] > 1.5 * shares[1][2], shares


@pytest.mark.tcp
def test_a_script_that_ends_too_soon(tmp_path: Path) -> None:
    done = doctor(tmp_path, 1, "--speed")
    assert done.returncode == 1 and "must train for some 10 s at least, but has ended with code 0" in done.stderr


@pytest.mark.tcp
def test_a_script_that_fails() -> None:
    python = python_with("tcp")
    line = [
        python,
        "-m",
        "ringtrain.launch.commands",
        "doctor",
        "--speed",
        "--",
        python,
        "-c",
        "import sys; sys.exit(3)",
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280, env=rank_environment())
    assert (
        done.returncode == 1 and "the script must train, but has failed with code 3. Its error is above" in done.stderr
    )
    assert "--resume" not in done.stderr


@pytest.mark.tcp
def test_a_command_and_the_flag_come_together(tmp_path: Path) -> None:
    done = doctor(tmp_path, 1)
    assert done.returncode == 2 and "--speed must come with a command" in done.stderr


@pytest.mark.parametrize(
    "speeds, lines",
    [
        (
            [10.0, 20.0, 40.0],
            ["   2         40     85       147  b", "balanced shares are +134 %: ringtrainrun --elastic --batch balanced"],
        ),
        ([10.0, 10.0, 10.2], ["balanced shares are +1 %: equal shares do"]),
    ],
)  # fmt: skip
def test_what_people_read(speeds: list[float], lines: list[str]) -> None:
    shares = [
        Share(rank, samples, speed) for rank, (samples, speed) in enumerate(zip([86, 85, 85], speeds, strict=True))
    ]
    said = speed_report(Speeds(shares, ["a", "a", "b"]))
    assert all(line in said for line in lines), said
