"""Builds the native tests with ninja: one executable for each *_test.cc and *_test.c here, the simulator, the fakes.

    python tests/native/build.py [--variant plain|tsan|asan] [--into DIR] [NAME ...]
    python tests/native/build.py --everything      all variants and the simulator, with what the processor has left
    python tests/native/build.py --compile-commands      writes compile_commands.json for editors and clangd; builds nothing

All sources of the core go into one archive, each test is linked with it. `plain` takes the objects that setup.py has
compiled: what is tested is what the package is made of. The others compile their own, in a folder of each, so that a
second build compiles what changed. tests/native/test_native.py runs the results,
tests/simulation/test_simulation.py those of tests/simulation: `simulate` and `simulate_mutants`,
`simulate_elastic` and `simulate_elastic_mutants`, which are built when named.
The libraries of tests/fakes lie in the folder `fakes`.
bin/test starts --everything beside the tests that come before those; whoever needs a folder waits until it is built.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import runpy
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SIMULATION = ROOT / "tests" / "simulation"
FAKES = ROOT / "tests" / "fakes"
CRASH_STACK = ROOT / "tests" / "native" / "crash_stack.cc"
PACKAGE = runpy.run_path(
    str(ROOT / "ringtrain" / "_binding" / "_build.py")
)  # without importing the package, which need not be built
sys.path[:0] = [str(SIMULATION), str(ROOT / "tests")]
import elastic_mutants
import mutants
from priority import give_way

# What the protocol consists of: it links nothing else of native/, so the simulator is built in seconds.
PROTOCOL = [
    "base/decimal.cc",
    "collectives/rows.cc",
    "agree/ahead.cc",
    "agree/arbiter.cc",
    "agree/check.cc",
    "agree/entry.cc",
    "agree/frame.cc",
    "agree/fusion.cc",
    "world/liveness.cc",
    "world/memberships.cc",
    "agree/match.cc",
    "agree/negotiator.cc",
    "agree/negotiator_schedule.cc",
    "agree/promises.cc",
    "world/protocol.cc",
    "agree/request.cc",
    "agree/response_cache.cc",
    "agree/schedule.cc",
    "agree/stall_watch.cc",
    "agree/undelivered.cc",
    "tables/tables.cc",
]
# What decides in an elastic job.
ELASTIC = [
    "elastic/authority.cc",
    "elastic/control.cc",
    "elastic/cuts.cc",
    "elastic/hosts.cc",
    "elastic/membership.cc",
    "elastic/roster.cc",
    "elastic/samples.cc",
    "elastic/step.cc",
]


# What carries a chunk between hosts.
COLLECTIVES = [
    "collectives/doubling.cc",
    "collectives/host_messages.cc",
    "collectives/image.cc",
    "collectives/partition.cc",
    "collectives/ring.cc",
    "collectives/rows.cc",
    "collectives/window.cc",
    "kernels/codec.cc",
    "kernels/convert.cc",
    "kernels/level.cc",
    "kernels/reduce.cc",
    "kernels/scaled_blocks.cc",
    "tables/tables.cc",
]


class Simulator(NamedTuple):
    """An executable of tests/simulation; that of its name and `_mutants` has the planted faults."""

    folder: Path  # of its own sources
    links: list[str]  # of native/
    mutants: list[mutants.Mutant]


SIMULATIONS = {
    "simulate": Simulator(SIMULATION, PROTOCOL, mutants.MUTANTS),
    "simulate_elastic": Simulator(SIMULATION / "elastic", PROTOCOL + ELASTIC, elastic_mutants.MUTANTS),
    "simulate_scale": Simulator(SIMULATION / "scale", [*PROTOCOL, "transport/world.cc"], []),
    "simulate_collectives": Simulator(SIMULATION / "collectives", COLLECTIVES, []),
}
SIMULATORS = [
    name + suffix
    for name, simulator in SIMULATIONS.items()
    for suffix in ("", "_mutants")
    if simulator.mutants or not suffix
]
SHARED_BY_SIMULATORS = [SIMULATION / "catch.cc"]
# Only here, where the compiler is known: a user's newer one may warn of more.
WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wconversion",
    "-Wcast-align",
    "-Wduplicated-cond",
    "-Wlogical-op",
    "-Wformat=2",
    "-Werror",
]
CPLUSPLUS_WARNINGS = ["-Wold-style-cast", "-Wnon-virtual-dtor", "-Woverloaded-virtual", "-Wextra-semi"]
COMMON = ["-ffp-contract=off", *WARNINGS, "-pthread", "-g1", f"-I{ROOT / 'native'}"]
VARIANTS = {
    "plain": ["-O1"],  # of the tests alone: the core's objects are the package's
    # At -O1 both would run a fifth faster, and compile for longer: a third with TSan, twice as long with ASan.
    "tsan": [
        "-Og",
        "-fsanitize=thread",
        "-Wno-tsan",
    ],  # it says of fences, which it does not model; locks and atomics it does
    "asan": ["-Og", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"],
}
RULES = """\
builddir = .
rule compile
  command = $cxx -std=c++17 $cplusplus_warnings $flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $in
rule compile_c
  command = $cc -std=c11 -D_DEFAULT_SOURCE $flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $in
rule archive
  command = rm -f $out && ar rcs $out $in
  description = archive $out
rule link
  command = $cxx $flags $in -o $out -ldl -lrt
  description = link $out
rule link_library
  command = $cxx $flags -shared -Wl,-soname,$soname $in -o $out -ldl -lrt
  description = link $out
"""

# The fakes: library, folder of its sources, the one that it leaves out. The old NCCL has what 2.18 had.
FAKE_LIBRARIES = [
    ("libcuda.so.1", "cuda", ""),
    ("libnccl.so.2", "nccl", ""),
    ("old/libnccl.so.2", "nccl", "newer"),
    ("libmpi-of-tests.so", "mpi", ""),
]
FAKE_FLAGS = f"-fPIC -fvisibility=hidden -I{FAKES}"
# Threads' own variables lie beside their stacks: what dlopen would allocate for them is freed by whichever thread comes
# next, a race to ThreadSanitizer. Elsewhere they must not: beside PyTorch there is no room for them.
TLS_FLAGS = {"tsan": " -ftls-model=initial-exec"}
UNSANITIZED = ["cuda/memory.cc"]  # its lock would order what CUDA does not order


def test_sources() -> list[Path]:
    """Sources that become an executable each, in order of their names."""
    here = ROOT / "tests" / "native"
    return sorted([*here.glob("*_test.cc"), *here.glob("*_test.c")])


def in_every_run(variant: str) -> list[Path]:
    """Those sources whose tests every run does: each once, plain.

    A sanitizer takes four or five minutes of a core to build. What comes over the wire is fuzzed under AddressSanitizer; all
    others are for --tsan, --asan and --long.
    """
    return test_sources() if variant == "plain" else []


def build_folder(variant: str) -> Path:
    """Where the executables of a variant lie."""
    return ROOT / "build" / f"native-{variant}"


def describe(variant: str, folder: Path, with_mutants: bool) -> str:
    """The text of build.ninja for a variant that is built in a folder."""
    compilers = [f"cxx = {os.environ.get('CXX', 'g++')}", f"cc = {os.environ.get('CC', 'gcc')}"]
    compilers.append("cplusplus_warnings = " + " ".join(CPLUSPLUS_WARNINGS))
    lines = [*compilers, "flags = " + " ".join(COMMON + VARIANTS[variant]), RULES]
    library = sorted(set((ROOT / "native").glob("**/*.cc")) - set((ROOT / "native" / "tensorflow").glob("*.cc")))
    if variant != "plain":
        lines += [f"build {object_of(source)}: compile {source}{also_reads(source)}" for source in library]
    for source in test_sources():
        rule = "compile_c" if source.suffix == ".c" else "compile"
        lines.append(f"build {object_of(source)}: {rule} {source}")
    lines.append("build libringtrain.a: archive " + " ".join(core_object(source, variant) for source in library))
    for source in test_sources():
        lines.append(f"build {source.stem}: link {object_of(source)} libringtrain.a")
    lines += describe_fakes(variant)
    lines.append("default fakes libringtrain.a " + " ".join(source.stem for source in test_sources()))
    for source in [SIMULATION / "no_mutants.cc", *SHARED_BY_SIMULATORS]:
        lines.append(f"build {object_of(source)}: compile {source}\n  flags = $flags -I{SIMULATION}")
    for name, simulator in SIMULATIONS.items():
        lines += describe_simulation(name, simulator, variant, folder, with_mutants)
    return "\n".join(lines) + "\n"


def describe_simulation(name: str, simulator: Simulator, variant: str, folder: Path, with_mutants: bool) -> list[str]:
    """The lines for a simulator, of the sources as they are, and for the other one, of copies that hold the mutants."""
    flags = f"\n  flags = $flags -I{simulator.folder} -I{SIMULATION}"
    general = [SIMULATION / "no_mutants.cc", *SHARED_BY_SIMULATORS]
    own = [source for source in sorted(simulator.folder.glob("*.cc")) if source not in general]
    lines = [f"build {object_of(source)}: compile {source}{flags}" for source in own]
    common = [object_of(source) for source in [*own, *SHARED_BY_SIMULATORS]]
    whole = [core_object(ROOT / "native" / source, variant) for source in simulator.links]
    lines.append(f"build {name}: link {' '.join([*common, *whole, object_of(SIMULATION / 'no_mutants.cc')])}")
    if not with_mutants or not simulator.mutants:
        return lines
    objects = f"objects/mutated/{name}"
    mutated = mutants.write(simulator.mutants, ROOT, folder / "mutated" / name)
    lines += [f"build {objects}/{source.stem}.o: compile {source}{flags}" for source in mutated]
    copies = [f"{objects}/{source.stem}.o" for source in mutated]
    sources = mutants.sources(simulator.mutants)
    others = [
        core_object(ROOT / "native" / source, variant)
        for source in simulator.links
        if f"native/{source}" not in sources
    ]
    unmutated = [
        object_of(source) for source in [*own, *SHARED_BY_SIMULATORS] if str(source.relative_to(ROOT)) not in sources
    ]
    lines.append(f"build {name}_mutants: link {' '.join([*unmutated, *others, *copies])}")
    return lines


def describe_fakes(variant: str) -> list[str]:
    """The lines for `fakes`, what is needed first: those of CUDA and NCCL, fakes/old/libnccl.so.2, an MPI that gives nothing
    back, and what tells of crashes.
    """
    lines = []
    for source in sorted(FAKES.glob("*/*.cc")):
        sanitized = variant != "plain" and str(source.relative_to(FAKES)) not in UNSANITIZED
        flags = " ".join([*COMMON, *(VARIANTS[variant] if sanitized else ["-O1"])])
        lines.append(
            f"build {object_of(source)}: compile {source}\n  flags = {flags} {FAKE_FLAGS}{TLS_FLAGS.get(variant, '')}"
        )
    for library, folder, without in FAKE_LIBRARIES:
        objects = [object_of(source) for source in sorted((FAKES / folder).glob("*.cc")) if source.stem != without]
        lines.append(f"build fakes/{library}: link_library {' '.join(objects)}\n  soname = {Path(library).name}")
    lines.append(f"build {object_of(CRASH_STACK)}: compile {CRASH_STACK}\n  flags = {' '.join(COMMON)} {FAKE_FLAGS}")
    lines.append(
        f"build fakes/{CRASH_STACK.stem}.so: link_library {object_of(CRASH_STACK)}\n  soname = {CRASH_STACK.stem}.so"
    )
    libraries = [*(library for library, _, _ in FAKE_LIBRARIES), f"{CRASH_STACK.stem}.so"]
    return [*lines, "build fakes: phony " + " ".join(f"fakes/{library}" for library in libraries)]


def also_reads(source: Path) -> str:
    """What the object of a source depends on and its compiler does not list, as ninja writes it."""
    files = [str(ROOT / path) for path in PACKAGE["taken_in"](source)]
    return " | " + " ".join(files) if files else ""


def object_of(source: Path) -> str:
    return f"objects/{source.relative_to(ROOT).with_suffix('.o')}"


def core_object(source: Path, variant: str) -> str:
    """The object of a source of the core that a variant links."""
    if variant == "plain":
        return str(ROOT / PACKAGE["objects_folder"](os.environ) / source.relative_to(ROOT).with_suffix(".o"))
    return object_of(source)


def build(variant: str, names: list[str] | None = None, into: Path | None = None) -> Path:
    """Builds the tests of a variant, all or the named ones, and returns the folder that holds them.

    Raises subprocess.CalledProcessError, after ninja has printed why, if something does not compile, and ValueError if
    a mutant does not fit its source any more.
    """
    folder = into or build_folder(variant)
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        if variant == "plain":
            subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=ROOT, check=True)
        write_description(variant, folder, with_mutants=any(name.endswith("_mutants") for name in names or []))
        subprocess.run([sys.executable, "-m", "ninja", "-C", folder, "--quiet", "-k", "0", *(names or [])], check=True)
    return folder


def write_description(variant: str, folder: Path, with_mutants: bool) -> None:
    """Writes build.ninja, unless it is there as it must be: ninja looks at its time."""
    description, text = folder / "build.ninja", describe(variant, folder, with_mutants)
    if not description.exists() or description.read_text() != text:
        description.write_text(text)


def write_compile_commands(to: Path) -> None:
    """Writes how each source is compiled, in the form that clangd and clang-tidy read; nothing is compiled."""
    folder = build_folder("asan")
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        write_description("asan", folder, with_mutants=False)
        line = [sys.executable, "-m", "ninja", "-C", folder, "-t", "compdb", "compile", "compile_c"]
        to.write_bytes(subprocess.run(line, stdout=subprocess.PIPE, check=True).stdout)


@contextmanager
def alone_in(folder: Path):
    """Waits until no other process builds in the folder, and lets none begin before this one is done."""
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_everything() -> None:
    """Builds the native tests and the simulators, in the order in which bin/test needs them, and gives way to whatever else runs.

    The fakes are there already: with so low a priority they could keep the first test that needs them beyond its deadline.
    """
    give_way(19)
    build("plain", [source.stem for source in in_every_run("plain")])
    build("plain", list(SIMULATIONS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", choices=VARIANTS, default="plain")
    parser.add_argument("--into", type=Path, help="folder for the results (build/native-VARIANT), or file")
    parser.add_argument("--everything", action="store_true", help="what bin/test needs, at the lowest priority")
    parser.add_argument("--compile-commands", action="store_true", help="write compile_commands.json and build nothing")
    parser.add_argument("names", nargs="*", help="tests to build (all)")
    arguments = parser.parse_args()
    try:
        if arguments.everything:
            build_everything()
        elif arguments.compile_commands:
            write_compile_commands(arguments.into or ROOT / "compile_commands.json")
        else:
            print(build(arguments.variant, arguments.names, arguments.into))
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
