"""Which laws are known to be broken by which plans, with the reason. A row goes when what it names is fixed.

A plan is still run if a row fits it, and held to all other laws. Runs print what they excused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from drawn.plan import Plan


@dataclass(frozen=True)
class Known:
    """One exception.

    Attributes:
        laws: names of the laws.
        where: for each dimension that matters, the values for which they are broken.
        reason: what happens, and why it is left.
        like: pattern of the whole of what is wrong; anything else is not excused.
    """

    laws: tuple[str, ...]
    where: dict[str, tuple[str, ...]]
    reason: str
    like: str = ""

    def is_about(self, plan: Plan, law: str) -> bool:
        """Whether this law may be broken by this plan."""
        return law in self.laws and all(getattr(plan, name) in values for name, values in self.where.items())


MPICH_SEGMENTS = r"left over: (\S* ?/dev/shm/mpich_shm_\w+(; |$))+$"
YOUNG_SEGMENT = r"left over: (\S* ?/dev/shm/(mpich_shm|ucx_shm_posix)_\w+(; |$))+$"
DAEMON_FOLDERS = r"left over: (\S* ?(temporary file |/)\S*prted\.\d+(; |$))+$"


KNOWN = [
    Known(
        ("nothing_left",),
        {"engine": ("openmpi",), "fault": ("daemon-kill", "interrupt-twice", "cut")},
        "Open MPI's daemon, killed, leaves a folder, prted.NUMBER, that it alone knows of in TMPDIR",
        DAEMON_FOLDERS,
    ),
    Known(
        ("nothing_left",),
        {"engine": ("mpich",), "fault": ("agent-kill",)},
        "docs/reliability.md: a killed agent under MPICH leaves mpich_shm_..., as nobody else knows of it",
        MPICH_SEGMENTS,
    ),
    Known(
        ("nothing_left",),
        {"engine": ("mpich",), "moment": ("init",)},
        "decision 42: a rank that is killed right after its MPI has made a file, before the agent has looked who maps it",
        YOUNG_SEGMENT,
    ),
]


def why_excused(plan: Plan, law: str, problem: str) -> str:
    """The reason for which a plan need not keep a law in this way; "" if it must."""
    return next((known.reason for known in KNOWN if known.is_about(plan, law) and re.search(known.like, problem)), "")


def may_leave_something(plan: Plan) -> bool:
    """Whether it is known that a plan leaves something, so that it is not worth waiting for its end; a host that is cut off is."""
    return plan.fault != "cut" and any(known.is_about(plan, "nothing_left") for known in KNOWN)
