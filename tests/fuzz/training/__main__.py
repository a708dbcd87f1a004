"""Runs drawn scripts, and shrinks those that fail.

python -m training FIRST COUNT      in tests/fuzz, with tests in PYTHONPATH: the scripts of so many seeds
"""

from __future__ import annotations

import logging
import sys
import time

from training.perform import shrunk, verdict
from training.script import drawn


def kind(told: str) -> str:
    """What a failure has in common with those that are likely the same."""
    return told.partition(":")[0]


def main(first: int, count: int) -> int:
    """Prints what fails; returns how many did."""
    logging.getLogger("ringtrain").setLevel(logging.ERROR)
    failed, start = 0, time.monotonic()
    for seed in range(first, first + count):
        if told := verdict(drawn(seed)):
            failed += 1
            script, said = shrunk(drawn(seed), kind)
            print(f"seed {seed}: {told}\n  shrunk: {said}\n  {script}", flush=True)
    print(f"{count} scripts, {failed} failed, {time.monotonic() - start:.0f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
