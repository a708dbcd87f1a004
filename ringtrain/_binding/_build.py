"""Describes the extension module ``ringtrain._core``: the native library with its C ABI, bound by cffi.

``setup.py`` names this file in ``cffi_modules``. The declarations are the part of ``ringtrain.h`` between its CFFI
marks, so the header is the binding. cffi builds against Python's limited API by itself where the interpreter has one.
"""

import re
import sysconfig
import zlib
from collections.abc import Mapping
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "native" / "include" / "ringtrain.h"
# No contraction into fused multiply-adds: every processor gives the same bits.
COMPILE_ARGUMENTS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]


def declarations() -> str:
    """The C declarations that Python may use."""
    return HEADER.read_text().split("/* CFFI begin */")[1].split("/* CFFI end */")[0]


def sources() -> list[str]:
    """Every C++ file of the core, relative to the project's root as setuptools wants it."""
    return sorted(set(_sources_in("native")) - set(_sources_in("native/tensorflow")) - set(_sources_in("native/jax")))


def tensorflow_sources() -> list[str]:
    """The C++ files of the library that TensorFlow loads; it finds TensorFlow and the core when it runs."""
    return [*_sources_in("native/tensorflow"), "native/tables/tables.cc"]


def jax_sources() -> list[str]:
    """The C++ files of the library whose handler XLA calls; it finds XLA and the core when it runs."""
    return [*_sources_in("native/jax"), "native/tables/tables.cc"]


def _sources_in(folder: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.cc"))


def taken_in(source: str | Path) -> list[str]:
    """The files that the assembler takes into the object of a source (``.incbin``), relative to the project's root.

    The object depends on them, and compilers do not say so. The source has their names in string literals.
    """
    text = (ROOT / source).read_text()
    return [f"native/{name}" for name in re.findall(r'"([\w/]+\.ptx)"', text)] if ".incbin" in text else []


def objects_folder(variables: Mapping[str, str]) -> str:
    """Where the objects of the core lie, relative to the project's root: a folder for each choice of compiler and flags."""
    settings = [variables.get(name) for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS")]
    key = zlib.crc32(repr([settings, sysconfig.get_platform()]).encode())
    return f"build/objects-{key:08x}"


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
    extra_compile_args=COMPILE_ARGUMENTS,
    extra_link_args=["-pthread", "-ldl", "-lrt"],
)
