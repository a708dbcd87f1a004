"""Which tests a change can reach, the nearest first, as many as three minutes hold: `bin/test --changed[=BASE]`.

A file reaches what it imports, includes or names: modules of the package by their dotted names, also in programs that a test
writes as text, helpers of the tests, files of this repository by their paths. All of native/ is one library, which
`ringtrain._binding._native` opens; its own tests are told apart by what they include. Those of the changed part's own folder come
first, and of these, as of the others, those with the fewest such steps to a changed file. tests/seconds.tsv says how long
each file takes; `bin/test -- --record-seconds` writes it, `bin/test FILE -- --record-seconds` the row of a file.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = ROOT / "tests" / "seconds.tsv"
KNOWN = ROOT / "build" / "references.json"  # what the last run has read
ROOM = 240.0  # seconds of tests, which two workers take in two minutes; collecting them takes half a minute
UNKNOWN = 5.0  # seconds of a file that no run has measured
LOADER = "ringtrain/_binding/_native.py"
NAMES = re.compile(r"\b(?:ringtrain|horovod|benchmarks)(?:\.[a-zA-Z_]\w*)*")
PATHS = re.compile(
    r"\b(?:benchmarks|bin|docs|examples|native|tests|ringtrain)/[\w./-]*\w|\b(?:README|CONTRIBUTING)\.md|\bpyproject\.toml"
)
# Helpers of all tests name files in texts and patterns alone; and what texts advise to type is no file of theirs.
HELPER, WORDS = re.compile(r"tests/\w+\.py"), {"bin/test", "bin/faults"}
PAGES = re.compile(r'"([\w-]+\.md)"')
PROGRAMS = re.compile(r"-m\W+((?:ringtrain|benchmarks)[\w.]*)")
SCRIPTS = re.compile(r'"(\w+)\.py"')  # beside a test
INCLUDES = re.compile(r'#include "([^"]+)"')
IMPORTS = re.compile(r"^[ \t]*(?:from|import) (\w[^\n#]*)", re.MULTILINE)
# The folders of tests that are about a part; the core's are for whatever is in no other.
FOLDERS = {
    "ringtrain/torch/": ("with_torch",),
    "ringtrain/keras/": ("with_keras",),
    "ringtrain/tensorflow/": ("with_tensorflow", "with_keras"),
    "ringtrain/jax/": ("with_jax",),
    "ringtrain/_training/averaging/": ("averaging",),
    "ringtrain/_training/": ("gradients", "with_torch"),
    "ringtrain/elastic/": ("core", "faults"),
    "ringtrain/launch/": ("launch",),
    "ringtrain/bench/": ("bench",),
    "benchmarks/": ("bench",),
    "ringtrain/": ("core",),
    "native/gpu/": ("native", "gpu", "fakes"),
    "native/device/": ("native", "gpu", "fakes"),
    "native/": ("native", "core"),
    "docs/": ("project",),
}
# What each test depends on when it changes; by what these import in some fixture a test does not reach anything.
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
    for file in sorted(changed & OF_ALL):
        ways |= {test: [test, file] for test in filter(is_test, reaches) if test not in ways}
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
    references = {str(path.relative_to(ROOT)): each for path, each in read(listed()).items()}
    files = references.keys()
    helpers = {Path(file).stem: file for file in sorted(files) if file.startswith("tests/") and file.endswith(".py")}
    found = {file: resolved(file, each, files, helpers) - {file} for file, each in references.items()}
    found[LOADER] = found.get(LOADER, set()) | {file for file in files if file.startswith("native/")}
    return found


def listed() -> list[Path]:
    """The files of this checkout that git knows or would add."""
    said = git("ls-files", "--cached", "--others", "--exclude-standard")
    return [ROOT / line for line in said.splitlines() if (ROOT / line).is_file()]


def read(paths: list[Path]) -> dict[Path, dict[str, list[str]]]:
    """The references of files. Those of a file that is as it was in the last run are not looked for again."""
    known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    program = Path(__file__).read_bytes()
    found, now = {}, {}
    for path in paths:
        file, text = str(path.relative_to(ROOT)), path.read_bytes()
        key = hashlib.sha1(b"\0".join((program, file.encode(), text))).hexdigest()
        seen = key in known
        now[key] = found[path] = known[key] if seen else references(file, text.decode(errors="replace"))
    KNOWN.parent.mkdir(exist_ok=True)
    (new := KNOWN.with_suffix(f".{os.getpid()}")).write_text(json.dumps(now))
    new.replace(KNOWN)
    return found


def references(file: str, text: str) -> dict[str, list[str]]:
    """What a file imports, includes or names, by kind, in its own words. Pure."""
    if file.endswith((".cc", ".h", ".c", ".def")):
        return {"headers": sorted(set(INCLUDES.findall(text)))}
    if file.endswith(".py") and file.startswith("ringtrain/"):
        return {"modules": sorted(imported(text, file))}
    if not (file.startswith(("tests/", "examples/", "bin/", "docs/")) or file == "README.md"):
        return {}
    paths = {*PATHS.findall(text), *(f"docs/{name}" for name in PAGES.findall(text))}
    if not file.startswith("tests/project/"):
        paths = set() if HELPER.fullmatch(file) else paths - WORDS
    modules = {*NAMES.findall(text), *(f"{name}.{each}" for name, each in names_from(text))}
    modules |= {f"{name}.__main__" for name in PROGRAMS.findall(text)}
    helpers = {*SCRIPTS.findall(text), *packages_imported(text)} if file.endswith(".py") else set()
    found = {"modules": modules, "paths": paths, "helpers": helpers}
    return {kind: sorted(names) for kind, names in found.items()}


def packages_imported(text: str) -> set[str]:
    """The first parts of the names of modules that a Python file imports, also in programs that it writes as text."""
    statements = [line.split(" import ")[0] for line in IMPORTS.findall(text)]
    return {re.split(r"\W", name.strip())[0] for line in statements for name in line.split(",")}


def imported(text: str, file: str) -> set[str]:
    """The names that a module of the package imports, also within its functions, in full."""
    found: set[str] = set()
    package = Path(file).parent.parts
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            found |= {".".join(filter(None, [base, node.module, alias.name])) for alias in node.names}
    return found


def names_from(text: str) -> Iterator[tuple[str, str]]:
    """The names that a text imports from modules of the package, each with its module."""
    for name, what in re.findall(r"from (ringtrain[\w.]*) import ([\w, ]+)", text):
        for each in re.findall(r"\w+", re.sub(r" as \w+", "", what)):
            yield name, each


def resolved(
    file: str, references: Mapping[str, Iterable[str]], files: Set[str], helpers: Mapping[str, str]
) -> set[str]:
    """The files that references mean. A header reaches its source as well, whose code it announces.

    What names a test, to have it run, depends on it no more than the test does on that.
    """
    found = {name for name in references.get("paths", ()) if name in files and not is_test(name)}
    found |= {helpers[name] for name in references.get("helpers", ()) if name in helpers}
    for name in references.get("modules", ()):
        found |= module(name, files)
    for name in references.get("headers", ()):
        found |= {f"native/{name}", str(Path(file).parent / name)} & files
    return found | ({str(Path(file).with_suffix(".cc"))} & files if file.endswith(".h") else set())


def module(name: str, files: Set[str]) -> set[str]:
    """The file of a module, or of the innermost package or module that the name is in; none if it is not ours."""
    parts = name.split(".")
    while parts and parts[0] == "ringtrain":
        path = "/".join(parts)
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in files:
                return {file}
        parts.pop()
    return set()


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
