"""Where NCCL may lie that a search of the system would not find: in a wheel from PyPI, or in conda's folder.

``context`` suggests the place to the core, which prefers what option ``nccl_lib`` names, and then an NCCL that the process
has loaded already: two of them in one process know nothing of each other's launches.
"""

import functools
import importlib.util
import os
import sys

_LIBRARY = "libnccl.so.2"


@functools.cache
def suggested_path() -> str:
    """The library's path, or "" if it is in none of these places; nothing is loaded."""
    folders = [*_wheel_folders(), os.path.join(sys.prefix, "lib")]
    return next((path for path in (os.path.join(folder, _LIBRARY) for folder in folders) if os.path.exists(path)), "")


def _wheel_folders() -> list[str]:
    """Of nvidia-nccl-cu12 and -cu13, which share one place; PyTorch for CUDA brings it along."""
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    return [] if package is None else [os.path.join(place, "lib") for place in package.submodule_search_locations or []]
