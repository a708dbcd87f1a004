"""A skip says what is missing and how it comes here, and bin/test brings whatever a package brings."""

import re
from pathlib import Path

import needs

from ringtrain.bench.namespaces import DEBIAN_PACKAGES

TESTS = Path(__file__).parents[1]
TEXTS = {path.relative_to(TESTS): path.read_text() for path in sorted(TESTS.rglob("*.py"))}
PACKAGE = "a-package"
IN_OTHERS = {"util-linux", "openssh-client"}  # each Debian has the one, and openssh-server brings the other


def test_tests_are_skipped_by_what_they_need() -> None:
    """And no test by itself: an import that may fail, or a condition without words, hides that nothing is tested."""
    others = {
        str(path) for path, text in TEXTS.items() if re.search(r"pytest\.mark\.skip|pytest\.importor" "skip", text)
    }
    assert others == {"needs.py"}


def test_a_skip_says_what_it_needs() -> None:
    texts = [(path, text) for path, each in TEXTS.items() for text in re.findall(r'pytest\.skip\(\s*f?"([^"]+)', each)]
    assert len(texts) > 5 and not [each for each in texts if not each[1].startswith("needs ")]


def test_bin_test_installs_the_packages_that_tests_need() -> None:
    text = "\n".join(TEXTS.values())
    asked = {*re.findall(r'needs\.package\("([\w-]+)"', text), *DEBIAN_PACKAGES.values()}
    asked |= {name for names in re.findall(r"apt-get install ([\w -]+)", text) for name in names.split()}
    installed = re.findall(r"missing\+=\(([\w-]+)\)", (TESTS.parent / "bin" / "test").read_text())
    assert {"tcsh", "clang", "iproute2"} <= asked and asked - IN_OTHERS <= {*installed}, asked - {*installed}


def test_a_package_that_is_missing_fails_where_bin_test_has_prepared(monkeypatch) -> None:
    def skips() -> bool:
        return needs.package(PACKAGE, "no-such-program").args[0]

    monkeypatch.setattr(needs, "PREPARED", False)
    assert skips() and needs.package(PACKAGE, "no-such-program").kwargs["reason"].endswith(f"apt-get install {PACKAGE}")
    monkeypatch.setattr(needs, "PREPARED", True)
    assert not skips()
