"""The class under ``ringtrain.common.basics`` through which programs for Horovod reach a world's basics.

Horovod makes an object of it for each framework's library. Here one native library serves them all, so every object
says the same as the functions of ``ringtrain``.
"""

from typing import Any

import ringtrain
from ringtrain._bootstrap import probes

__all__ = ["HorovodBasics"]

_FUNCTIONS = {
    **{name: getattr(ringtrain, name) for name in (
        "init", "shutdown", "is_initialized", "start_timeline", "stop_timeline", "size", "local_size", "cross_size", "rank",
        "local_rank", "cross_rank", "is_homogeneous",
    )},
    **{name: getattr(probes, name) for name in (
        "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built", "ddl_built",
        "ccl_built", "cuda_built", "rocm_built",
    )},
}  # fmt: skip


class HorovodBasics:
    """The basics as methods, and the reductions as attributes.

    Args:
        pkg_path: accepted for Horovod's sake, as is what follows: there is no library to look for.
    """

    Average, Sum, Adasum = ringtrain.Average, ringtrain.Sum, ringtrain.Adasum
    Min, Max, Product = ringtrain.Min, ringtrain.Max, ringtrain.Product
    locals().update({name: staticmethod(function) for name, function in _FUNCTIONS.items()})

    def __init__(self, pkg_path: str = "", *args: Any):
        pass
