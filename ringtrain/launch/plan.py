"""What is to be run, as decided by `cli`: plain data, read by the engines' files and by `job`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ringtrain.launch.hosts import Host, is_this_host

# Of this machine or of this shell; and CUDA_VISIBLE_DEVICES means other devices elsewhere.
NOT_FORWARDED = ("BASH_FUNC_", "OLDPWD", "HOSTNAME", "DISPLAY", "SSH_", "XDG_", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Plan:
    """A command on a number of ranks, and where they run."""

    command: list[str]
    ranks: int
    hosts: list[Host]
    verbose: bool = False
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    as_root: bool = field(default_factory=lambda: os.geteuid() == 0)

    @property
    def has_remote_hosts(self) -> bool:
        """Whether a rank runs on another machine than the launcher."""
        return not all(is_this_host(host.name) for host in self.hosts)

    @property
    def oversubscribed(self) -> bool:
        """Whether some host has more ranks than this machine has cores; others are taken to be like it."""
        return max(host.slots for host in self.hosts) > self.cores

    @property
    def forwarded(self) -> list[str]:
        """Names of the variables that ranks on other hosts need."""
        return sorted(name for name in os.environ
                      if not name.startswith(NOT_FORWARDED) and name.replace("_", "").isalnum())
