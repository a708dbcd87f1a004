"""What scripts for Horovod import from ``horovod.common.util``: the build probes, a few checks, and small helpers."""

import functools
import os.path
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from ringtrain._binding.options import environment, resolve
from ringtrain._bootstrap.nccl import libraries
from ringtrain._bootstrap.probes import ccl_built, cuda_built, ddl_built, gloo_built, mpi_built, nccl_built, rocm_built
from ringtrain._training.optimizer_arguments import chosen_op
from ringtrain.errors import InvalidArgumentError

__all__ = [
    "EXTENSIONS", "ccl_built", "check_extension", "check_installed_version", "cuda_built", "ddl_built", "env",
    "extension_available", "get_average_backwards_compatibility_fun", "get_ext_suffix", "get_extension_full_path", "gloo_built",
    "gpu_available", "is_iterable", "is_version_greater_equal_than", "mpi_built", "nccl_built", "num_rank_is_power_2",
    "rocm_built", "split_list",
]  # fmt: skip

EXTENSIONS = ["tensorflow", "torch"]

Item = TypeVar("Item")

_cache = functools.cache  # private in Horovod too, and imported by programs all the same


# ---- probes and checks ----


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Returns at once: the one native library serves every framework, and was loaded when ringtrain was imported.

    Example:
        >>> hvd.check_extension("ringtrain.torch", "HOROVOD_WITH_PYTORCH", __name__)

    Args:
        ext_name, ext_env_var, pkg_path, args: accepted for Horovod's sake.
    """


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether ringtrain serves a framework: ``torch`` or ``tensorflow``."""
    return ext_base_name in EXTENSIONS


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Returns: ringtrain is built against no framework, so every version is the right one."""


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether tensors on a GPU can be sent; the same for every framework.

    Example:
        >>> device = "cuda" if hvd.gpu_available("torch") else "cpu"

    Args:
        ext_base_name, verbose: accepted for Horovod's sake.
    """
    return bool(libraries(resolve({}))["cuda"][0])


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version such as ``2.10.0`` is at least ``target``, which has three parts; ``2.10.0rc1`` comes before it.

    Raises:
        InvalidArgumentError: a ValueError; no texts, or a target of another form.
    """
    if not (isinstance(ver, str) and isinstance(target, str) and target.count(".") == 2):
        raise InvalidArgumentError(
            f"is_version_greater_equal_than: versions must be texts, the second one major.minor.patch, but are {ver!r} and {target!r}."
        )
    return _order(ver) >= _order(target)


def is_iterable(x: Any) -> bool:
    """Whether something can be gone through."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


# ---- helpers ----


def get_ext_suffix() -> str:
    """The end of the names of this Python's extension modules."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Where an extension module lies whose package's file is ``pkg_path``; ``args`` are folders and its name."""
    return os.path.join(os.path.dirname(pkg_path), *args) + get_ext_suffix()


def split_list(l: Sequence[Item], n: int) -> list[Sequence[Item]]:  # noqa: E741 - Horovod's name
    """``n`` parts of a list of about equal length, the longer ones first; empty ones where there is too little.

    Example:
        >>> split_list([1, 2, 3, 4, 5], 2)
        [[1, 2, 3], [4, 5]]
    """
    least, longer = divmod(len(l), n)
    ends = accumulate((least + (index < longer) for index in range(n)), initial=0)
    return [l[begin:end] for begin, end in pairwise(ends)]


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """A block in which variables of the environment have other values; None leaves one alone."""
    variables, chosen = environment(), {name: value for name, value in kwargs.items() if value is not None}
    before = {name: variables[name] for name in chosen if name in variables}
    variables.update(chosen)
    try:
        yield
    finally:
        for name in chosen:
            variables.pop(name, None)
        variables.update(before)


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """A function of ``op`` and the older ``average`` that gives the op; ``reduce_ops`` has ``Average`` and ``Sum``."""

    def op_of(op: int | None, average: bool | None) -> int:
        return chosen_op(average, op, reduce_ops.Average, reduce_ops.Sum, stacklevel=3)

    return op_of


def _order(version: str) -> tuple[int, int, int, bool]:
    """What versions are put in order by: three numbers, and whether it is a release rather than what came before it."""
    found = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?[._-]?(a|b|rc|dev)?", version)
    if found is None:
        raise InvalidArgumentError(
            f"is_version_greater_equal_than: version must begin with a number, but is '{version}'."
        )
    major, minor, patch = (int(number or 0) for number in found.groups()[:3])
    return major, minor, patch, not found[4]
