"""The smallest program: two ranks fit a line, each to samples of its own.

    ringtrainrun -np 2 python docs/examples/numpy_line.py

It needs NumPy alone. Every rank takes the same step, since the gradient is the average over all of them.
"""

import numpy as np

import ringtrain as rt


def main() -> None:
    rt.init()
    random = np.random.default_rng(rt.rank())  # another seed on each rank: other samples
    x = random.uniform(-1, 1, size=200)
    y = 3 * x + 1 + 0.1 * random.normal(size=200)

    line = np.zeros(2)  # slope and offset, alike on all ranks
    for _ in range(100):
        error = line[0] * x + line[1] - y
        gradient = np.array([np.mean(error * x), np.mean(error)])
        line -= 0.5 * rt.allreduce(gradient, name="gradient")

    if rt.rank() == 0:
        print(f"{rt.size()} ranks: slope {line[0]:.2f}, offset {line[1]:.2f}")
    rt.shutdown()


if __name__ == "__main__":
    main()
