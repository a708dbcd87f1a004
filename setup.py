"""Builds the core into an extension module and, beside it, the libraries for TensorFlow and JAX; the rest is in pyproject.toml.

They need a C++17 compiler and nothing else: no header of MPI, NCCL, CUDA, PyTorch, TensorFlow or JAX.
The core uses Python's limited API, so one wheel serves every CPython from 3.10 on.

What is built of the same files by the same tools has the same bytes, whenever, wherever and by whomever: a distribution
can be compared with what anybody builds of its sources.
"""

import gzip
import os
import re
import sys
import sysconfig
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

if sys.platform != "linux":
    sys.exit(
        f"ringtrain runs on Linux only, this is {sys.platform}: its core waits with futexes and shares memory "
        "through /dev/shm. Install it on a Linux machine, in a container or in a virtual machine."
    )

BUILD: dict[str, object] = {"__file__": str(Path(__file__).parent / "ringtrain" / "_binding" / "_build.py")}
exec(Path(BUILD["__file__"]).read_text(), BUILD)  # without importing the package, which needs what is built here


def plain_library(module: str, sources: list[str], *links: str) -> Extension:
    """A library that is no module: the framework whose adapter it lies beside loads it, or calls into it."""
    return Extension(
        module,
        sources=sources,
        include_dirs=["native"],
        extra_compile_args=BUILD["COMPILE_ARGUMENTS"],
        extra_link_args=list(links),
        language="c++",
    )


LIBRARIES = [
    plain_library("ringtrain.tensorflow.libringtrain_tensorflow", BUILD["tensorflow_sources"](), "-ldl"),
    plain_library("ringtrain.jax.libringtrain_jax", BUILD["jax_sources"]()),
]

# Their flags and sources go into every object.
BUILD_FILES = [__file__, BUILD["__file__"], str(Path(__file__).parent / "ringtrain" / "version.py")]
BUILD_FILES_CHANGED = max(os.stat(file).st_mtime_ns for file in BUILD_FILES)  # all are there


def included_files(dependencies: str) -> list[str]:
    """The source and the headers of an object, from the file that the compiler wrote beside it; [""] if there is none."""
    try:
        _, _, files = Path(dependencies).read_text().partition(": ")
    except FileNotFoundError:
        return [""]
    return [name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", files.replace("\\\n", " ").strip())]


def is_newer_than_all(result: str, changed: int, files: list[str]) -> bool:
    """Whether a file was made after a time, and after all of these changed; False if any of them is missing."""
    try:
        return os.stat(result).st_mtime_ns > max(changed, *(os.stat(file).st_mtime_ns for file in files))
    except FileNotFoundError:
        return False


class BuildCore(build_ext):
    """Compiles the sources side by side, and only those that changed since the last build in this tree."""

    def finalize_options(self):
        super().finalize_options()
        # One folder whatever the front end (pip, an editable install, build_ext), so that objects are found again.
        self.build_temp = BUILD["objects_folder"](os.environ)

    def copy_file(self, infile, outfile, *arguments, **named):
        """Puts a copy in place at once: a library that is overwritten ends the processes that have it open."""
        new = os.path.join(self.build_temp, f"{os.getpid()}-{os.path.basename(outfile)}")
        _, copied = super().copy_file(infile, new, *arguments, **named)
        os.replace(new, outfile)
        return outfile, copied

    def get_ext_filename(self, fullname):
        if fullname.rpartition(".")[2].startswith("lib"):  # a plain library has no Python in its name
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def build_extension(self, extension):
        compile_in_turn = type(self.compiler).compile
        objects = self.compiler.object_filenames(extension.sources, output_dir=self.build_temp)
        extension.depends = [
            *objects,
            *{file for each in objects for file in included_files(f"{each}.d")},
            *{file for source in extension.sources for file in BUILD["taken_in"](source)},
            *BUILD_FILES,
        ]

        def compile_one(source, extra_postargs=(), **arguments):
            objects = self.compiler.object_filenames([source], output_dir=arguments["output_dir"])
            dependencies = f"{objects[0]}.d"
            taken_in = BUILD["taken_in"](source)
            if is_newer_than_all(objects[0], BUILD_FILES_CHANGED, [*included_files(dependencies), *taken_in]):
                return objects
            Path(objects[0]).unlink(
                missing_ok=True
            )  # a compiler that stops at an error may leave it, and new dependencies
            return compile_in_turn(
                self.compiler,
                [source],
                **arguments,
                # With LTO it would be the linker that assembles, and looks for the files in no folder.
                extra_postargs=[*(extra_postargs or ()), "-MD", "-MF", dependencies, *["-fno-lto"][: len(taken_in)]],
            )

        def compile_side_by_side(sources, **arguments):
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                objects = pool.map(lambda source: compile_one(source, **arguments), sources)
                return [each for of_source in objects for each in of_source]

        self.compiler.compile = compile_side_by_side
        if not self.debug:
            extension.extra_compile_args += ["-g0"]  # Python's own flags ask for debug information: 17 of 18 MB
        super().build_extension(extension)


# The time of all files in a distribution, unless whoever builds it says otherwise: the earliest that a wheel can have.
os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")


class RepeatableWheel(bdist_wheel):
    """Takes the times from SOURCE_DATE_EPOCH, as it does by itself, and the modes of files not from who builds it."""

    def run(self):
        before = os.umask(0o022)
        try:
            super().run()
        finally:
            os.umask(before)


class RepeatableSdist(sdist):
    """Packs the files in the order of their names, of one time, and of nobody."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        if format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)
        seconds = int(os.environ["SOURCE_DATE_EPOCH"])

        def of_nobody(member):
            member.mtime, member.mode = seconds, 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            return member

        with (
            open(f"{base_name}.tar.gz", "wb") as file,
            gzip.GzipFile("", "wb", 9, file, seconds) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for path in sorted([base_dir, *map(str, Path(base_dir).rglob("*"))]):
                archive.add(path, recursive=False, filter=of_nobody)
        return file.name


# Free-threaded builds of CPython have no limited API: they get a wheel of their own.
limited_api = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp310"}}

setup(
    cmdclass={"build_ext": BuildCore, "bdist_wheel": RepeatableWheel, "sdist": RepeatableSdist},
    cffi_modules=["ringtrain/_binding/_build.py:ffibuilder"],
    ext_modules=LIBRARIES,
    options=limited_api,
)
