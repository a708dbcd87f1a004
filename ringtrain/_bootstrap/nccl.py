"""Where NCCL may lie that a search of the system would not find: in a wheel from PyPI, or in conda's folder.

``start`` has the place suggested to the core, which prefers what option ``nccl_lib`` names, and then an NCCL that the
process has loaded already: two of them in one process know nothing of each other's launches. ``libraries`` tells what
the core found, the driver included.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Mapping

from ringtrain._binding import options
from ringtrain._binding._native import lib, take_answer

_LIBRARY = "libnccl.so.2"


@functools.cache
def suggested_path() -> str:
    """The library's path, or "" if it is in none of these places; nothing is loaded."""
    folders = [*_wheel_folders(), os.path.join(sys.prefix, "lib")]
    return next((path for path in (os.path.join(folder, _LIBRARY) for folder in folders) if os.path.exists(path)), "")


def suggest(environment: Mapping[str, str]) -> None:
    """Names a file of NCCL to take if the process has none and the user named none; before the first tensor on a GPU.

    Args:
        environment: what ``NCCL_SOCKET_IFNAME`` says in it is for the texts of NCCL's errors.
    """
    lib.rt_suggest_nccl(os.fsencode(suggested_path()), os.fsencode(environment.get("NCCL_SOCKET_IFNAME", "")))


def libraries(chosen: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Version and path of each GPU library that was found, or "" and what is wrong; loads them.

    Args:
        chosen: options, of which ``cuda_lib`` and ``nccl_lib`` count.
    """
    suggest(options.environment())
    paths = (os.fsencode(chosen.get(name, "")) for name in ("cuda_lib", "nccl_lib"))
    lines = take_answer(lib.rt_gpu_libraries(*paths)).splitlines()
    return {name: (version, path) for name, version, path in (line.split("|", 2) for line in lines)}


def _wheel_folders() -> list[str]:
    """Of nvidia-nccl-cu12 and -cu13, which share one place; PyTorch for CUDA brings it along."""
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return []
    return [] if package is None else [os.path.join(place, "lib") for place in package.submodule_search_locations or []]
