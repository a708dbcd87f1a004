"""Finds where the package touches what Python or a framework keeps to itself; docs/foreign-internals.md has a row for each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# Of frames, tracebacks and code: what a program is made of while it runs.
_OF_FRAMES = {"_getframe", "_current_frames", "f_back", "f_locals", "f_code", "f_lasti", "co_code", "tb_frame"}


def touched(text: str) -> set[str]:
    """Words for each such place of a program: ``frames``, ``__class__``, or what is written to or private, with its owner."""
    tree = ast.parse(text)
    foreign = dict(_imported(tree))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in _OF_FRAMES:
                found.add("frames")
            elif _is_private(node.attr) and (owner := _owner(node.value, foreign)):
                found.add(f"{owner}.{node.attr}")
            if isinstance(node.ctx, ast.Store):
                found |= set(_written(node, foreign))
        elif isinstance(node, ast.ImportFrom) and _is_foreign(node.module) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names if _is_private(alias.name)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            owner, name = _owner(node.args[0], foreign), node.args[1]
            if owner:
                found.add(f"{owner}.{name.value if isinstance(name, ast.Constant) else '…'} =")
    return found


def _written(node: ast.Attribute, foreign: dict[str, str]) -> Iterator[str]:
    if node.attr == "__class__":
        yield "__class__"
    elif owner := _owner(node.value, foreign):
        yield f"{owner}.{node.attr} ="
    elif isinstance(node.value, ast.Name) and node.value.id.endswith("_class"):  # a class that is given
        yield f"{node.attr} ="


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Names that are bound to modules, or to what they have, of others than this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_foreign(alias.name):
                    yield alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom) and _is_foreign(node.module) and node.level == 0:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _owner(node: ast.expr, foreign: dict[str, str]) -> str:
    """The dotted name of something foreign; empty for all else."""
    if isinstance(node, ast.Name):
        return foreign.get(node.id, "")
    if isinstance(node, ast.Attribute) and (owner := _owner(node.value, foreign)):
        return f"{owner}.{node.attr}"
    return ""


def _is_foreign(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] not in ("ringtrain", "__future__")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def places(package: Path) -> dict[str, set[str]]:
    """What each file touches, by its path in the package."""
    found = {str(path.relative_to(package)): touched(path.read_text()) for path in sorted(package.rglob("*.py"))}
    return {path: words for path, words in found.items() if words}


# What has an underscore and is documented all the same, or is torch's public fused arithmetic by another name.
_PUBLIC = {"os._exit", "_replace", "_fields", "_asdict", "_exit"}


def private_names(package: Path) -> dict[str, set[str]]:
    """By file the private attributes that are used there, and that nothing in the package defines: they are another's."""
    own: set[str] = set()
    used: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        place = str(path.relative_to(package))
        for node in ast.walk(ast.parse(path.read_text())):
            own |= set(_defined(node))
            if name := _asked_for(node):
                used.setdefault(place, set()).add(name)
    return {place: found for place, names in used.items() if (found := names - own - _PUBLIC)}


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            yield node.attr
    elif isinstance(node, ast.alias):
        yield node.asname or node.name


def _asked_for(node: ast.AST) -> str:
    name = ""
    if isinstance(node, ast.Attribute):
        name = node.attr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        given = node.args[1] if len(node.args) > 1 else None
        name = given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else ""
    return name if _is_private(name) else ""


def words_by_file(package: Path) -> dict[str, set[str]]:
    """What a row of the page must name, by file: the last part of each name; ``frames`` and ``__class__``."""
    found: dict[str, set[str]] = {}
    for place, names in [*places(package).items(), *private_names(package).items()]:
        words = {name.removesuffix(" =").rpartition(".")[2] for name in names - _PUBLIC} - _OF_FRAMES
        found[place] = found.get(place, set()) | words
    return {place: names for place, names in found.items() if names}
