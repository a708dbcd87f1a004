"""The command line under ``ringtrain.runner.launch``, as programs for Horovod call it."""

from ringtrain.launch.cli import main
from ringtrain.launch.horovodrun import run_commandline

__all__ = ["main", "run_commandline"]

if __name__ == "__main__":
    run_commandline()
