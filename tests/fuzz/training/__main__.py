"""Runs drawn scripts, and shrinks those that fail.

python -m training FRAMEWORK FIRST COUNT      in tests/fuzz, with tests in PYTHONPATH: the scripts of so many seeds
"""

from __future__ import annotations

import importlib
import logging
import sys
import time

from turns import take_turns_in_tensorflows_dispatcher


def main(framework: str, first: int, count: int) -> int:
    """Prints what fails; returns how many did."""
    logging.getLogger("ringtrain").setLevel(logging.ERROR)
    fuzzer = importlib.import_module(f"training.with_{framework}").FUZZER
    failed, start = 0, time.monotonic()
    take_turns_in_tensorflows_dispatcher()
    for told in fuzzer.failures(range(first, first + count), most_shrunk=count):
        failed += 1
        print(told, flush=True)
    print(f"{count} scripts, {failed} failed, {time.monotonic() - start:.0f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])) > 0)
