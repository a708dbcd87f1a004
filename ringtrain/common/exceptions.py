"""Exceptions under ``ringtrain.common.exceptions``, as scripts for Horovod import them.

``HorovodInternalError`` is the base of all run-time errors of this package. The other two belong to Horovod's elastic
training and to its check of framework versions: scripts catch them, ringtrain raises neither.
"""

from ringtrain.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """Hosts came or went while an elastic job ran.

    Attributes:
        skip_sync: whether the state may stay as it is, because hosts only went.
    """

    def __init__(self, skip_sync: bool = False):
        super().__init__(f"hosts were updated (skip_sync={skip_sync})")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than the one that a library was compiled against.

    Attributes:
        name: of the framework.
        version: the one compiled against.
        installed_version: the one found.
    """

    def __init__(self, name: str, version: str, installed_version: str):
        super().__init__(
            f"{name}: version must be {version}, but is {installed_version}. Install the version compiled against."
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version
