"""Exceptions under ``ringtrain.common.exceptions``, as scripts for Horovod import them.

``HorovodInternalError`` is the base of all run-time errors of this package. ``HostsUpdatedInterrupt`` is raised in elastic
jobs. The third belongs to Horovod's check of framework versions: scripts catch it, ringtrain does not raise it.
"""

from ringtrain.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """The text of a ``HorovodVersionMismatchError``."""
    return f"{name}: version must be {version}, but is {installed_version}. Install the version compiled against."


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than the one that a library was compiled against.

    Attributes:
        name: of the framework.
        version: the one compiled against.
        installed_version: the one found.
    """

    def __init__(self, name: str, version: str, installed_version: str):
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
