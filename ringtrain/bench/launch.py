"""``ringtrain bench launch``: how long a job takes that does next to nothing, started by ringtrainrun and by torchrun.

The launchers take turns; each starts the same number of ranks on this host and waits for all. ``__main__`` calls
``start`` in a process that is no rank. torchrun is the one of the same environment.
"""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

LAUNCHERS = {
    "ringtrainrun": ["-m", "ringtrain.launch", "--share-gpus", "-np", "{ranks}"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{ranks}", "--no-python"],
}
# What each rank runs, by the launcher if it differs.
JOBS: dict[str, dict[str, list[str]]] = {
    "true": dict.fromkeys(LAUNCHERS, ["true"]),
    "import torch": dict.fromkeys(LAUNCHERS, [sys.executable, "-c", "import torch"]),
    "first allreduce": {
        "ringtrainrun": [sys.executable, "-c", "import torch, ringtrain.torch as rt; rt.init(); rt.allreduce(torch.ones(1))"],
        "torchrun": [sys.executable, "-c", "import torch, torch.distributed as d; d.init_process_group('gloo'); "
                     "d.all_reduce(torch.ones(1)); d.destroy_process_group()"],
    },
}  # fmt: skip


def start(ranks: int, repetitions: int, file: str | None) -> int:
    """Measures, prints a line for each job, writes JSON if a file is named; returns the exit code.

    Raises CalledProcessError if a job fails.
    """
    if importlib.util.find_spec("torch") is None:
        print("ringtrain bench launch: torchrun must be there to compare with, but torch is not installed.", file=sys.stderr)
        return 2
    print(f"seconds from the command to its end, {ranks} ranks on this host, medians of {repetitions} turns")
    results = [_measure(job, ranks, repetitions) for job in JOBS]
    if file is not None:
        Path(file).write_text(json.dumps({"np": ranks, "repetitions": repetitions, "results": results}, indent=1) + "\n")
    return 0


def _measure(job: str, ranks: int, repetitions: int) -> dict[str, str | float]:
    lines = {name: [sys.executable, *(word.format(ranks=ranks) for word in launcher), *JOBS[job][name]]
             for name, launcher in LAUNCHERS.items()}  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in lines}
    for repetition in range(repetitions + 1):
        for name, line in lines.items():
            taken = _seconds_of(line)
            if repetition > 0:  # the first reads files from disk
                seconds[name].append(taken)
    ours, theirs = (float(np.median(seconds[name])) for name in lines)
    print(f"{job:16} ringtrainrun {ours:6.2f} s   torchrun {theirs:6.2f} s   ratio {ours / theirs:.2f}", flush=True)
    return {"job": job, "ringtrainrun_seconds_median": ours, "torchrun_seconds_median": theirs}


def _seconds_of(line: Sequence[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(line, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin
