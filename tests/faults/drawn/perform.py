"""Performs a plan: starts the job in its surroundings, does to it what comes from outside, and returns what was seen.

What the job is and what may be said of it is decided elsewhere (`plan`, `laws`); here is all that touches processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from environments import PATHS, python_with, transport_of

from benchmarks.jobs import Job, namespace_prefix
from drawn.expectation import expect, sizes
from drawn.known import may_leave_something
from drawn.outcome import Heard, Outcome
from drawn.plan import DEAD_AFTER, ENGINES, FAULTS, HOSTS, LAYOUTS, REFUSED, STALL_ABORT, START_TIMEOUT, Plan
from ringtrain.bench import namespaces

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SECONDS_TO_START = 60.0
SECONDS_BEYOND = 3.0  # that a launcher which does not end is waited for, after it should have
SECONDS_UNTIL_CLEAN = 30.0  # P4; no load makes it longer
SECONDS_BETWEEN_INTERRUPTS = 0.3
SECONDS_IF_EXCUSED = 3.0
MOST_LOAD = 4.0  # runnable processes for each core that are allowed for
PAUSE = 0.02
LAUNCHER = ("-m", "ringtrain.launch")
INHERITED = dict(os.environ)  # now: threads start jobs, and pytest changes it for each test
WITH_HOSTS = {name for name, layout in LAYOUTS.items() if layout.has_hosts}
# How the command lines of those begin that are killed.
KEEPERS = {"launcher": r"\S+ -m ringtrain.launch ", "engine": r"\S+/(prterun|mpirun|mpiexec|mpiexec.hydra) ",
           "agent": r"\S+ -I -S \S+/agent/__main__.py ", "daemon": r"\S*(prted|hydra_pmi_proxy) "}  # fmt: skip


class NobodyThere(LookupError):
    """The fault cannot be done: whom it is for has ended before."""


class Machine:
    """Where plans are performed: this machine, with hosts in namespaces if it can make them. Use it in a `with` block.

    Several plans may be performed at once by threads, those on hosts one after another. It must be entered on a thread
    that lives as long: the kernel ends the hosts with that thread.

    Args:
        without: values that shall not be in any plan.

    Attributes:
        lacks: the values that this machine cannot do, and what each needs.
        cannot: these, and those of `without`.
    """

    def __init__(self, without: frozenset[str] = frozenset()):
        self.lacks = values_that_cannot_be()
        self.cannot = frozenset(without | self.lacks.keys())
        self.network: namespaces.HostNetwork | None = None
        self._one_job_on_hosts = threading.Lock()

    def __enter__(self) -> Machine:
        if WITH_HOSTS - self.cannot:
            self.network = namespaces.HostNetwork(
                dict(zip(HOSTS, ("eth0", "ens5", "enp3s0"), strict=True)), login_path="/nonexistent"
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.network is not None:
            self.network.close()

    def perform(
        self, plan: Plan, launcher: Sequence[str] = LAUNCHER, load: float | None = None, patience: float | None = None
    ) -> Outcome:
        """Runs one plan to its end, and kills what is left of it.

        Args:
            launcher: what Python runs; another one than ringtrainrun shows whether the laws find what it does wrong.
            load: how much longer than on a quiet machine things may take; None for what the kernel says.
            patience: seconds until nothing may be left; None for what is promised.
        """
        if patience is None:
            patience = SECONDS_IF_EXCUSED if may_leave_something(plan) else SECONDS_UNTIL_CLEAN
        on_hosts = LAYOUTS[plan.layout].has_hosts
        with self._one_job_on_hosts if on_hosts else contextlib.nullcontext(), closing(Job()) as job, \
                tempfile.TemporaryDirectory(prefix="ringtrain-drawn-") as folder:  # fmt: skip
            running = Running(plan, job, Path(folder), self.network if on_hosts else None, launcher, load)
            try:
                return running.outcome(patience)
            finally:
                running.clear()


def values_that_cannot_be() -> dict[str, str]:
    """The values of plans that this machine cannot do, and what each needs."""
    found = dict.fromkeys(("cut", *WITH_HOSTS), missing) if (missing := namespaces.missing()) else {}
    if not namespace_prefix():
        found["full-folder"] = "this kernel gives no process mounts of its own: run as root, in no container"
    for engine in ENGINES:
        try:
            python_with(engine)
        except pytest.skip.Exception as skipped:
            found[engine] = str(skipped)
    return found


class Running:
    """One job: its launcher, its output, and the notes of its ranks."""

    def __init__(
        self,
        plan: Plan,
        job: Job,
        folder: Path,
        network: namespaces.HostNetwork | None,
        launcher: Sequence[str],
        load: float | None,
    ):
        self.plan, self.job, self.folder, self.network = plan, job, folder, network
        self.expected = expect(plan)
        self.allowance, self.load = load, load or 1.0
        (folder / "output").mkdir()
        self.output = Output(plan.output, folder)
        # On hosts, those that nsenter has put there are found by their mark; the helper itself is no process of the
        # job.
        self.launcher = job.start(*self._command(launcher), cwd=ROOT, stdin=self.output.stdin, stdout=self.output.stdout,
                                  stderr=self.output.stderr, env=environment(plan))  # fmt: skip
        self.output.begin()
        self.began = time.monotonic()

    def outcome(self, patience: float) -> Outcome:
        """Does what comes from outside when the moment has come, awaits the end, and looks at what is there then."""
        struck_at = self._strike()
        code = self._await_end(struck_at or time.monotonic())
        ended = time.monotonic()
        left = () if code is None else tuple(self._await_nothing(patience))
        stdout, stderr = self.output.read()
        since = struck_at or self.began
        return Outcome(
            code,
            ended - since,
            struck_at is not None,
            stdout,
            stderr,
            self._heard(since),
            self._files(),
            left,
            self.load,
        )

    def clear(self) -> None:
        """Ends what is left, and makes the hosts as they were."""
        if self.network is not None:
            for host in self.network.hosts.values():
                self.network.plug_in(host.name)
                for pid in host.processes():
                    host.run("kill", "-KILL", str(pid))
                host.run("sh", "-c", f"rm -rf /dev/shm/* {host.folder}/tmp/*")
        if self.launcher.poll() is None:
            self.launcher.kill()
        self.output.close()

    # ---- the fault ----

    def _strike(self) -> float | None:
        """When the fault happened, by the machine's monotonic clock; None if the job had ended before."""
        plan = self.plan
        if plan.surroundings in REFUSED:
            return self.began
        note = f"struck-{plan.victim}" if FAULTS[plan.fault].inside else "at-"
        count = 1 if FAULTS[plan.fault].inside else len(sizes(plan))
        seconds = SECONDS_TO_START * (self.allowance or current_load())
        if not self._await_that(lambda: len(list(self.folder.glob(f"{note}*"))) >= count, seconds):
            return None
        if FAULTS[plan.fault].inside:
            return self.note(note)["at"]
        time.sleep(plan.delay / 100)
        at = time.monotonic()
        try:
            DEEDS[plan.fault](self)
        except NobodyThere:
            return None
        if plan.goes_on or FAULTS[plan.fault].victims:
            (self.folder / "go").touch()
        return at

    def signal_ranks(self, number: int) -> None:
        """Sends the victims a signal, one right after another."""
        for pid in [self.process_of(rank) for rank in self.plan.victims]:
            send(pid, number)

    def signal_launcher(self, number: int) -> None:
        """Sends the launcher a signal, the outer one if there are two."""
        send(self.find("launcher")[0], number)

    def interrupt(self) -> None:
        """Types Ctrl-C, where there is a terminal."""
        if self.output.keyboard is not None:
            os.write(self.output.keyboard, b"\x03")
        else:
            self.signal_launcher(signal.SIGINT)

    def interrupt_twice(self) -> None:
        self.interrupt()
        time.sleep(SECONDS_BETWEEN_INTERRUPTS)
        if self.launcher.poll() is None:
            with contextlib.suppress(NobodyThere):  # it has just ended
                self.interrupt()

    def kill(self, keeper: str) -> None:
        """Kills one of those that keep the job: of several the last, which is the one on the victim's host if it has hosts."""
        found = self.find(keeper)
        send(found[self.plan.victim % len(found)], signal.SIGKILL)

    def cut(self) -> None:
        """Takes the last host off the network, so that the launcher stays."""
        self.network.unplug(HOSTS[len(LAYOUTS[self.plan.layout].ranks) - 1])

    def find(self, keeper: str) -> list[int]:
        """Process ids of a kind of keeper. Raises NobodyThere if there is none."""
        processes = self.job.processes() | (processes_within(self.network) if self.network else {})
        found = sorted(pid for pid, line in processes.items() if re.match(KEEPERS[keeper], line))
        if not found:
            raise NobodyThere(keeper)
        return found

    def process_of(self, rank: int) -> int:
        """Process id of a rank, as it is seen from here. Raises NobodyThere if it has ended."""
        program = str(HERE / "program.py").encode()
        for pid in self.job.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if words[1:2] == [program] and f"RINGTRAIN_RANK={rank}".encode() in variables and os.getsid(pid) == pid:
                    return pid
        raise NobodyThere(f"rank {rank}")

    # ---- waiting and seeing ----

    def _await_that(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits until something is so; False if the launcher has ended before, or the time has."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                return condition()
            time.sleep(PAUSE)
        return True

    def _await_end(self, since: float) -> int | None:
        while self.launcher.poll() is None:
            self.load = self.allowance or max(self.load, current_load())
            if time.monotonic() > since + (self.expected.seconds + SECONDS_BEYOND) * self.load:
                return None
            time.sleep(PAUSE)
        code = self.launcher.returncode
        return code if code >= 0 else 128 - code

    def _await_nothing(self, seconds: float) -> list[str]:
        """Waits until nothing is left of the job; returns what is."""
        deadline = time.monotonic() + seconds
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(5 * PAUSE)
        return left

    def _left(self) -> list[str]:
        left = self.job.left().splitlines() + [
            f"{self.job.temporary}/{name}" for name in sorted(os.listdir(self.job.temporary))
        ]
        for host in self.network.hosts.values() if self.network else ():
            left += [f"{host.name}: {what}" for what in host.left()]
            left += [f"{host.name}: temporary file {name}" for name in sorted(os.listdir(host.folder / "tmp"))]
        sockets = {self.note(path.name)["text"] for path in self.folder.glob("socket-*")} - {""}
        open_sockets = Path("/proc/net/unix").read_text()
        return left + [f"socket {name}" for name in sorted(sockets) if f"@{name}" in open_sockets]

    def note(self, name: str) -> dict:
        """What a rank has noted."""
        return json.loads((self.folder / name).read_text())

    def _heard(self, since: float) -> dict[int, Heard]:
        heard = {}
        for path in self.folder.glob("heard-*"):
            noted = self.note(path.name)
            kind, text = json.loads(noted["text"])
            heard[int(path.name.rpartition("-")[2])] = Heard(kind, text, noted["at"] - since)
        return heard

    def _files(self) -> dict[int, str]:
        found = self.folder.glob("output/rank.*/stdout")
        return {int(path.parent.name.rpartition(".")[2]): path.read_text(errors="replace") for path in found}

    # ---- starting ----

    def _command(self, launcher: Sequence[str]) -> list[str]:
        plan, layout = self.plan, LAYOUTS[self.plan.layout]
        python = python_with(plan.engine)
        line = [python, *launcher, *transport_of(plan.engine), "-np", str(layout.size)]
        if plan.surroundings == "within":
            line = [python, *launcher, *transport_of(plan.engine), "-np", "1", *line]
        if layout.has_hosts:
            line += ["-H", ",".join(f"{host}:{count}" for host, count in zip(HOSTS, layout.ranks, strict=False))]
        if plan.output in ("folder", "full-folder"):
            line += ["--output-filename", str(self.folder / "output")]
        line += [python, str(HERE / "program.py"), str(self.folder), str(plan)]
        line = [
            sys.executable,
            "-I",
            "-S",
            str(HERE / "setting.py"),
            plan.surroundings,
            plan.output,
            str(self.folder),
            *line,
        ]
        return self.network[HOSTS[0]].command(*line, folder=ROOT) if layout.has_hosts else line


class Output:
    """Where the launcher's stdout and stderr lead.

    Attributes:
        stdin, stdout, stderr: for subprocess.
        keyboard: descriptor to type into; None if there is no terminal.
    """

    def __init__(self, kind: str, folder: Path):
        self.kind = kind
        self.keyboard: int | None = None
        self.stdin: int = subprocess.DEVNULL
        self.texts: dict[int, list[bytes]] = {}  # by descriptor
        self.ends: list[int] = []  # what is the launcher's
        if kind == "terminal":
            self.keyboard, terminal = os.openpty()
            self.stdin = self.stdout = self.stderr = terminal
            self.sources, self.ends = [self.keyboard], [terminal]
        elif kind == "file":
            self.paths = [folder / "stdout", folder / "stderr"]
            self.stdout, self.stderr = self.ends = [os.open(path, os.O_CREAT | os.O_WRONLY) for path in self.paths]
            self.sources = []
        else:
            pipes = [os.pipe(), os.pipe()]
            self.sources = [read_end for read_end, _ in pipes]
            self.stdout, self.stderr = self.ends = [write_end for _, write_end in pipes]
            if kind == "full":
                self.ends.append(full := os.open("/dev/full", os.O_WRONLY))
                self.stdout = full
        self.stops = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)

    def begin(self) -> None:
        """Closes what is the launcher's, and reads what is to be read."""
        for descriptor in self.ends:
            os.close(descriptor)
        self.texts = {source: [] for source in self.sources}
        if self.kind != "unread":
            self.reader.start()

    def read(self) -> tuple[str, str]:
        """What the launcher has written to stdout and stderr, once it has ended."""
        self.stops.set()
        if self.kind == "file":
            stdout, stderr = (path.read_bytes() for path in self.paths)
        else:
            self.reader.join() if self.reader.ident else self._read()
            stdout, stderr = ([b"".join(self.texts[source]) for source in self.sources] if len(self.sources) == 2
                              else (b"", b"".join(self.texts[self.sources[0]])))  # fmt: skip
        # A terminal shows what is typed.
        return stdout.decode(errors="replace"), stderr.decode(errors="replace").replace("^C", "")

    def close(self) -> None:
        """Closes all."""
        self.stops.set()
        if self.reader.ident:
            self.reader.join()
        for source in self.sources:
            os.close(source)

    def _read(self) -> None:
        """Until nothing is there and no more is to come: processes that were left behind may keep the other end open."""
        sources = set(self.sources)
        while sources:
            ready, _, _ = select.select(sources, [], [], 0 if self.stops.is_set() else 0.1)
            if not ready and self.stops.is_set():
                return
            for source in ready:
                try:
                    data = os.read(source, 1 << 16)
                except OSError:  # nobody has the terminal open any more
                    data = b""
                self.texts[source].append(data)
                if not data:
                    sources.discard(source)


def environment(plan: Plan) -> dict[str, str]:
    """What the launcher is started with."""
    late = plan.moment in ("before", "init") and plan.fault in ("stop", "stall")
    variables = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": PATHS,
        "RINGTRAIN_DEAD_AFTER_SECONDS": f"{DEAD_AFTER:g}",
        "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir(),
    }  # else torch makes a folder in the job's own
    if LAYOUTS[plan.layout].is_simulated:
        variables["RINGTRAIN_HOST_LAYOUT"] = "+".join(map(str, LAYOUTS[plan.layout].ranks))
    if plan.fault in ("thread", "stall"):
        variables |= {"RINGTRAIN_STALL_WARNING_SECONDS": "1", "RINGTRAIN_STALL_ABORT_SECONDS": f"{STALL_ABORT:g}"}
    if late:
        variables["RINGTRAIN_START_TIMEOUT_SECONDS"] = f"{START_TIMEOUT:g}"
    return {**INHERITED, **variables}


def processes_within(network: namespaces.HostNetwork) -> dict[int, str]:
    """Command lines of the hosts' processes but their first, by process id here: a daemon that ssh has started carries no mark."""
    spaces = {os.readlink(f"/proc/{host.pid}/ns/pid") for host in network.hosts.values()}
    first = {host.pid for host in network.hosts.values()}  # whose end is the host's; it looks like an agent
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(pid) not in first and os.readlink(f"/proc/{pid}/ns/pid") in spaces:
                found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return found


def send(pid: int, number: int) -> None:
    """Sends a signal to a process, which may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def current_load() -> float:
    """How much longer things take than on a quiet machine, at most, as the kernel's average of runnable processes tells."""
    return 1.0 + min(MOST_LOAD, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


DEEDS: dict[str, Callable[[Running], None]] = {
    "none": lambda running: None,
    "kill": lambda running: running.signal_ranks(signal.SIGKILL),
    "kill-two": lambda running: running.signal_ranks(signal.SIGKILL),
    "term": lambda running: running.signal_ranks(signal.SIGTERM),
    "stop": lambda running: running.signal_ranks(signal.SIGSTOP),
    "launcher-kill": lambda running: running.signal_launcher(signal.SIGKILL),
    "launcher-term": lambda running: running.signal_launcher(signal.SIGTERM),
    "hangup": lambda running: running.signal_launcher(signal.SIGHUP),
    "interrupt": Running.interrupt,
    "interrupt-twice": Running.interrupt_twice,
    "agent-kill": lambda running: running.kill("agent"),
    "engine-kill": lambda running: running.kill("engine"),
    "daemon-kill": lambda running: running.kill("daemon"),
    "cut": Running.cut,
}
