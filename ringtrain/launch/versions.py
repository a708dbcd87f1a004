"""Which of the packages that ringtrain works with are installed. Used by `commands` and `examine`."""

from __future__ import annotations


def version_of(module: str) -> str:
    """The version that is installed, without importing it."""
    import importlib.metadata  # a twentieth of the launcher's start, which asks for no version

    for distribution in (module, f"{module}-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"
