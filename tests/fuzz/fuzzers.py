"""Builds the fuzzers with Clang's libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer: one for each *_fuzz.cc here.

    python tests/fuzz/fuzzers.py            all of them, into build/fuzz; prints that folder

They are linked with the sources that hold decoders and with little else, so that a fault planted in a copy of native/
is compiled in seconds. tests/fuzz/test_fuzz.py runs them for a few seconds each, bin/fuzz for as long as one likes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
FOLDER = ROOT / "build" / "fuzz"
NAMES = sorted(path.stem for path in HERE.glob("*_fuzz.cc"))
DECODERS = [
    "base/doorbell.cc",
    "base/options.cc",
    "base/decimal.cc",
    "elastic/authority.cc",
    "elastic/control.cc",
    "elastic/cuts.cc",
    "elastic/hosts.cc",
    "agree/check.cc",
    "agree/frame.cc",
    "elastic/membership.cc",
    "elastic/roster.cc",
    "agree/request.cc",
    "tables/tables.cc",
    "transport/host_memory.cc",
    "transport/in_process.cc",
    "transport/rendezvous.cc",
    "transport/tcp/exchange.cc",
    "transport/tcp/hello.cc",
    "transport/tcp/piece_stream.cc",
    "transport/tcp/record.cc",
    "transport/tcp/sha256.cc",
    "transport/world.cc",
]
COMPILER = os.environ.get("CLANGXX", "clang++")
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g",
    "-pthread",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
]
RULES = """\
builddir = .
rule compile
  command = $cxx $flags -fsanitize=fuzzer-no-link -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = $cxx $flags -fsanitize=fuzzer $in -o $out -lrt
"""


def what_is_missing() -> str:
    """Why the fuzzers cannot be built here; "" if they can."""
    if not shutil.which(COMPILER):
        return f"needs {COMPILER}: apt-get install clang libclang-rt-dev"
    resources = subprocess.run([COMPILER, "--print-resource-dir"], stdout=subprocess.PIPE, text=True, check=True)
    if not any(Path(resources.stdout.strip()).rglob("libclang_rt.fuzzer*.a")):
        return f"needs the libFuzzer of {COMPILER}: apt-get install libclang-rt-dev"
    return ""


def describe(native: Path, names: list[str]) -> str:
    """The text of build.ninja for the sources in a folder native/."""
    lines = [f"cxx = {COMPILER}", f"flags = {' '.join(FLAGS)} -I{native} -I{HERE}", RULES]
    shared = [HERE / "fuzz.cc", *(native / name for name in DECODERS)]
    for source in [*shared, *(HERE / f"{name}.cc" for name in names)]:
        lines.append(f"build {source.stem}.o: compile {source}")
    objects = " ".join(f"{source.stem}.o" for source in shared)
    lines += [f"build {name}: link {name}.o {objects}" for name in names]
    return "\n".join([*lines, "default " + " ".join(names)]) + "\n"


def build(native: Path = ROOT / "native", into: Path = FOLDER, names: list[str] | None = None) -> Path:
    """Builds the fuzzers, all or the named ones, and returns the folder that holds them.

    Raises subprocess.CalledProcessError, after ninja has printed why, if something does not compile.
    """
    into.mkdir(parents=True, exist_ok=True)
    (into / "build.ninja").write_text(describe(native, names or NAMES))
    subprocess.run([sys.executable, "-m", "ninja", "-C", into, "--quiet"], check=True)
    return into


if __name__ == "__main__":
    print(build())
