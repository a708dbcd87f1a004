"""What scripts for Horovod import from ``horovod.common.util``: the build probes and a few checks."""

from typing import Any

from ringtrain.probes import ccl_built, cuda_built, ddl_built, gloo_built, mpi_built, nccl_built, rocm_built

__all__ = [
    "ccl_built", "check_extension", "cuda_built", "ddl_built", "extension_available", "gloo_built", "mpi_built",
    "nccl_built", "num_rank_is_power_2", "rocm_built",
]  # fmt: skip


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Returns: the one native library serves every framework, and was loaded when ringtrain was imported."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether ringtrain serves a framework: ``torch`` or ``tensorflow``."""
    return ext_base_name in ("torch", "tensorflow")


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
