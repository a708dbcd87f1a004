"""The PTX in native/device fits its sources: by their fingerprint everywhere, and generated anew where there is an nvcc."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DEVICE = ROOT / "native" / "device"
loader = importlib.machinery.SourceFileLoader("generate_ptx", str(ROOT / "bin" / "generate-ptx"))
generator = importlib.util.module_from_spec(importlib.util.spec_from_loader("generate_ptx", loader))
loader.exec_module(generator)

RUN = "Run bin/generate-ptx and commit what it writes."
each_text = pytest.mark.parametrize("capability", generator.CAPABILITIES)


def text_for(capability: int) -> str:
    return (DEVICE / f"pack_sm{capability}.ptx.h").read_text()


@each_text
def test_text_was_generated_from_these_sources(capability):
    assert f"sha256 {generator.digest()}." in text_for(capability).splitlines()[0], RUN


@each_text
def test_text_has_every_kernel_and_loads_into_older_drivers(capability):
    text = text_for(capability)
    names = re.findall(r"^RT_PACKING\((\w+)", (DEVICE / "pack.def").read_text(), re.MULTILINE)
    assert len(names) == 10
    entries = re.findall(r"^\.visible \.entry (\w+)\(\n\t\.param \.align 8 \.b8 \w+\[32664\]\n\)$", text, re.MULTILINE)
    assert sorted(entries) == sorted(f"{way}_{name}" for way in ("pack", "unpack") for name in names)
    assert f".version 8.1\n.target sm_{capability}\n" in text
    assert ".local" not in text, "a kernel keeps something in memory that belongs in registers"
    assert ".v4" in text, "no transfer of 16 bytes is left"


@each_text
def test_text_is_what_nvcc_writes(capability):
    """The same, byte for byte, by the same release; by another one it must at least compile and assemble."""
    nvcc = generator.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc on PATH, in CUDA_HOME or among Python's packages")
    text = text_for(capability)
    generated = generator.generate(nvcc, capability)
    if f"with nvcc {generator.release_of(nvcc)} from" in text:
        assert generated == text, RUN
