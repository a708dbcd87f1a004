"""What this installation can use and what this process uses, under the names that Horovod's scripts branch on.

The adapters for frameworks export these. The answers are true of ringtrain: its one native library links nothing, so
nothing is "built in" but what it can reach at run time, and what it does not use at all is never built nor enabled.
One name is taken for its meaning: Gloo is what connects Horovod's ranks without an MPI, so "gloo" is yes where
ringtrain's TCP does. Scripts rely on one of the two being built, and after ``init`` on one being enabled.
``verbose`` is accepted for the sake of Horovod's scripts.
"""

import importlib.util

from ringtrain._binding import options
from ringtrain._bootstrap import nccl
from ringtrain._runtime import context as contexts
from ringtrain.errors import InvalidArgumentError

__all__ = [
    "ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "gpu_libraries", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rocm_built",
]  # fmt: skip


def mpi_built(verbose: bool = False) -> bool:
    """Whether MPI can be reached, that is, whether mpi4py is installed; which MPI it finds shows in ``init``.

    Example:
        >>> if not hvd.mpi_built():
        ...     print("mpi4py is not installed: ringtrainrun --transport tcp")

    Args:
        verbose: accepted for Horovod's sake.
    """
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether this process's world runs over MPI; False before ``init`` and in a world without a launcher.

    Example:
        >>> carrier = "MPI" if hvd.mpi_enabled() else "TCP and shared memory"
    """
    return contexts.is_initialized() and contexts.current().over_mpi


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads: always, since ``init`` refuses less.

    Example:
        >>> may_call_mpi_anywhere = hvd.mpi_enabled() and hvd.mpi_threads_supported()

    Raises:
        InvalidArgumentError: this process does not use MPI.
    """
    if not mpi_enabled():
        raise InvalidArgumentError(
            "mpi_threads_supported: expected a world over MPI but found one without. Ask mpi_enabled() first."
        )
    return True


def gpu_libraries() -> dict[str, tuple[str, str]]:
    """Version and path of the driver (``cuda``) and of ``nccl`` as this process finds them, or "" and what is wrong; loads them.

    Example:
        >>> for library, (version, path) in rt.gpu_libraries().items():
        ...     print(library, version, path)
    """
    return nccl.libraries(options.resolve({}))


def nccl_built(verbose: bool = False) -> int:
    """NCCL's version code, such as 22005, or 0 without it or without a GPU: an int, because scripts compare it.

    Example:
        >>> if hvd.nccl_built() >= 22700:
        ...     print("NCCL 2.27 or newer")

    Args:
        verbose: accepted for Horovod's sake.
    """
    found = gpu_libraries()
    if not found["cuda"][0] or not found["nccl"][0]:
        return 0
    major, minor, patch = (int(part) for part in found["nccl"][0].split("."))
    return 10000 * major + 100 * minor + patch


def cuda_built(verbose: bool = False) -> bool:
    """Whether tensors in CUDA memory can be sent: whether there is a driver, and a GPU.

    Example:
        >>> device = "cuda" if hvd.cuda_built() else "cpu"

    Args:
        verbose: accepted for Horovod's sake.
    """
    return bool(gpu_libraries()["cuda"][0])


def rocm_built(verbose: bool = False) -> bool:
    """Whether tensors in ROCm memory travel without a copy to the host.

    Example:
        >>> hvd.rocm_built()
        False

    Args:
        verbose: accepted for Horovod's sake.
    """
    return False


def gloo_built(verbose: bool = False) -> bool:
    """Whether ranks can be connected without an MPI: always, by TCP.

    Example:
        >>> hvd.gloo_built()
        True

    Args:
        verbose: accepted for Horovod's sake.
    """
    return True


def gloo_enabled() -> bool:
    """Whether this process's world does without an MPI, and so the opposite of `mpi_enabled`; False before ``init``.

    Example:
        >>> carrier = "TCP and shared memory" if hvd.gloo_enabled() else "MPI"
    """
    return contexts.is_initialized() and not contexts.current().over_mpi


def ccl_built(verbose: bool = False) -> bool:
    """False: ringtrain has no use for oneCCL.

    Example:
        >>> hvd.ccl_built()
        False

    Args:
        verbose: accepted for Horovod's sake.
    """
    return False


def ddl_built(verbose: bool = False) -> bool:
    """False: ringtrain has no use for IBM's DDL.

    Example:
        >>> hvd.ddl_built()
        False

    Args:
        verbose: accepted for Horovod's sake.
    """
    return False
