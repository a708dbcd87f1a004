"""What bin/gpu-check takes along to a machine without a network: ringtrain's wheel, and those of what it needs.

``pack`` fills a folder where there is a network, ``unpack`` installs it where there is none. NumPy, PyTorch and NCCL are the
machine's own: they have to fit its GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ["cffi", "pycparser", "click", "PyYAML", "cloudpickle"]  # by ringtrain, and by cffi
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17)] + ["manylinux2014_x86_64"]


def pack(folder: Path, python: str) -> list[Path]:
    """Fills a folder with wheels for a version of Python, such as "3.12", on x86-64; returns them.

    Raises subprocess.CalledProcessError after pip has said why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    _pip("download", "--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python,
         *platforms, "--dest", folder, *NEEDED)  # fmt: skip
    return sorted(folder.glob("*.whl"))


def unpack(folder: Path, into: Path) -> None:
    """Installs all wheels of a folder into another one, for PYTHONPATH; asks no registry.

    Raises subprocess.CalledProcessError after pip has said why, and FileNotFoundError if there is no wheel.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise FileNotFoundError(f"{folder}: expected wheels but found none. Fill it by bin/gpu-check --pack {folder}.")
    _pip("install", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", into, *wheels)


def _pip(*arguments: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", *arguments[:1], "--quiet", "--disable-pip-version-check", *arguments[1:]],
        check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
