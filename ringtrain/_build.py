"""Describes the extension module ``ringtrain._core``: the native library with its C ABI, bound by cffi.

``setup.py`` names this file in ``cffi_modules``. The declarations are the part of ``ringtrain.h`` between its CFFI marks,
so the header is the binding. cffi builds against Python's limited API by itself where the interpreter has one.
"""

from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "native" / "include" / "ringtrain.h"


def declarations() -> str:
    """The C declarations that Python may use."""
    return HEADER.read_text().split("/* CFFI begin */")[1].split("/* CFFI end */")[0]


def sources() -> list[str]:
    """Every C++ file of the library, relative to the project's root as setuptools wants it."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "native").rglob("*.cc"))


def version() -> str:
    """The package's version, read without importing the package: that would need the library."""
    values: dict[str, str] = {}
    exec((ROOT / "ringtrain" / "version.py").read_text(), values)
    return values["__version__"]


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "ringtrain._core",
    '#include "include/ringtrain.h"',
    source_extension=".cc",
    sources=sources(),
    include_dirs=["native"],
    define_macros=[("RT_VERSION", f'"{version()}"')],
    # No contraction into fused multiply-adds: every processor gives the same bits.
    extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"],
    extra_link_args=["-pthread", "-ldl", "-lrt"],
)
