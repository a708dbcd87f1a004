"""ringtrain: data-parallel training over MPI and shared memory, with Horovod's API.

>>> import ringtrain as rt
>>> rt.init()
>>> rt.allreduce(array, name="loss")

Importing this loads neither a framework nor MPI, and NumPy and the native library only when something of ``ringtrain.api``
is asked for: the launcher, and what it starts for each rank, need neither. ``ringtrain.torch`` is for PyTorch.
"""

from __future__ import annotations

import importlib

from ringtrain.installation import built_folder

__path__[:] = [built_folder(__path__[0])]  # before any other module of the package is looked for

from ringtrain.version import __version__ as __version__

TYPE_CHECKING = False  # as typing has it, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any

    from ringtrain.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """What users ask for is in ``api``; what imports ask for first, before they look for a file, is a module or nothing."""
        if name == "__all__":
            return [each for each in __dir__() if not each.startswith("_")]
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
        """The names of ``api``, too."""
        return sorted({*globals(), *dir(importlib.import_module("ringtrain.api"))})
