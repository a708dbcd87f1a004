"""Which tests a change can reach, the nearest first, as many as three minutes hold: `bin/test --changed[=BASE]`.

A file reaches what it imports, includes or names: modules of the package by their dotted names, also in programs that a test
writes as text, helpers of the tests, files of this repository by their paths. All of native/ is one library, which
`ringtrain._native` opens; its own tests are told apart by what they include. Those of the changed part's own folder come
first, and of these, as of the others, those with the fewest such steps to a changed file. tests/seconds.tsv says how long
each file takes; `bin/test -- --record-seconds` writes it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import deque
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = ROOT / "tests" / "seconds.tsv"
ROOM = 240.0  # seconds of tests, which two workers take in two minutes; collecting them takes half a minute
UNKNOWN = 5.0  # seconds of a file that no run has measured
LOADER = "ringtrain/_native.py"
NAMES = re.compile(r"\b(?:ringtrain|horovod)(?:\.[a-zA-Z_]\w*)*")
PATHS = re.compile(
    r"\b(?:bin|docs|examples|native|tests|ringtrain)/[\w./-]*\w|\b(?:README|CONTRIBUTING)\.md|\bpyproject\.toml"
)
INCLUDES = re.compile(r'#include "([^"]+)"')
# The folders of tests that are about a part; the core's are for whatever is in no other.
FOLDERS = {
    "ringtrain/torch/": ("with_torch",),
    "ringtrain/keras/": ("with_keras",),
    "ringtrain/tensorflow/": ("with_tensorflow", "with_keras"),
    "ringtrain/jax/": ("with_jax",),
    "ringtrain/gradients/": ("gradients", "with_torch"),
    "ringtrain/averaging/": ("averaging",),
    "ringtrain/elastic/": ("core", "faults"),
    "ringtrain/launch/": ("launch",),
    "ringtrain/bench/": ("bench",),
    "ringtrain/": ("core",),
    "native/gpu/": ("native", "gpu", "fakes"),
    "native/device/": ("native", "gpu", "fakes"),
    "native/": ("native", "core"),
    "docs/": ("project",),
}
# What no test reaches by a name, and each test depends on.
OF_ALL = {"tests/conftest.py", "tests/worlds.py", "tests/environments.py", "tests/constraints.txt"}


class Chosen(NamedTuple):
    """A file of tests, what takes it to the change, file by file, and its seconds in a whole run."""

    file: str
    way: list[str]
    seconds: float


def choose(
    reaches: Mapping[str, Iterable[str]], changed: set[str], seconds: Mapping[str, float], room: float = ROOM
) -> tuple[list[Chosen], list[Chosen]]:
    """The files of tests that reach a change, nearest first: those that there is room for, and those that there is not.

    reaches: by file, the files that it imports, includes or names. Pure.
    """
    ways = ways_to(changed, reaches)
    found = [Chosen(file, way, seconds.get(file, UNKNOWN)) for file, way in ways.items() if is_test(file)]
    own = folders_about(changed)
    place = {folder: number for number, folder in enumerate(own)}
    found.sort(key=lambda each: (place.get(each.file.split("/")[1], len(own)), len(each.way), each.seconds, each.file))
    taken, left = [], []
    for each in found:
        fits = each.seconds <= room or not taken
        room -= each.seconds if fits else 0.0
        (taken if fits else left).append(each)
    return taken, left


def ways_to(changed: set[str], reaches: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """By file, the shortest way from it to one of the changed files, both included."""
    reached_by: dict[str, list[str]] = {}
    for file in sorted(reaches):
        for other in reaches[file]:
            reached_by.setdefault(other, []).append(file)
    ways = {file: [file] for file in sorted(changed)}
    ahead = deque(ways)
    while ahead:
        file = ahead.popleft()
        for other in reached_by.get(file, ()):
            if other not in ways:
                ways[other] = [other, *ways[file]]
                ahead.append(other)
    return ways


def folders_about(changed: set[str]) -> list[str]:
    """The folders of tests that themselves have changed, and those that are about changed files, each once."""
    own = [file.split("/")[1] for file in sorted(changed) if file.startswith("tests/") and file.count("/") > 1]
    parts = {next((part for part in FOLDERS if file.startswith(part)), "") for file in changed}
    own += [folder for part in FOLDERS if part in parts for folder in FOLDERS[part]]
    return list(dict.fromkeys(own))


def is_test(file: str) -> bool:
    name = Path(file).name
    if file.startswith("tests/native/"):
        return name.endswith(("_test.cc", "_test.c"))
    return file.startswith("tests/") and name.startswith("test_") and name.endswith(".py")


# ---- what files reach ----


def reaches() -> dict[str, set[str]]:
    """By file of this repository, the files that it imports, includes or names."""
    files = {str(path.relative_to(ROOT)) for path in listed()}
    helpers = {Path(file).stem: file for file in sorted(files) if file.startswith("tests/") and file.endswith(".py")}
    sources = {file for file in files if file.startswith("native/")}
    found: dict[str, set[str]] = {}
    for file in files:
        path = ROOT / file
        if file.endswith((".cc", ".h", ".c", ".def")):
            found[file] = included(file, path.read_text(), files)
        elif file.endswith(".py") and file.startswith("ringtrain/"):
            found[file] = imported(path.read_text(), file, files)
        elif file.startswith(("tests/", "examples/", "bin/", "docs/")) or file == "README.md":
            found[file] = named(path.read_text(errors="replace"), files)
            if file.endswith(".py"):
                found[file] |= {helpers[name] for name in names_imported(path.read_text()) if name in helpers}
        found.get(file, set()).discard(file)
    found[LOADER] = found.get(LOADER, set()) | sources
    for file in filter(is_test, files):
        found[file] = found[file] | (OF_ALL & files)
    return found


def listed() -> list[Path]:
    """The files of this checkout that git knows or would add."""
    said = git("ls-files", "--cached", "--others", "--exclude-standard")
    return [ROOT / line for line in said.splitlines() if (ROOT / line).is_file()]


def imported(text: str, file: str, files: set[str]) -> set[str]:
    """What a module of the package imports, also within its functions."""
    found: set[str] = set()
    package = Path(file).parent.parts
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found |= module(alias.name, files)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, [base, node.module or ""]))
            for alias in node.names:
                found |= module(f"{source}.{alias.name}", files) or module(source, files)
    return found


def named(text: str, files: set[str]) -> set[str]:
    """What a text names: modules, in programs too, and files."""
    found = {name for name in PATHS.findall(text) if name in files}
    for name in set(NAMES.findall(text)):
        found |= module(name, files)
    for name, what in re.findall(r"from (ringtrain[\w.]*) import ([\w, ]+)", text):
        for each in re.findall(r"\w+", re.sub(r" as \w+", "", what)):
            found |= module(f"{name}.{each}", files)
    return found


def names_imported(text: str) -> set[str]:
    """The first parts of the names that a Python file imports; none if it is no Python."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return set()
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.split(".")[0] for name in names}


def module(name: str, files: set[str]) -> set[str]:
    """The file of a module, or of the innermost package or module that the name is in; none if it is not ours."""
    parts = name.split(".")
    if parts[0] != "ringtrain":
        return set()
    while parts:
        path = "/".join(parts)
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in files:
                return {file}
        parts.pop()
    return set()


def included(file: str, text: str, files: set[str]) -> set[str]:
    """What a C++ file includes; a header reaches its source as well, whose code it announces."""
    found = set()
    for name in INCLUDES.findall(text):
        beside = str(Path(file).parent / name)
        found |= {each for each in (f"native/{name}", beside) if each in files}
    source = str(Path(file).with_suffix(".cc"))
    return found | ({source} & files if file.endswith(".h") else set())


# ---- the change ----


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@cache
def base_of(asked: str) -> str:
    """The commit that the change is compared with: where it left the branch that was asked for, or main."""
    for name in [asked] if asked else ["origin/main", "main"]:
        try:
            return git("merge-base", "HEAD", name).strip()
        except subprocess.CalledProcessError:
            continue
    raise ValueError(f"--changed: there must be a commit '{asked or 'main'}' to compare with, but git knows none.")


def changed_since(base: str) -> set[str]:
    """Files that differ from a commit, here and now, and those that git does not know yet."""
    return {
        *git("diff", "--name-only", base).splitlines(),
        *git("ls-files", "--others", "--exclude-standard").splitlines(),
    }


def measured() -> dict[str, float]:
    """Seconds by file, as a whole run has written them."""
    if not SECONDS.exists():
        return {}
    lines = [line.split("\t") for line in SECONDS.read_text().splitlines() if not line.startswith("#")]
    return {file: float(taken) for file, taken in lines}


def selected(asked: str) -> tuple[list[str], str]:
    """What bin/test runs for the change since `asked`, and what it says of that; nothing if there is nothing to run."""
    base = base_of(asked)
    changed = changed_since(base)
    taken, left = choose(reaches(), changed, measured())
    said = [f"{len(changed)} files differ from {base[:10]}; {len(taken) + len(left)} files of tests reach them."]
    said += [f"  {each.seconds:5.0f} s  {' -> '.join(each.way)}" for each in taken]
    if left:
        minutes = sum(each.seconds for each in left) / 120
        said.append(f"There was no time for {len(left)} more, of {minutes:.0f} minutes, which are further away:")
        said += [f"  {each.seconds:5.0f} s  {' -> '.join(each.way)}" for each in left[:10]]
        said += ["  ..."] if len(left) > 10 else []
        said.append("bin/test runs all.")
    return [each.file for each in taken], "\n".join(said)
