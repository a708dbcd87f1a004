"""Where the package's built library is: beside this file, or in an installation that a checkout hides.

Python looks in the current folder, or in the script's, before it looks at what is installed. In a checkout that nobody
has built this finds all of the package but its library. ``ringtrain`` then takes all of its modules from the
installation.
"""

import os
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder


def built_folder(own: str) -> str:
    """The folder to import the package's modules from: this one if its library is built, else that of the installation.

    Raises:
        ImportError: there is none, or it is of another state than this folder; the text says what to do.
    """
    if _is_built(own):
        return own
    checkout = os.path.dirname(own)
    found = next(filter(_is_built, _others(own)), None)
    if found is None:
        raise ImportError(
            f"ringtrain: the library of '{own}' must be built, but is not, and none is installed for {sys.executable}. "
            f"Build it: {sys.executable} -m pip install -e {checkout}"
        )
    for name in ("version.py", "__init__.py"):
        if _read(own, name) != _read(found, name):
            raise ImportError(
                f"ringtrain: the installation in '{found}' must be of the same state as '{own}', which hides it here, but "
                f"its {name} differs. Install this one: {sys.executable} -m pip install {checkout} , or work in another folder."
            )
    return found


def _is_built(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, "_core" + suffix)) for suffix in EXTENSION_SUFFIXES)


def _others(own: str) -> Iterator[str]:
    """Further folders that this package could be imported from, in Python's order."""
    for entry in sys.path:
        folder = os.path.join(os.path.abspath(entry), "ringtrain")
        if os.path.realpath(folder) != os.path.realpath(own):
            yield folder
    for finder in sys.meta_path:  # an editable installation has one of its own
        spec = None if finder is PathFinder else finder.find_spec("ringtrain", None)
        yield from spec.submodule_search_locations or () if spec else ()


def _read(folder: str, name: str) -> bytes:
    with open(os.path.join(folder, name), "rb") as file:
        return file.read()
