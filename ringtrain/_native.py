"""The only importer of the native library: its functions, the check of a status, and text that crosses the border.

Everything above goes through ``lib`` (functions of ``native/include/ringtrain.h``) and ``ffi`` (their arguments).
"""

from ringtrain import errors
from ringtrain._core import ffi, lib

OK = 0
PENDING = 1


def take_text(pointer) -> str:
    """The text behind a ``char *`` that the library handed out; frees it."""
    if not pointer:
        return ""
    text = ffi.string(pointer).decode("utf-8", "replace")
    lib.rt_free(pointer)
    return text


def check(status: int, error) -> None:
    """Raises the exception of a failed call. ``error`` is the ``char **`` that the call was given."""
    if status != OK:
        raise errors.of_status(status)(take_text(error[0]))


def table(name: str) -> list[list[str]]:
    """Rows of one of the library's tables, each a list of its columns as text."""
    lines = ffi.string(lib.rt_table(name.encode())).decode().split("\n")
    return [line.split("\t") for line in lines if line]


def build_info() -> str:
    """Version, compiler, processor kernels in use and ABI version of the native library, in one line."""
    return f"{ffi.string(lib.rt_build_info()).decode()}, ABI {lib.rt_abi_version()}"
