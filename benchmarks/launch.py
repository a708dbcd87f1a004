"""``python -m benchmarks launch``: how long a job takes that does next to nothing, started by ringtrainrun and by torchrun.

The launchers take turns; each starts the same number of ranks on this host, or spread over hosts made on this machine,
and waits for all. ringtrainrun is called on the first host, torchrun on all of them at once, as its users do.
``__main__`` calls ``start`` in a process that is no rank. torchrun is the one of the same environment.
"""

import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from ringtrain.bench import documents, namespaces
from ringtrain.bench.machine import describe
from ringtrain.launch import progress

PATIENCE = 300.0  # for a job
LAUNCHERS = {
    "ringtrainrun": ["-m", "ringtrain.launch", "--share-gpus", "-np", "{ranks}"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{ranks}", "--no-python"],
}
LAUNCHERS_OF_HOSTS = {
    "ringtrainrun": ["-m", "ringtrain.launch", "--share-gpus", "-np", "{ranks}", "-H", "{listed}"],
    "torchrun": ["-m", "torch.distributed.run", "--nnodes", "{hosts}", "--nproc-per-node", "{each}", "--no-python",
                 "--rdzv-backend", "c10d", "--rdzv-endpoint", "{address}:29400"],
}  # fmt: skip
# What each rank runs, by the launcher if it differs.
JOBS: dict[str, dict[str, list[str]]] = {
    "true": {launcher: ["true"] for launcher in LAUNCHERS},
    "import torch": {launcher: [sys.executable, "-c", "import torch"] for launcher in LAUNCHERS},
    "first allreduce": {
        "ringtrainrun": [sys.executable, "-c", "import torch, ringtrain.torch as rt; rt.init(); rt.allreduce(torch.ones(1))"],
        "torchrun": [sys.executable, "-c", "import torch, torch.distributed as d; d.init_process_group('gloo'); "
                     "d.all_reduce(torch.ones(1)); d.destroy_process_group()"],
    },
}  # fmt: skip


def start(ranks: int, repetitions: int, file: str | None, hosts_made: int = 1) -> int:
    """Measures, prints a line for each job, writes JSON if a file is named; returns the exit code.

    Raises CalledProcessError if a job fails.
    """
    hindrance = "torchrun must be there to compare with, but torch is not installed"
    if importlib.util.find_spec("torch"):
        hindrance = namespaces.missing() if hosts_made > 1 else ""
    if not hindrance and ranks % hosts_made:
        hindrance = f"-np must be a multiple of the hosts, but is {ranks} and they are {hosts_made}"
    if hindrance:
        print(f"python -m benchmarks launch: {hindrance}.", file=sys.stderr)
        return 2
    where = "this host" if hosts_made == 1 else f"{hosts_made} hosts"
    print(f"seconds from the command to its end, {ranks} ranks on {where}, medians of {repetitions} turns")
    if hosts_made == 1:
        results = [_measure(job, _here(job, ranks), repetitions) for job in JOBS]
    else:
        names = [f"host-{number}" for number in range(1, hosts_made + 1)]
        with namespaces.HostNetwork(dict.fromkeys(names, "eth0"), useless=None) as network:
            results = [_measure(job, _on_hosts(job, ranks, network), repetitions) for job in JOBS]
    if file is not None:
        documents.write(file, documents.make(describe(), results, np=ranks, hosts=hosts_made, repetitions=repetitions))
    return 0


def _here(job: str, ranks: int) -> dict[str, list[list[str]]]:
    """The command lines by which each launcher starts a job."""
    return {
        name: [[sys.executable, *(word.format(ranks=ranks) for word in launcher), *JOBS[job][name]]]
        for name, launcher in LAUNCHERS.items()
    }


def _on_hosts(job: str, ranks: int, network: namespaces.HostNetwork) -> dict[str, list[list[str]]]:
    made = list(network.hosts.values())
    each = ranks // len(made)
    known = {"ranks": ranks, "hosts": len(made), "each": each, "address": made[0].address,
             "listed": ",".join(f"{host.name}:{each}" for host in made)}  # fmt: skip
    lines = {
        name: [sys.executable, *(word.format(**known) for word in launcher), *JOBS[job][name]]
        for name, launcher in LAUNCHERS_OF_HOSTS.items()
    }
    callers = {"ringtrainrun": made[:1], "torchrun": made}
    return {name: [host.command(*line) for host in callers[name]] for name, line in lines.items()}


def _measure(job: str, lines: dict[str, list[list[str]]], repetitions: int) -> dict[str, str | float]:
    seconds: dict[str, list[float]] = {name: [] for name in lines}
    shown = progress.on_stderr()
    for repetition in range(repetitions + 1):
        for name, together in lines.items():
            shown.show(f"{job}: turn {repetition + 1} of {repetitions + 1}, {name}")
            taken = _seconds_of(together)
            if repetition > 0:  # the first reads files from disk
                seconds[name].append(taken)
    shown.clear()
    ours, theirs = (float(np.median(seconds[name])) for name in lines)
    print(f"{job:16} ringtrainrun {ours:6.2f} s   torchrun {theirs:6.2f} s   ratio {ours / theirs:.2f}", flush=True)
    return {"job": job, "ringtrainrun_seconds_median": ours, "torchrun_seconds_median": theirs}


def _seconds_of(lines: Sequence[Sequence[str]]) -> float:
    """Until all have ended. Raises CalledProcessError if one fails, TimeoutExpired if one does not end."""
    begin = time.perf_counter()
    nothing = subprocess.DEVNULL
    started = [subprocess.Popen(line, stdin=nothing, stdout=nothing, stderr=nothing) for line in lines]
    try:
        for process in started:
            if process.wait(PATIENCE):
                raise subprocess.CalledProcessError(process.returncode, process.args)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
    return time.perf_counter() - begin
