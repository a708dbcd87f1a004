"""Of which kind this host's processor is."""

import os
import platform
from pathlib import Path


def kind_of_processor() -> str:
    """What the kernel calls it, such as ``AMD EPYC 9R14``; the architecture where it has no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # a container may have processes alone in /proc
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def kind_with_cores(library: str, gpu: str | None) -> str:
    """What the bits of a library depend on that divides sums among cores: processor or GPU, its release, and how many cores."""
    return f"{gpu or kind_of_processor()}, {library}, {len(os.sched_getaffinity(0))} cores"
