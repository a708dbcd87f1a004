"""``python -m benchmarks faults``: how long it takes until all know of a fault, or until nothing of a job is left.

A fault is done to a job that this machine runs for it, again and again; over Open MPI, unless the fault's name says
otherwise. Ranks note on the machine's monotonic clock when they were told; whether anything is left is looked at every
20 ms. The table is that of docs/reliability.md. Needs root for what is done to hosts, which is not run otherwise.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.jobs import PAUSE_SECONDS, Job
from ringtrain.bench import documents, namespaces
from ringtrain.bench.machine import describe
from ringtrain.launch import progress

RANKS = 3
VICTIM = 1
SECONDS_TO_START = 120.0
SECONDS_BEYOND = 30.0  # how long a promise that is broken is waited for

# Does steps, or nothing; notes the time in a file that is whole from the first moment.
PROGRAM = textwrap.dedent("""
    import os, signal, sys, time, numpy as np, ringtrain as rt
    folder, does_steps, victim = sys.argv[1], sys.argv[2] == "steps", int(sys.argv[3])

    def note(what):
        with open(f"{folder}/.{what}-{rank}", "w") as file:
            file.write(f"{time.monotonic()} {os.getpid()}")
        os.replace(file.name, f"{folder}/{what}-{rank}")

    rt.init()
    rank = rt.rank()
    rt.barrier()
    note("at-work")
    try:
        while not os.path.exists(f"{folder}/leave"):
            if rank == victim and os.path.exists(f"{folder}/fail"):
                note("failed")
                raise ValueError("the fault")
            if rank == victim and os.path.exists(f"{folder}/die"):
                note("failed")
                os.kill(os.getpid(), signal.SIGKILL)
            rt.allreduce(np.ones(1000), name="step") if does_steps else time.sleep(0.01)
    except rt.errors.PeerLostError:
        note("told")
        raise
    rt.shutdown()
    note("left")
""")


class Trial:
    """One job with one fault, and what its ranks have noted."""

    def __init__(self, job: Job, folder: Path, dead_after_seconds: float):
        self.job = job
        self.folder = folder
        self.dead_after_seconds = dead_after_seconds

    def start(self, *line: str, ranks: int = RANKS, works: str = "steps") -> None:
        """Starts ranks by a launcher's command line and waits until all are at work."""
        bound = str(self.dead_after_seconds)
        environment = dict(os.environ, OMP_NUM_THREADS="1", RINGTRAIN_DEAD_AFTER_SECONDS=bound)
        self.job.start(*line, sys.executable, "-c", PROGRAM, str(self.folder), works, str(VICTIM), env=environment,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        self.await_notes("at-work", range(ranks), SECONDS_TO_START)

    def note_of(self, what: str, rank: int) -> tuple[float, int]:
        """Time and process id of a rank's note."""
        moment, pid = (self.folder / f"{what}-{rank}").read_text().split()
        return float(moment), int(pid)

    def await_notes(self, what: str, ranks: Sequence[int], seconds: float) -> float:
        """Waits until these ranks have noted something; returns when the last one did."""
        await_that(lambda: all((self.folder / f"{what}-{rank}").exists() for rank in ranks), seconds, f"notes '{what}'")
        return max(self.note_of(what, rank)[0] for rank in ranks)

    def await_told_or_ended(self, ranks: Sequence[int], seconds: float) -> float:
        """Waits until each of these ranks was told of the fault or has ended; returns when that was so."""
        pids = {rank: self.note_of("at-work", rank)[1] for rank in ranks}
        await_that(lambda: all((self.folder / f"told-{rank}").exists() or has_ended(pid) for rank, pid in pids.items()),
                   seconds, "survivors to be told or to end")  # fmt: skip
        return time.monotonic()

    def kill(self, number: int) -> float:
        """Sends a signal to the victim; returns when."""
        moment = time.monotonic()
        os.kill(self.note_of("at-work", VICTIM)[1], number)
        return moment

    def request(self, what: str) -> None:
        """Lets the ranks find the file that they look for."""
        (self.folder / what).touch()


def await_that(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Waits until something is so. Raises TimeoutError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"faults: timed out after {seconds:g} s waiting for {what}.")
        time.sleep(PAUSE_SECONDS)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def launcher_line(*further: str, ranks: int = RANKS) -> list[str]:
    """ringtrainrun's command line."""
    return [sys.executable, "-m", "ringtrain.launch", "-np", str(ranks), *further]


def engine_line() -> list[str]:
    """That of mpirun, told not to end the others when a rank fails."""
    mpirun = Path(sys.executable).with_name("mpirun")
    options = ["--allow-run-as-root", "--enable-recovery", "--map-by", "slot:OVERSUBSCRIBE"]
    return [str(mpirun), *options, "-np", str(RANKS)]


def survivors() -> list[int]:
    """All ranks but the victim."""
    return [rank for rank in range(RANKS) if rank != VICTIM]


# ---- the faults: each starts its job, does its worst, and returns the seconds until the promise was kept ----


def rank_killed(trial: Trial, seconds: float) -> float:
    """The engine is told not to end the others."""
    trial.start(*engine_line())
    begin = trial.kill(signal.SIGKILL)
    return trial.await_notes("told", survivors(), seconds) - begin


def rank_killed_under_launcher(trial: Trial, seconds: float) -> float:
    """The engine and the launcher may end them first."""
    trial.start(*launcher_line())
    begin = trial.kill(signal.SIGKILL)
    return trial.await_told_or_ended(survivors(), seconds) - begin


def rank_killed_alone_on_its_host(trial: Trial, seconds: float) -> float:
    """No memory is shared with it, and there is no MPI; it does it itself, since its process id is that of its host."""
    names = ["host-1", "host-2", "host-3"]
    with namespaces.HostNetwork(dict.fromkeys(names, "eth0"), useless=None, login_path="/nonexistent") as network:
        line = launcher_line("--transport", "tcp", "-H", ",".join(f"{name}:1" for name in names))
        trial.start(*network["host-1"].command(*line))
        trial.request("die")
        begin = trial.await_notes("failed", [VICTIM], seconds)
        return trial.await_notes("told", survivors(), seconds) - begin


def rank_stopped(trial: Trial, seconds: float) -> float:
    """By SIGSTOP, in the middle of its steps."""
    trial.start(*launcher_line())
    begin = trial.kill(signal.SIGSTOP)
    return trial.await_told_or_ended(survivors(), seconds) - begin


def network_cut(trial: Trial, seconds: float) -> float:
    """Between two hosts with a rank each, which neither peer nor launcher can reach from then on."""
    names = ["host-1", "host-2"]
    with namespaces.HostNetwork(dict.fromkeys(names, "eth0"), useless=None, login_path="/nonexistent") as network:
        line = launcher_line("-H", "host-1:1,host-2:1", ranks=2)
        trial.start(*network["host-1"].command(*line), ranks=2)
        begin = time.monotonic()
        network.unplug("host-2")
        return trial.await_notes("told", range(2), seconds) - begin


def exception(trial: Trial, seconds: float) -> float:
    """One rank raises, the others are within an operation."""
    trial.start(*launcher_line())
    trial.request("fail")
    begin = trial.await_notes("failed", [VICTIM], seconds)
    return trial.await_told_or_ended(survivors(), seconds) - begin


def interrupt(trial: Trial, seconds: float) -> float:
    """Ctrl-C, until no process is left."""
    return _until_nothing_is_left(trial, signal.SIGINT, seconds)


def launcher_killed(trial: Trial, seconds: float) -> float:
    """SIGKILL, until no process is left."""
    return _until_nothing_is_left(trial, signal.SIGKILL, seconds)


def shutdown_after_a_death(trial: Trial, seconds: float) -> float:
    """A rank is killed while nothing is pending, and the others call shutdown() at once; no engine ends them."""
    trial.start(*engine_line(), works="none")
    begin = trial.kill(signal.SIGKILL)
    trial.request("leave")
    return trial.await_notes("left", survivors(), seconds) - begin


def _until_nothing_is_left(trial: Trial, number: int, seconds: float) -> float:
    trial.start(*launcher_line())
    begin = time.monotonic()
    trial.job.started[0].send_signal(number)
    if left := trial.job.await_end(seconds):
        raise TimeoutError(f"faults: after {seconds:g} s there was left:\n{left}")
    return time.monotonic() - begin


@dataclass
class Fault:
    """A row of the table: what is done, and what is promised within how many seconds, of silence or at once."""

    name: str
    promised: str
    seconds: float
    do: Callable[[Trial, float], float]
    after_silence: bool = False


FAULTS = [
    Fault("rank killed, no help of the engine", "all others raise", 2, rank_killed),
    Fault("rank killed, under ringtrainrun", "all others raise or end", 2, rank_killed_under_launcher),
    Fault("rank killed, one on each host, TCP", "all others raise", 2, rank_killed_alone_on_its_host),
    Fault("rank stopped", "all others raise or end", 2, rank_stopped, after_silence=True),
    Fault("network cut between two hosts", "both sides raise", 2, network_cut, after_silence=True),
    Fault("exception on one rank", "all others raise or end", 2, exception),
    Fault("Ctrl-C", "nothing is left", 5, interrupt),
    Fault("launcher killed", "nothing is left", 30, launcher_killed),
    Fault("rank killed, then shutdown()", "it returns", 5, shutdown_after_a_death),
]


def run(runs: int, dead_after_seconds: float, only: str, json: str | None = None) -> bool:
    """Does every fault so many times and prints the table; returns whether every promise was kept.

    Args:
        runs: of each fault.
        dead_after_seconds: the bound of silence, to which two promises add.
        only: a word of the faults to be done; "" for all.
        json: file for the single times, in seconds.
    """
    print(f"| fault | promised | within | median of {runs} | worst | kept |\n|---|---|---|---|---|---|", flush=True)
    results = []
    shown = progress.on_stderr()
    for fault in FAULTS:
        if only not in fault.name:
            continue
        if fault.do in (network_cut, rank_killed_alone_on_its_host) and namespaces.missing():
            print(f"| {fault.name} | {fault.promised} | not run: {namespaces.missing()} | | | |", flush=True)
            continue
        bound = fault.seconds + (dead_after_seconds if fault.after_silence else 0)
        times = []
        for number in range(runs):
            shown.show(f"{fault.name}: run {number + 1} of {runs}")
            times.append(_once(fault, bound, dead_after_seconds))
        shown.clear()
        kept = max(times) <= bound
        cells = [fault.name, fault.promised, f"{bound:g} s", f"{statistics.median(times):.2f} s", f"{max(times):.2f} s"]
        print(f"| {' | '.join(cells)} | {'yes' if kept else 'NO'} |", flush=True)
        results.append({"fault": fault.name, "promised_seconds": bound, "seconds": times, "kept": kept})
    if json:
        documents.write(json, documents.make(describe(), results))
    return all(result["kept"] for result in results)


def _once(fault: Fault, bound: float, dead_after_seconds: float) -> float:
    with tempfile.TemporaryDirectory(prefix="ringtrain-faults-") as folder, closing(Job()) as job:
        return fault.do(Trial(job, Path(folder), dead_after_seconds), bound + SECONDS_BEYOND)
