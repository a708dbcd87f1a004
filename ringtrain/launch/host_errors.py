"""Why a host cannot be used: what ssh says, in our words, and what to do."""

from __future__ import annotations

import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
# What ssh mentions and is no reason: a host that it meets for the first time, and a banner of its own.
SSH_NOTICE = re.compile(r"(Warning: Permanently added|Warning: No xauth data|\*\* |debug\d: |Connection to \S+ closed)")
# What ssh says -> the reason in our words, and what to do.
SSH_REASONS = (
    (r"can't open file", f"there is no ringtrain that it may read at {PACKAGE} there",
     "Install the same environment at the same path on each host, or share it"),
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED",
     "its host key has changed since it was last seen", "If that is expected, forget the old key: ssh-keygen -R {host}"),
    (r"Host key verification failed", "its host key is not the one that is known",
     "If that is expected, forget the old key: ssh-keygen -R {host}"),
    (r"Permission denied", "it accepts no key of this user, and a launcher cannot type a password",
     "Make a key once with ssh-keygen and take it there: ssh-copy-id {host}"),
    (r"Could not resolve hostname|Name or service not known", "its name cannot be resolved",
     "Check the spelling, or add it to /etc/hosts"),
    (r"(kex|ssh)_exchange_identification|banner exchange|Connection (reset|closed) by",
     "its sshd, or that of a host on the way, takes no more logins at a time", "Raise MaxStartups in its sshd_config"),
    (r"Connection refused", "nothing listens on its ssh port", "Start sshd there, or name its port: --ssh-port"),
    (r"Connection to \S+ port \d+ timed out",
     "it answers, but the login stops where packets become large", "See whether the path loses those, as with an MTU that "
     "nobody is told of: ping -c 1 -M do -s 1472 {host}"),
    (r"Connection timed out|No route to host|Network is unreachable|Operation timed out", "it does not answer",
     "Check that it is up and that no firewall is between"),
    (r"Identity file \S+ not accessible", "the identity file cannot be read", "Check --ssh-identity-file"),
    (r"(python\S*: (not found|No such file)|No such file or directory)", f"there is no Python at {sys.executable} there",
     "Make the environment at the same path on each host, or share it"),
)  # fmt: skip
# Of those, what a host says that is not up yet.
NOT_THERE = ("its name cannot be resolved", "nothing listens on its ssh port", "it does not answer")
BUSY = ("its sshd, or that of a host on the way, takes no more logins at a time",)


class LaunchError(RuntimeError):
    """Nothing could be started; the text says why and what to do."""


class HostError(RuntimeError):
    """A host that cannot be used: its name, the reason, and what to do.

    reason: that alone, if it is a known one.
    """

    def __init__(self, text: str, reason: str = ""):
        super().__init__(text)
        self.reason = reason


class HostNotThereError(HostError):
    """One that may come yet."""


class HostBusyError(HostError):
    """One that takes no more logins at the moment."""
