"""A libcuda.so.1 and a libnccl.so.2 without a GPU: strict, and behind the real ABI. README.md has what they check and the settings.

The product's own code loads them, in a process of its own: ``environment()`` is what that process needs.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))


@functools.cache
def folder() -> Path:
    """Builds the fakes, if anything changed, and returns the folder with libcuda.so.1, libnccl.so.2 and old/libnccl.so.2.

    RINGTRAIN_TEST_FAKES names the folder where they are built already, as in a whole run, and for processes that have a
    deadline: another build may hold this one up.
    """
    if built := os.environ.get("RINGTRAIN_TEST_FAKES"):
        return Path(built)
    import build  # which needs cffi: what has a real GPU does without

    return build.build("plain", ["fakes"]) / "fakes"


def environment(**settings: object) -> dict[str, str]:
    """The environment of a process whose GPU is the fakes', with settings such as ``FAKE_DEVICES=2`` on top."""
    paths = {"RINGTRAIN_CUDA_LIB": folder() / "libcuda.so.1", "RINGTRAIN_NCCL_LIB": folder() / "libnccl.so.2"}
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return inherited | {name: str(value) for name, value in {**paths, **settings}.items()}
