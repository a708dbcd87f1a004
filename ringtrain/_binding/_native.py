"""The only importer of the native library: its functions, the check of a status, and text that crosses the border.

Everything above goes through ``lib`` (functions of ``native/include/ringtrain.h``) and ``ffi`` (their arguments).
"""

import os
import sys
from typing import Any, TypeAlias

from ringtrain import _core, errors
from ringtrain._core import ffi, lib

ABI_VERSION = 28  # RT_ABI_VERSION of the ringtrain.h that the package's Python is written for
CData: TypeAlias = Any  # what ``ffi`` makes: pointers, structs and arrays of C, of which a type checker knows nothing
OK = 0
PENDING = 1
# As status.h has it.
OUT_OF_MEMORY = (
    "the memory of this process must suffice, but has run out. Start fewer ranks on its host, or send less at a time."
)


def _check_abi() -> None:
    """Raises ImportError if the library was built from other sources than the Python files that are about to use it."""
    found = lib.rt_abi_version()
    if found != ABI_VERSION:
        raise ImportError(
            f"ringtrain: the ABI version of its library '{_core.__file__}' must be {ABI_VERSION}, but is {found}. It was "
            f"built from other sources than the Python files. Install ringtrain again; in a checkout: {sys.executable} -m "
            f"pip install -e {os.path.abspath(__file__ + '/../../..')}"
        )


_check_abi()


def take_text(pointer: CData) -> str:
    """The text behind a ``char *`` that the library handed out, "" for NULL; frees it."""
    if not pointer:
        return ""
    text = ffi.string(pointer).decode("utf-8", "replace")
    lib.rt_free(pointer)
    return text


def take_answer(pointer: CData) -> str:
    """The same of a function that always has an answer.

    Raises:
        MemoryError: it had no memory for it.
    """
    if not pointer:
        raise MemoryError(OUT_OF_MEMORY)
    return take_text(pointer)


def text_at(pointer: CData) -> str:
    """The text behind a ``const char *``, which stays the library's; "" for NULL."""
    return ffi.string(pointer).decode("utf-8", "replace") if pointer else ""


def bytes_at(pointer: CData, size: int) -> bytes:
    """A copy of so many bytes, which stay the library's; none for NULL."""
    return ffi.buffer(pointer, size)[:] if pointer else b""


def take_error(error: CData) -> str:
    """The text of a failed call, behind the ``char **`` that it was given; without memory the library has none."""
    return take_text(error[0]) or OUT_OF_MEMORY


def require(done: int) -> None:
    """Raises MemoryError if a function says that it had no memory for what it does: 0, or a number below."""
    if done <= 0:
        raise MemoryError(OUT_OF_MEMORY)


def made(pointer: CData, free: CData) -> CData:
    """What a function has made, which is freed when nothing here has it any more. Raises MemoryError for NULL."""
    if not pointer:
        raise MemoryError(OUT_OF_MEMORY)
    return ffi.gc(pointer, free)


def counted(number: int) -> int:
    """A number from 0 on, as a function returns it. Raises MemoryError if it is below: there was no memory for what is counted."""
    if number < 0:
        raise MemoryError(OUT_OF_MEMORY)
    return number


def as_text(text: str, longest: int = 1 << 20) -> CData:
    """Words for the library as C text; a NUL, which would end it, and what UTF-8 lacks are written as escapes.

    Args:
        longest: bytes, of which the last three are dots where the words are longer.
    """
    encoded = text.encode("utf-8", "backslashreplace").replace(b"\0", b"\\x00")
    if len(encoded) > longest:
        encoded = encoded[: longest - 3].decode("utf-8", "ignore").encode() + b"..."
    return ffi.new("char[]", encoded)


def from_hex(text: str) -> bytes:
    """Bytes for the library that JSON has carried; none for what is not in hexadecimal."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def as_path(subject: str, path: str | os.PathLike) -> bytes:
    """A path as the library takes it.

    Raises:
        InvalidArgumentError: it contains a NUL, where C would see its end.
    """
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise errors.InvalidArgumentError(
            f"{subject} {os.fspath(path)!r}: the path must not contain a NUL character. Leave it out."
        )
    return encoded


def check(status: int, error: CData) -> None:
    """Raises the exception of a failed call. ``error`` is the ``char **`` that the call was given."""
    if status != OK:
        raise errors.of_status(status)(take_error(error))


def table(name: str) -> list[list[str]]:
    """Rows of one of the library's tables, each a list of its columns as text."""
    lines = ffi.string(lib.rt_table(name.encode())).decode().split("\n")
    return [line.split("\t") for line in lines if line]


def build_info() -> str:
    """Version, compiler, processor kernels in use and ABI version of the native library, in one line."""
    return f"{ffi.string(lib.rt_build_info()).decode()}, ABI {lib.rt_abi_version()}"
