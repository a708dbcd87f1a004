"""ringtrain: data-parallel training over MPI and shared memory, with Horovod's API.

>>> import ringtrain as rt
>>> rt.init()
>>> rt.allreduce(array, name="loss")

Importing this loads neither a framework nor MPI, and NumPy and the native library only when something of ``ringtrain.api``
is asked for: the launcher, and what it starts for each rank, need neither. ``ringtrain.torch`` is for PyTorch.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib import machinery

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def _built_folder(own: str) -> str:
    """The folder to import the package's modules from: this one if its library is built, else that of the installation.

    Python looks in the current folder, or in the script's, before it looks at what is installed. In a checkout that nobody
    has built this finds all of the package but its library. All modules are then taken from the installation.

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
    return any(os.path.exists(os.path.join(folder, "_core" + suffix)) for suffix in machinery.EXTENSION_SUFFIXES)


def _others(own: str) -> Iterator[str]:
    """Further folders that this package could be imported from, in Python's order."""
    for entry in sys.path:
        folder = os.path.join(os.path.abspath(entry), "ringtrain")
        if os.path.realpath(folder) != os.path.realpath(own):
            yield folder
    for finder in sys.meta_path:  # an editable installation has one of its own
        spec = None if finder is machinery.PathFinder else finder.find_spec("ringtrain", None)
        yield from spec.submodule_search_locations or () if spec else ()


def _read(folder: str, name: str) -> bytes:
    with open(os.path.join(folder, name), "rb") as file:
        return file.read()


__path__[:] = [_built_folder(__path__[0])]  # before any other module of the package is looked for

from ringtrain.version import __version__ as __version__

if TYPE_CHECKING:
    from ringtrain.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """What users ask for is in ``api``; what imports ask for first, before they look for a file, is a module or nothing."""
        if name == "__all__":
            return importlib.import_module("ringtrain.api").__all__
        if name.startswith("__"):  # asked of any module, by tools
            raise AttributeError(f"module 'ringtrain' has no attribute '{name}'")
        from importlib.util import find_spec  # takes milliseconds, which agents need not

        module = find_spec(f"ringtrain.{name}")
        if module is not None:
            if module.submodule_search_locations is not None:
                raise AttributeError(f"module 'ringtrain' has no attribute '{name}' before 'import ringtrain.{name}'")
            return importlib.import_module(f"ringtrain.{name}")
        api = importlib.import_module("ringtrain.api")
        try:
            value = getattr(api, name)
        except AttributeError:
            raise AttributeError(f"module 'ringtrain' has no attribute '{name}'") from None
        globals()[name] = value  # found at once from now on
        return value

    def __dir__() -> list[str]:
        """The public names, which are those of ``api``."""
        return sorted(["__version__", *importlib.import_module("ringtrain.api").__all__])
