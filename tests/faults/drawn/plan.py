"""What a drawn job can be: a value from each table; pure.

The first value of each table is the plainest one. A plan is written as `fault=kill moment=between ranks=2 ...`, from
which it can be run again; what is left out is plain, so a plan is made smaller by taking words away.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

ANY_MOMENT = ("between", "before", "init", "allreduce", "backward", "shutdown", "output")
OF_A_WORLD = ("between", "allreduce", "backward", "output")  # all ranks are in it, and have operations ahead
OWN_MOMENTS = tuple(
    moment for moment in ANY_MOMENT if moment != "init"
)  # a rank that is within init() cannot do anything else
BEFORE_THE_WORLD = ("before", "init")


@dataclass(frozen=True)
class Fault:
    """What breaks, and what is promised then.

    Attributes:
        deed: what happens, in words.
        codes: exit codes that ringtrainrun may return; () for any but 0.
        account: pattern of what the launcher says last of all, {v} standing for a victim; "" if it has nothing to say.
        told: pattern of what ranks that live are told, within `within` seconds; "" if nothing is promised.
        within: seconds from the fault until ranks are told. The launcher has ended SECONDS_TO_END later.
        inside: whether the victim does it to itself.
        moments: at which it can happen.
        victims: how many ranks it needs.
        peers: how many ranks it needs beside them.
        goes_on: whether the job is to go on, and end well.
        weight: how often it is drawn, beside others.
    """

    deed: str
    codes: tuple[int, ...] = ()
    account: str = ""
    told: str = ""
    within: float = 2.0
    inside: bool = False
    moments: tuple[str, ...] = ANY_MOMENT
    victims: int = 1
    peers: int = 0
    goes_on: bool = False
    weight: int = 2


DEAD_AFTER = 4.0  # seconds: RINGTRAIN_DEAD_AFTER_SECONDS of all drawn jobs
STALL_ABORT = 3.0  # seconds, RINGTRAIN_STALL_ABORT_SECONDS of those in which a rank comes late
START_TIMEOUT = 10.0  # seconds, RINGTRAIN_START_TIMEOUT_SECONDS of those in which a rank never comes
HEADER = r"rank {v} \(host \S+\) "
FAILED = HEADER + r"failed with exit code "
KILLED = HEADER + r"was killed by signal "
SILENT = r"rank {v} on host '\S+': expected a sign of life"
MISSING = r"missing rank {v}\b"
DIFFERS = r"must be the same on all ranks"
RAISED = r"rank {v} ended with an uncaught exception: "
GONE = r"rank {v}\b"


def inside(deed: str, code: int, account: str, told: str, **more: object) -> Fault:
    """A fault that the victim does to itself."""
    return Fault(deed, (code,), account, told, inside=True, **{"moments": OWN_MOMENTS, **more})


FAULTS = {
    "none": Fault("nothing", (0,), victims=0, goes_on=True, weight=4),
    "kill": Fault("SIGKILL for a rank", (137,), KILLED + "9", GONE, weight=4),
    "kill-two": Fault(
        "SIGKILL for two ranks at once",
        (137,),
        r"ranks? ({v}|{w})\b.* killed by signal 9",
        r"rank ({v}|{w})\b",
        victims=2,
    ),
    "term": Fault("SIGTERM for a rank", (143,), KILLED + "15", GONE),
    "stop": Fault(
        "SIGSTOP for a rank",
        (),
        SILENT,
        SILENT,
        within=DEAD_AFTER + 2,
        peers=1,
        moments=("between", "allreduce", "backward", "output", "before", "init"),
    ),
    "segv": inside("a read of address 8", 139, KILLED + "11", GONE),
    "abort": inside("os.abort()", 134, KILLED + "6", GONE),
    "terminate": inside("std::terminate()", 134, KILLED + "6", GONE),
    "exit": inside("exit(9)", 9, FAILED + "9", GONE),
    "system-exit": inside("raise SystemExit(7)", 7, FAILED + "7", GONE),
    "sys-exit": inside("sys.exit(3)", 3, FAILED + "3", GONE),
    "leave": inside("os._exit(5)", 5, FAILED + "5", GONE),
    "raise": inside("an uncaught ValueError", 1, FAILED + "1", RAISED + "ValueError: the drawn fault", weight=4),
    "memory": inside("a MemoryError", 1, FAILED + "1", RAISED + "MemoryError"),
    "thread": inside(
        "an exception in the thread that was to submit",
        1,
        MISSING,
        MISSING,
        within=STALL_ABORT + 2,
        peers=1,
        moments=("between",),
    ),
    "stall": inside(
        "a rank that never submits",
        1,
        MISSING,
        MISSING,
        within=STALL_ABORT + 2,
        peers=1,
        moments=("between", "output", "before"),
    ),
    "dtype": inside(
        "another dtype than its peers'", 1, DIFFERS, DIFFERS, peers=1, moments=("between", "allreduce", "output")
    ),
    "shape": inside(
        "another shape than its peers'", 1, DIFFERS, DIFFERS, peers=1, moments=("between", "allreduce", "output")
    ),
    # Before its parent has called init(), it is the rank: so do programs that start the training script.
    "child": inside("a Python child that calls init()", 0, "", "", goes_on=True, moments=("between", "shutdown")),
    "launcher-kill": Fault("SIGKILL for the launcher", (137,), victims=0),
    "launcher-term": Fault("SIGTERM for the launcher", (143,), "stopped by SIGTERM", victims=0),
    "hangup": Fault("SIGHUP for the launcher", (129,), "stopped by SIGHUP", victims=0),
    "interrupt": Fault("Ctrl-C", (130,), "stopped by SIGINT", victims=0),
    "interrupt-twice": Fault("Ctrl-C, and again", (130,), "stopped by SIGINT", victims=0),
    "agent-kill": Fault("SIGKILL for an agent", (), r"\S", victims=0),
    "engine-kill": Fault("SIGKILL for mpirun", (), r"\S", victims=0),
    "daemon-kill": Fault("SIGKILL for a daemon of the engine", (), r"\S", victims=0),
    "cut": Fault(
        "a host that leaves the network",
        (),
        r"\S",
        r"ranks? \d[\d, -]* on host '\S+'",
        within=DEAD_AFTER + 2,
        victims=0,
        moments=("between", "allreduce"),
        weight=1,
    ),
}


@dataclass(frozen=True)
class Layout:
    """Where the ranks are: how many on each host. Hosts are namespaces, or simulated by `host_layout`."""

    ranks: tuple[int, ...]
    is_simulated: bool = False
    weight: int = 2

    @property
    def size(self) -> int:
        return sum(self.ranks)

    @property
    def has_hosts(self) -> bool:
        """Whether it needs hosts of its own."""
        return len(self.ranks) > 1 and not self.is_simulated


LAYOUTS = {
    "2": Layout((2,), weight=6),
    "1": Layout((1,)),
    "3": Layout((3,), weight=4),
    "4": Layout((4,)),
    "1|1": Layout((1, 1), is_simulated=True),
    "2|1": Layout((2, 1), is_simulated=True),
    "1+1": Layout((1, 1), weight=1),
    "2+1": Layout((2, 1), weight=1),
    "1+1+1": Layout((1, 1, 1), weight=1),
}
HOSTS = ("node-a", "node-b", "node-c")

MOMENTS = {
    "between": "between operations",
    "before": "before init()",
    "init": "within init(), while another rank has not come yet",
    "allreduce": "in an allreduce of many MB",
    "backward": "in torch's backward()",
    "shutdown": "in shutdown(), or right after it",
    "output": "while all ranks print",
}
ENGINES = {"openmpi": 3, "mpich": 2, "tcp": 3}  # what starts the ranks, and how often it is drawn; tcp: the agents
OUTPUTS = {
    "pipe": "two pipes that are read",
    "unread": "two pipes that nobody reads",
    "terminal": "a terminal",
    "file": "two files",
    "full": "stdout into /dev/full",
    "folder": "--output-filename",
    "full-folder": "--output-filename on a disk of 64 KiB",
    "closed": "stdout and stderr closed",
}
SURROUNDINGS = {
    "plain": "a quiet shell",
    "nohup": "SIGHUP ignored",
    "no-sigpipe": "SIGPIPE ignored",
    "background": "a background job of a terminal with tostop",
    "stray": "variables of another job of ringtrain, Open MPI and PMI",
    "no-home": "no HOME",
    "no-folder": "a working directory that was removed",
    "umask": "umask 077",
    "few-files": "128 descriptors",
    "within": "a rank of another ringtrainrun",
}
REFUSED = ("no-folder", "within")  # surroundings in which no job can start
COMPANIES = {
    "alone": "nothing beside the ranks",
    "deaf": "a child of each rank that ignores SIGTERM",
    "orphan": "a child of a child of each rank, in a session of its own",
    "memory": "shared memory and a semaphore of multiprocessing in each rank",
}


@dataclass(frozen=True)
class Plan:
    """One drawn job.

    Attributes:
        victim: the rank that the fault is done to, or the first of two; of hosts, the one with this rank.
        delay: hundredths of a second from the moment to the fault, where it comes from outside.
    """

    fault: str = "none"
    moment: str = "between"
    layout: str = "2"
    engine: str = "openmpi"
    output: str = "pipe"
    surroundings: str = "plain"
    company: str = "alone"
    victim: int = 0
    delay: int = 0

    def __str__(self) -> str:
        """All that is not plain, as `parse` reads it; "fault=none" if everything is."""
        words = [f"{name}={value}" for name, value in self.values() if value != getattr(PLAINEST, name)]
        return shlex.join(words or ["fault=none"])

    def values(self) -> Iterator[tuple[str, str | int]]:
        """The name and value of each field."""
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    @property
    def victims(self) -> tuple[int, ...]:
        """The ranks that the fault is done to: the drawn one, and those after it."""
        size = LAYOUTS[self.layout].size
        return tuple((self.victim + further) % size for further in range(FAULTS[self.fault].victims))

    @property
    def goes_on(self) -> bool:
        """Whether the job is to end well: nothing breaks, or what happens is to be ignored."""
        return FAULTS[self.fault].goes_on or (self.fault == "hangup" and self.surroundings == "nohup")


PLAINEST = Plan()
DIMENSIONS = {"fault": list(FAULTS), "moment": list(MOMENTS), "layout": list(LAYOUTS), "engine": list(ENGINES),
              "output": list(OUTPUTS), "surroundings": list(SURROUNDINGS), "company": list(COMPANIES)}  # fmt: skip


def parse(text: str) -> Plan:
    """The plan that was written so. Raises ValueError if a word is not one of a plan, or its values do not go together."""
    plan = PLAINEST
    for word in shlex.split(text):
        name, _equals, value = word.partition("=")
        if name in DIMENSIONS and value in DIMENSIONS[name]:
            plan = replace(plan, **{name: value})
        elif name in ("victim", "delay") and value.isdigit():
            plan = replace(plan, **{name: int(value)})
        else:
            known = ", ".join(DIMENSIONS.get(name, ())) or "a number" if name in dict(PLAINEST.values()) else ""
            raise ValueError(
                f"plan: '{word}' must be one of {known}."
                if known
                else f"plan: '{word}' must set one of {', '.join(dict(PLAINEST.values()))}."
            )
    if reason := why_impossible(plan):
        raise ValueError(f"plan '{text}': {reason}.")
    return plan


# What does not go together, and why. Each rule sees a whole plan.
IMPOSSIBLE = [
    ("this fault cannot happen at this moment", lambda p: p.moment not in FAULTS[p.fault].moments),
    ("the fault needs more ranks", lambda p: LAYOUTS[p.layout].size < FAULTS[p.fault].victims + FAULTS[p.fault].peers),
    ("there is no such rank", lambda p: p.victim >= LAYOUTS[p.layout].size),
    ("within init() a rank waits for one that is no victim",
     lambda p: p.moment == "init" and LAYOUTS[p.layout].size <= FAULTS[p.fault].victims),
    ("in shutdown() a rank waits for another that is no victim, else it is through before anybody does something to it",
     lambda p: p.moment == "shutdown" and p.fault != "none" and not FAULTS[p.fault].inside
     and LAYOUTS[p.layout].size <= max(1, FAULTS[p.fault].victims)),
    ("a network is between hosts", lambda p: p.fault == "cut" and not LAYOUTS[p.layout].has_hosts),
    ("on one host mpirun of Open MPI has no daemon",
     lambda p: p.fault == "daemon-kill" and p.engine == "openmpi" and not LAYOUTS[p.layout].has_hosts),
    ("without MPI there is no engine: the agents start the ranks",
     lambda p: p.fault in ("engine-kill", "daemon-kill") and p.engine == "tcp"),
    ("a background job is one of a terminal", lambda p: p.surroundings == "background" and p.output != "terminal"),
    ("a job that is refused has no fault, moment or company", lambda p: p.surroundings in REFUSED and (
        p.fault != "none" or p.moment != "between" or p.company != "alone")),
    ("no hosts are pretended for the one rank of an outer job",
     lambda p: p.surroundings == "within" and LAYOUTS[p.layout].is_simulated),
    ("ranks wait for the reader of what they print, and so does a job that is to end well", lambda p: p.output == "unread" and (
        p.goes_on or (p.moment == "output" and (FAULTS[p.fault].inside or p.fault == "stop")))),
    ("hosts have folders and disks of their own", lambda p: LAYOUTS[p.layout].has_hosts and (
        p.surroundings in (*REFUSED, "background") or p.output in ("full-folder", "terminal"))),
    ("Ctrl-C is not typed into a background job",
     lambda p: p.surroundings == "background" and p.fault.startswith("interrupt")),
]  # fmt: skip


def why_impossible(plan: Plan) -> str:
    """Why these values do not go together; "" if they do."""
    return next((reason for reason, excludes in IMPOSSIBLE if excludes(plan)), "")
