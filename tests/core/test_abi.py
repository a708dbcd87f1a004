"""The version of ringtrain.h: raised with each change of the header, and compared wherever two builds meet."""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ringtrain._binding import _build, _native

PACKAGE = Path(__file__).parents[2] / "ringtrain"
# Of the header's declarations, without comments and white space.
DIGESTS = {28: "9849fd4af1f6115b"}


def declarations() -> str:
    """What a caller is compiled against."""
    return re.sub(r"/\*.*?\*/|\s", "", _build.declarations(), flags=re.DOTALL)


def test_a_changed_header_has_a_version_of_its_own():
    digest = hashlib.sha256(declarations().encode()).hexdigest()[:16]
    assert DIGESTS.get(_native.ABI_VERSION) == digest, (
        "ringtrain.h has changed since the last version: raise RT_ABI_VERSION there and ABI_VERSION in _binding/_native.py, "
        f"and let DIGESTS be {{{_native.ABI_VERSION + 1}: {digest!r}}}"
    )


def test_header_python_and_library_have_one_version():
    assert _native.lib.RT_ABI_VERSION == _native.lib.rt_abi_version() == _native.ABI_VERSION


def test_a_stale_library_is_refused(tmp_path):
    """The Python of a later version beside the library of this one, as after an update of a checkout."""
    copy = shutil.copytree(PACKAGE, tmp_path / "ringtrain", ignore=shutil.ignore_patterns("__pycache__"))
    later = _native.ABI_VERSION + 1
    source = (copy / "_binding" / "_native.py").read_text()
    line = f"ABI_VERSION = {_native.ABI_VERSION} "
    assert source.count(line) == 1
    (copy / "_binding" / "_native.py").write_text(source.replace(line, f"ABI_VERSION = {later} "))
    done = subprocess.run(
        [sys.executable, "-c", "import ringtrain; ringtrain.init"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"ImportError: ringtrain: the ABI version of its library '{copy}/_core" in done.stderr
    assert f"must be {later}, but is {_native.ABI_VERSION}. It was built from other sources" in done.stderr
    assert f"-m pip install -e {tmp_path}" in done.stderr
