"""What Horovod's own tests import of ``horovod.runner.common``."""
