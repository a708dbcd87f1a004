"""Builds the core into an extension module and, beside it, the library that TensorFlow loads; the rest is in pyproject.toml.

Both need a C++17 compiler and nothing else: no header of MPI, NCCL, CUDA, PyTorch or TensorFlow.
The core uses Python's limited API, so one wheel serves every CPython from 3.10 on.
"""

import os
import sys
import sysconfig
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

if sys.platform != "linux":
    sys.exit(f"ringtrain runs on Linux only, this is {sys.platform}: its core waits with futexes and shares memory "
             "through /dev/shm. Install it on a Linux machine, in a container or in a virtual machine.")

# What every source is taken to depend on.
HEADERS = [str(path) for pattern in ("native/**/*.h", "native/**/*.def", "ringtrain/_build.py", "ringtrain/version.py")
           for path in Path(__file__).parent.glob(pattern)]


BUILD: dict[str, object] = {"__file__": str(Path(__file__).parent / "ringtrain" / "_build.py")}
exec(Path(BUILD["__file__"]).read_text(), BUILD)  # without importing the package, which needs what is built here

# Not a module: TensorFlow loads it.
TENSORFLOW_LIBRARY = Extension(
    "ringtrain.tensorflow.libringtrain_tensorflow",
    sources=BUILD["tensorflow_sources"](),
    include_dirs=["native"],
    extra_compile_args=BUILD["COMPILE_ARGUMENTS"],
    extra_link_args=["-ldl"],
    language="c++",
)


class BuildCore(build_ext):
    """Compiles the sources side by side, and only those that changed since the last build in this tree."""

    def finalize_options(self):
        super().finalize_options()
        # One folder whatever the front end (pip, an editable install, build_ext), so that objects are found again;
        # other settings of the compiler get another folder.
        settings = [os.environ.get(name) for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS")]
        key = zlib.crc32(repr([settings, sysconfig.get_platform()]).encode())
        self.build_temp = os.path.join("build", f"objects-{key:08x}")

    def get_ext_filename(self, fullname):
        if fullname.rpartition(".")[2].startswith("lib"):  # a plain library has no Python in its name
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def build_extension(self, extension):
        compile_in_turn = type(self.compiler).compile
        newest_header = max(os.stat(path).st_mtime for path in HEADERS)
        extension.depends = HEADERS

        def compile_one(source, **arguments):
            objects = self.compiler.object_filenames([source], output_dir=arguments["output_dir"])
            newest = max(newest_header, os.stat(source).st_mtime)
            if os.path.exists(objects[0]) and os.stat(objects[0]).st_mtime > newest:
                return objects
            return compile_in_turn(self.compiler, [source], **arguments)

        def compile_side_by_side(sources, **arguments):
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                return sum(pool.map(lambda source: compile_one(source, **arguments), sources), [])

        self.compiler.compile = compile_side_by_side
        if not self.debug:
            extension.extra_compile_args += ["-g0"]  # Python's own flags ask for debug information: 17 of 18 MB
        super().build_extension(extension)


# Free-threaded builds of CPython have no limited API: they get a wheel of their own.
limited_api = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp310"}}

setup(
    cmdclass={"build_ext": BuildCore},
    cffi_modules=["ringtrain/_build.py:ffibuilder"],
    ext_modules=[TENSORFLOW_LIBRARY],
    options=limited_api,
)
