"""What of native/ reads bytes or text of others is fuzzed, by libFuzzer (tests/fuzz); test_fuzz_launcher.py does it for Python.

libFuzzer draws from a fixed seed and stops after so many inputs: a few seconds, the same ones in every run. bin/fuzz
goes on for as long as one likes, and `bin/test --long fuzz` for some minutes from a seed that is drawn.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import needs
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fuzzers

NATIVE = fuzzers.ROOT / "native"
INPUTS, LONG_SECONDS = 30000, 600
# Whatever an input of 4 KiB announces, no block above that size may be asked for. A single input that takes a minute
# hangs.
LIMITS = ["-malloc_limit_mb=64", "-timeout=60", "-verbosity=0", "-print_final_stats=1"]
# A check that is left out, one for each fuzzer: file, what stands there, what stands there instead.
PLANTS = {
    "control_fuzz": ("elastic/control.cc", "decoder.AtMost(kMaxSlot)", "decoder.Unsigned()"),
    "frame_fuzz": (
        "agree/frame.cc",
        "    if (length > kMaxIds - ids.size()) {\n      decoder->Refuse();\n      break;\n    }\n",
        "",
    ),
    "options_fuzz": ("transport/rendezvous.cc", " && field.size() < 7", ""),
    "tcp_fuzz": ("transport/tcp/exchange.cc", " || !header.Fits()", ""),
    "world_fuzz": (
        "transport/rendezvous.cc",
        "  if (world->local_size() > 1 && shared == nullptr)  // this rank could not, and said so\n"
        '    return Status::Internal("init: the answer of rank 0 cannot be read.");\n',
        "",
    ),
}
# And in what they share: too slow to build for every run.
SHARED_PLANTS = [
    ("base/bytes.h", "if (count > static_cast<size_t>(end_ - next_)) return Refuse(), 0;", ""),
    ("base/bytes.h", "if (static_cast<size_t>(end_ - next_) < sizeof value) return Refuse(), 0;", ""),
    ("base/bytes.h", "if (next_ == end_) return Refuse(), 0;", ""),
]

pytestmark = pytest.mark.timeout(1200)  # the first test builds
needs_libfuzzer = needs.packages(fuzzers.what_is_missing())


def fuzz(program: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Runs a fuzzer on its seeds, in a new folder; what it finds lies there."""
    seeds = folder / "seeds"
    seeds.mkdir(parents=True)
    subprocess.run([program, "--write-seeds", seeds], check=True)
    return subprocess.run(
        [program, *LIMITS, f"-artifact_prefix={folder}/", *arguments, seeds],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def planted(faults: list[tuple[str, str, str]], folder: Path) -> Path:
    """A copy of native/ with faults in it."""
    native = folder / "native"
    shutil.copytree(NATIVE, native)
    for file, original, instead in faults:
        text = (native / file).read_text()
        assert text.count(original) == 1, f"{file} has changed: adapt the plants"
        (native / file).write_text(text.replace(original, instead))
    return native


@pytest.fixture(scope="module")
def built() -> Path:
    return fuzzers.build()


@pytest.fixture(scope="module")
def built_with_plants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plants")
    return fuzzers.build(planted(list(PLANTS.values()), folder), folder / "built")


@needs_libfuzzer
@pytest.mark.long  # the same inputs in every run
@pytest.mark.parametrize("name", fuzzers.NAMES)
def test_no_input_breaks_a_decoder(name: str, built: Path, tmp_path: Path) -> None:
    done = fuzz(built / name, tmp_path / "found", "-seed=1", f"-runs={INPUTS}")
    assert done.returncode == 0, done.stdout[-20000:]
    assert f"number_of_executed_units: {INPUTS}" in done.stdout, done.stdout[-20000:]


@needs_libfuzzer
@pytest.mark.long
@pytest.mark.parametrize("name", fuzzers.NAMES)
def test_a_check_that_is_left_out_is_found(name: str, built_with_plants: Path, tmp_path: Path) -> None:
    done = fuzz(built_with_plants / name, tmp_path / "found", "-seed=1", f"-runs={INPUTS}")
    assert done.returncode != 0 and "Test unit written to" in done.stdout, done.stdout[-20000:]


@needs_libfuzzer
@pytest.mark.long
@pytest.mark.parametrize("plant", SHARED_PLANTS, ids=lambda plant: plant[1])
def test_a_shared_check_that_is_left_out_is_found(plant: tuple[str, str, str], tmp_path: Path) -> None:
    folder = fuzzers.build(planted([plant], tmp_path), tmp_path / "built", ["frame_fuzz"])
    done = fuzz(folder / "frame_fuzz", tmp_path / "found", "-seed=1", f"-runs={INPUTS}")
    assert done.returncode != 0 and "Test unit written to" in done.stdout, done.stdout[-20000:]


@needs_libfuzzer
@pytest.mark.long
@pytest.mark.timeout(LONG_SECONDS + 600)
@pytest.mark.parametrize("name", fuzzers.NAMES)
def test_inputs_that_nobody_has_drawn(name: str, built: Path, tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little") | 1  # 0 would have libFuzzer draw one that it does not print here
    done = fuzz(built / name, tmp_path / "found", f"-seed={seed}", f"-max_total_time={LONG_SECONDS}")
    assert done.returncode == 0, f"seed {seed}:\n{done.stdout[-20000:]}"
