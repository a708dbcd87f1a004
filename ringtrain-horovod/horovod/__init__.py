"""The name ``horovod`` for ringtrain: ``horovod.torch`` is ``ringtrain.torch``, the same module, and so with all others.

Nothing stands here but the name. What ringtrain does not have (``horovod.ray``) is not found.
"""

import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from ringtrain import run

__all__ = ["run"]
__version__ = "0.28.1"  # the release of Horovod whose names ringtrain has; programs ask for it


def _refuse_horovod_itself() -> None:
    """Raises ImportError where Horovod is installed, too: both own this folder, and some files of each may be gone."""
    try:
        itself = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"ringtrain-horovod: expected to be the only package named horovod, but Horovod {itself} is installed, too. Run pip "
        "uninstall horovod ringtrain-horovod, then install the one that you want.",
        name="horovod",
    )


def _of_ringtrain(name: str) -> str:
    return "ringtrain" + name.removeprefix("horovod")


class _Alias(importlib.abc.InspectLoader):
    """Gives out a module of ringtrain under its name here."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(_of_ringtrain(module.__name__))

    def get_code(self, fullname: str) -> CodeType | None:
        """For ``python -m``."""
        spec = importlib.util.find_spec(_of_ringtrain(fullname))
        loader = None if spec is None else spec.loader
        return loader.get_code(_of_ringtrain(fullname)) if isinstance(loader, importlib.abc.InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        return None

    def is_package(self, fullname: str) -> bool:
        spec = importlib.util.find_spec(_of_ringtrain(fullname))
        return spec is not None and spec.submodule_search_locations is not None


class _Aliases(importlib.abc.MetaPathFinder):
    """Finds what ringtrain has. It comes first, since a module of ringtrain's that is found by its path would be a second one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("horovod.") or importlib.util.find_spec(_of_ringtrain(fullname)) is None:
            return None
        alias = _Alias()
        return ModuleSpec(fullname, alias, is_package=alias.is_package(fullname))


_refuse_horovod_itself()
sys.meta_path.insert(0, _Aliases())
