"""The PTX in native/device fits its sources: by their fingerprint everywhere, and generated anew where there is an nvcc."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import runpy
from pathlib import Path

import pytest
import ringtrain._core

ROOT = Path(__file__).parents[2]
DEVICE = ROOT / "native" / "device"
loader = importlib.machinery.SourceFileLoader("generate_ptx", str(ROOT / "bin" / "generate-ptx"))
generator = importlib.util.module_from_spec(importlib.util.spec_from_loader("generate_ptx", loader))
loader.exec_module(generator)

RUN = "Run bin/generate-ptx and commit what it writes."
# Of each kind of kernels: the macro whose rows name them, what comes before a name, and the bytes of their parameter.
KERNELS = {"pack": ("RT_PACKING", ("pack", "unpack"), 32664), "sum": ("RT_SUMMING", ("sum",), 4152)}


def each_text(test):
    """The test with every kind of kernels and every capability for which there is a text."""
    return pytest.mark.parametrize("kernels", KERNELS)(
        pytest.mark.parametrize("capability", generator.CAPABILITIES)(test)
    )


def text_for(kernels: str, capability: int) -> str:
    return (DEVICE / f"{kernels}_sm{capability}.ptx").read_text()


@each_text
def test_text_was_generated_from_these_sources(kernels, capability):
    assert f"sha256 {generator.digest(kernels)}." in text_for(kernels, capability).splitlines()[0], RUN


@each_text
def test_the_library_holds_the_text_with_a_0_behind_it(kernels, capability):
    library = Path(ringtrain._core.__file__).read_bytes()
    assert library.count(text_for(kernels, capability).encode() + b"\0") == 1


def test_a_build_knows_which_files_the_assembler_takes_in():
    """No compiler says so: with a file missing here a new text would not get into the library."""
    package = runpy.run_path(str(ROOT / "ringtrain" / "_binding" / "_build.py"))
    taken_in = {source: package["taken_in"](source) for source in package["sources"]()}
    found = {source: files for source, files in taken_in.items() if files}
    assert found == {"native/device/ptx.cc": sorted(str(path.relative_to(ROOT)) for path in DEVICE.glob("*.ptx"))}


@each_text
def test_text_has_every_kernel_and_loads_into_older_drivers(kernels, capability):
    text = text_for(kernels, capability)
    macro, prefixes, size = KERNELS[kernels]
    names = re.findall(rf"^{macro}\((\w+)", (DEVICE / f"{kernels}.def").read_text(), re.MULTILINE)
    assert len(names) == {"pack": 9, "sum": 4}[kernels]
    entries = re.findall(
        rf"^\.visible \.entry (\w+)\(\n\t\.param \.align 8 \.b8 \w+\[{size}\]\n\)$", text, re.MULTILINE
    )
    assert sorted(entries) == sorted(f"{prefix}_{name}" for prefix in prefixes for name in names)
    assert f".version 8.1\n.target sm_{capability}\n" in text
    assert ".local" not in text, "a kernel keeps something in memory that belongs in registers"
    assert ".v4" in text, "no transfer of 16 bytes is left"


@each_text
def test_sums_are_not_fused(kernels, capability):
    """A fused multiply-add rounds once where the host rounds twice."""
    text = text_for(kernels, capability)
    assert kernels != "sum" or ("add.rn.f32" in text and "mul.rn.f32" in text and "fma" not in text)


@pytest.mark.parametrize(
    "kernels, capability",
    [  # the newest; all have the same sources, which their fingerprints tell
        pytest.param(kernels, capability, marks=pytest.mark.long if capability != max(generator.CAPABILITIES) else ())
        for kernels in KERNELS
        for capability in generator.CAPABILITIES
    ],
)
def test_text_is_what_nvcc_writes(kernels, capability):
    """The same, byte for byte, by the same release; by another one it must at least compile and assemble."""
    nvcc = generator.find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc on PATH, in CUDA_HOME or among Python's packages: pip install nvidia-cuda-nvcc")
    text = text_for(kernels, capability)
    generated = generator.generate(nvcc, kernels, capability)
    if f"with nvcc {generator.release_of(nvcc)} from" in text:
        assert generated == text, RUN
