"""The command line under ``ringtrain.runner.launch``, as programs for Horovod call it."""

import sys

from ringtrain.launch.cli import main

__all__ = ["main", "run_commandline"]


def run_commandline() -> None:
    """Runs ``ringtrainrun`` with this process's arguments, and ends the process with its exit code."""
    sys.exit(main())


if __name__ == "__main__":
    run_commandline()
