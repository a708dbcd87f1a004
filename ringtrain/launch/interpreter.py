"""How the launcher starts Python for programs of its own: what is installed comes before what the current folder has.

By itself `python -c` and `python -m` look in the current folder first, where a checkout may hide the installation and a
script of the user's a module of Python's. `-P` says so from Python 3.11 on alone, and `-I` ignores PYTHONPATH, which
users need. `version_of` says what is installed.
"""

from __future__ import annotations

import sys

CURRENT_FOLDER_LAST = 'import sys\nif sys.path[0] == "": sys.path.append(sys.path.pop(0))'
RUN_MODULE = (
    CURRENT_FOLDER_LAST + "\nimport runpy\nrunpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def program(text: str) -> list[str]:
    """The command line that runs a program's text."""
    return [sys.executable, "-c", f"{CURRENT_FOLDER_LAST}\n{text}"]


def module(name: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command line that runs a module as `python -m` does."""
    return [python, "-c", RUN_MODULE, name, *arguments]


def version_of(module: str) -> str:
    """The version that is installed, without importing it."""
    import importlib.metadata  # a twentieth of the launcher's start, which asks for no version

    for distribution in (module, f"{module}-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"
