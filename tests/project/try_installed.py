"""Tries the ringtrain that is installed for this Python: ranks as threads, then a job of two processes that trains.

    python tests/project/try_installed.py

cibuildwheel runs it for each wheel and Python, and test_packaging.py and test_wheel.py where there is no compiler. It needs
nothing but what the package requires.
"""

from __future__ import annotations

import subprocess
import sys

import numpy

import ringtrain
from ringtrain.testing import World

# Descends along the gradient of all ranks' samples, as one process would along that of all of them.
TRAIN = """
import numpy as np, ringtrain as rt
rt.init()
samples = np.arange(8.0).reshape(2, 4)
mine, weight, whole = samples[rt.rank()], np.zeros(1), np.zeros(1)
for step in range(20):
    weight -= 0.1 * rt.allreduce(np.array([2 * (weight - mine).mean()]), "gradient", op=rt.Average)
    whole -= 0.1 * 2 * (whole - samples).mean()
assert rt.size() == 2 and np.allclose(weight, whole) and abs(weight[0] - 3.5) < 0.1, (weight, whole)
print("trained")
"""


def sums_of_two_threads() -> list[list[float]]:
    """What two ranks in this process get of an allreduce of ones."""
    return World(2).run(lambda rank: ringtrain.allreduce(numpy.ones(3, "float32"), op=ringtrain.Sum).tolist())


def main() -> None:
    """Ends with an error at the first thing that does not work."""
    sums = sums_of_two_threads()
    assert sums == [[2.0, 2.0, 2.0]] * 2, sums
    launcher = [sys.executable, "-m", "ringtrain.launch", "-np", "2"]
    said = subprocess.run([*launcher, sys.executable, "-c", TRAIN], capture_output=True, text=True, timeout=300)
    assert said.returncode == 0 and said.stdout.count("trained") == 2, said.stdout + said.stderr
    print(f"ringtrain {ringtrain.__version__} in {ringtrain.__file__} works with Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
