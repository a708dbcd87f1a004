"""What a test needs of the machine: without it the test is skipped, and says what is missing and how it comes here.

bin/test installs all Python libraries, and as root Debian's packages: without one of these a test fails. So a machine that
bin/test has prepared as root skips what its kernel or its hardware cannot do, and nothing else.
"""

from __future__ import annotations

import os

import pytest

from ringtrain.bench import namespaces as hosts_here

PREPARED = bool(os.environ.get("RINGTRAIN_TEST_PREPARED"))  # bin/test ran as root


def machine(missing: str) -> pytest.MarkDecorator:
    """Skips a test with these words, which say what no package brings; without words it runs."""
    return pytest.mark.skipif(bool(missing), reason=missing or "nothing is missing")


def package(name: str, program: str) -> pytest.MarkDecorator:
    """For a test that starts a program of a Debian package which bin/test installs."""
    return packages("" if hosts_here.find_program(program) else f"needs {program}: apt-get install {name}")


def packages(missing: str) -> pytest.MarkDecorator:
    """The same, where it takes more to see what is missing."""
    return machine("" if PREPARED else missing)


def _no_hosts() -> str:
    missing = hosts_here.missing()
    return "" if PREPARED and "packages" in missing else missing


root = machine("" if os.geteuid() == 0 else "needs root: sudo bin/test")
hosts = machine(_no_hosts())
