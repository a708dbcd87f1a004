"""Of which kind this host's processor is."""

import platform
from pathlib import Path


def kind_of_processor() -> str:
    """What the kernel calls it, such as ``AMD EPYC 9R14``; the architecture where it has no name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
