"""Builds the native tests with ninja: one executable for each *_test.cc and *_test.c here, the simulator, the fakes.

    python tests/native/build.py [--variant plain|tsan|asan] [--into DIR] [NAME ...]
    python tests/native/build.py --everything      all variants and the simulator, with what the processor has left

All sources of the core go into one archive, each test is linked with it. The variants differ in flags only, and
each has a folder of its own, so that a second build compiles what changed. tests/test_native.py runs the results,
tests/test_simulation.py those of tests/simulation: `simulate` and `simulate_mutants`, which are built when named.
The libraries of tests/fakes lie in the folder `fakes`.
bin/test starts --everything beside the tests that come before those; whoever needs a folder waits until it is built.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIMULATION = ROOT / "tests" / "simulation"
FAKES = ROOT / "tests" / "fakes"
SIMULATORS = ["simulate", "simulate_mutants"]
sys.path.insert(0, str(SIMULATION))
import mutants  # noqa: E402

# What the protocol consists of: it links nothing else of native/, so the simulator is built in seconds.
PROTOCOL = ["core/frame.cc", "core/fusion.cc", "core/liveness.cc", "core/match.cc", "core/negotiator.cc", "core/protocol.cc",
            "core/request.cc", "core/response_cache.cc", "tables/tables.cc"]
# Only here, where the compiler is known: a user's newer one may warn of more.
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wcast-align", "-Wduplicated-cond", "-Wlogical-op", "-Wformat=2", "-Werror"]
CPLUSPLUS_WARNINGS = ["-Wold-style-cast", "-Wnon-virtual-dtor", "-Woverloaded-virtual", "-Wextra-semi"]
COMMON = ["-ffp-contract=off", *WARNINGS, "-pthread", "-g1", f"-I{ROOT / 'native'}"]
VARIANTS = {
    "plain": ["-O3"],  # as the package is built: other loops than -O2 makes
    "tsan": ["-O1", "-fsanitize=thread", "-Wno-tsan"],  # it says of fences, which it does not model; locks and atomics it does
    # -O1 would run a fifth faster, and compile twice as long
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
FAKE_LIBRARIES = [("libcuda.so.1", "cuda", ""), ("libnccl.so.2", "nccl", ""), ("old/libnccl.so.2", "nccl", "newer")]
FAKE_FLAGS = f"-fPIC -fvisibility=hidden -I{FAKES}"
# Threads' own variables lie beside their stacks: what dlopen would allocate for them is freed by whichever thread comes next, a race to
# ThreadSanitizer. Elsewhere they must not: beside PyTorch there is no room for them.
TLS_FLAGS = {"tsan": " -ftls-model=initial-exec"}
UNSANITIZED = ["cuda/memory.cc"]  # its lock would order what CUDA does not order


def test_sources() -> list[Path]:
    """Sources that become an executable each, in order of their names."""
    here = ROOT / "tests" / "native"
    return sorted([*here.glob("*_test.cc"), *here.glob("*_test.c")])


def build_folder(variant: str) -> Path:
    """Where the executables of a variant lie."""
    return ROOT / "build" / f"native-{variant}"


def describe(variant: str, folder: Path, with_mutants: bool) -> str:
    """The text of build.ninja for a variant that is built in a folder."""
    compilers = [f"cxx = {os.environ.get('CXX', 'g++')}", f"cc = {os.environ.get('CC', 'gcc')}"]
    compilers.append("cplusplus_warnings = " + " ".join(CPLUSPLUS_WARNINGS))
    lines = [*compilers, "flags = " + " ".join(COMMON + VARIANTS[variant]), RULES]
    library = sorted(set((ROOT / "native").glob("**/*.cc")) - set((ROOT / "native" / "tensorflow").glob("*.cc")))
    lines += [f"build {object_of(source)}: compile {source}" for source in library]
    for source in test_sources():
        rule = "compile_c" if source.suffix == ".c" else "compile"
        quickly = "\n  flags = $flags -O1" if variant == "plain" else ""  # how quick these are does not matter
        lines.append(f"build {object_of(source)}: {rule} {source}{quickly}")
    lines.append("build libringtrain.a: archive " + " ".join(object_of(source) for source in library))
    for source in test_sources():
        lines.append(f"build {source.stem}: link {object_of(source)} libringtrain.a")
    lines += describe_fakes(variant)
    lines.append("default fakes libringtrain.a " + " ".join(source.stem for source in test_sources()))
    return "\n".join([*lines, *describe_simulation(folder, with_mutants)]) + "\n"


def describe_simulation(folder: Path, with_mutants: bool) -> list[str]:
    """The lines for `simulate`, of the sources as they are, and for `simulate_mutants`, of copies that hold the mutants."""
    own = sorted(SIMULATION.glob("*.cc"))
    lines = [f"build {object_of(source)}: compile {source}\n  flags = $flags -I{SIMULATION}" for source in own]
    common = [object_of(source) for source in own if source.stem != "no_mutants"]
    whole = [object_of(ROOT / "native" / name) for name in PROTOCOL]
    lines.append(f"build simulate: link {' '.join([*common, *whole, object_of(SIMULATION / 'no_mutants.cc')])}")
    if not with_mutants:
        return lines
    mutated = mutants.write(ROOT / "native", folder / "mutated")
    lines += [f"build objects/mutated/{source.stem}.o: compile {source}\n  flags = $flags -I{SIMULATION}" for source in mutated]
    copies = [f"objects/mutated/{source.stem}.o" for source in mutated]
    others = [object_of(ROOT / "native" / name) for name in PROTOCOL if name not in mutants.sources()]
    lines.append(f"build simulate_mutants: link {' '.join([*common, *others, *copies])}")
    return lines


def describe_fakes(variant: str) -> list[str]:
    """The lines for `fakes`: fakes/libcuda.so.1, fakes/libnccl.so.2 and fakes/old/libnccl.so.2."""
    lines = []
    for source in sorted(FAKES.glob("*/*.cc")):
        sanitized = variant != "plain" and str(source.relative_to(FAKES)) not in UNSANITIZED
        flags = " ".join([*COMMON, *(VARIANTS[variant] if sanitized else ["-O1"])])
        lines.append(f"build {object_of(source)}: compile {source}\n  flags = {flags} {FAKE_FLAGS}{TLS_FLAGS.get(variant, '')}")
    for library, folder, without in FAKE_LIBRARIES:
        objects = [object_of(source) for source in sorted((FAKES / folder).glob("*.cc")) if source.stem != without]
        lines.append(f"build fakes/{library}: link_library {' '.join(objects)}\n  soname = {Path(library).name}")
    return [*lines, "build fakes: phony " + " ".join(f"fakes/{library}" for library, _, _ in FAKE_LIBRARIES)]


def object_of(source: Path) -> str:
    return f"objects/{source.relative_to(ROOT).with_suffix('.o')}"


def build(variant: str, names: list[str] | None = None, into: Path | None = None) -> Path:
    """Builds the tests of a variant, all or the named ones, and returns the folder that holds them.

    Raises subprocess.CalledProcessError, after ninja has printed why, if something does not compile, and ValueError if a
    mutant does not fit its source any more.
    """
    folder = into or build_folder(variant)
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        description = folder / "build.ninja"
        text = describe(variant, folder, with_mutants="simulate_mutants" in (names or []))
        if not description.exists() or description.read_text() != text:
            description.write_text(text)
        subprocess.run([sys.executable, "-m", "ninja", "-C", folder, "--quiet", "-k", "0", *(names or [])], check=True)
    return folder


@contextmanager
def alone_in(folder: Path):
    """Waits until no other process builds in the folder, and lets none begin before this one is through."""
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_everything() -> None:
    """Builds all variants and the simulator, in the order in which bin/test needs them, and gives way to whatever else runs."""
    os.nice(19)
    try:
        Path("/proc/self/autogroup").write_text("19")  # else the kernel weighs sessions alike, however nice their processes are
    except OSError:
        pass  # a kernel without such groups
    for variant, names in (("plain", ["fakes"]), ("plain", []), ("plain", SIMULATORS), ("tsan", []), ("asan", [])):
        build(variant, names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", choices=VARIANTS, default="plain")
    parser.add_argument("--into", type=Path, help="folder for the results (build/native-VARIANT)")
    parser.add_argument("--everything", action="store_true", help="all variants and the simulator, at the lowest priority")
    parser.add_argument("names", nargs="*", help="tests to build (all)")
    arguments = parser.parse_args()
    try:
        if arguments.everything:
            build_everything()
        else:
            print(build(arguments.variant, arguments.names, arguments.into))
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
