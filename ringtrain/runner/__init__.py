"""``run`` and the command line where Horovod's scripts import them from: ``horovod.runner`` and ``horovod.runner.launch``."""

from ringtrain.launch.function import run

__all__ = ["run"]
