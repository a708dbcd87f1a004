"""`python -m ringtrain.launch` is `ringtrainrun`."""

import sys

from ringtrain.launch.cli import main

sys.exit(main())
