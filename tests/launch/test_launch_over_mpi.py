"""ringtrainrun with real ranks that use their MPI by themselves: one world, and what the launcher says of an end that MPI sees."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from environments import EACH_MPI, python_with, ringtrainrun

pytestmark = EACH_MPI
PATIENCE = 60.0


def run(mpi: str, ranks: int, *command: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ringtrainrun(mpi, ranks, *command),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=dict(os.environ, **variables),
        stdin=subprocess.DEVNULL,
    )


def python(text: str) -> tuple[str, ...]:
    return "python", "-c", text


def test_ranks_meet_in_one_world_of_the_mpi(mpi: str) -> None:
    done = run(mpi, 4, *python("from mpi4py import MPI; c = MPI.COMM_WORLD; print(c.size, c.allreduce(c.rank))"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] 4 6" for rank in range(4)]


def test_other_mpis_on_path_are_not_taken(mpi: str, tmp_path: Path) -> None:
    for name in ("mpirun", "mpiexec"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\necho wrong one\nexit 9\n")
        program.chmod(0o755)
    done = run(mpi, 1, "echo", "right one", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (0, "[0] right one\n")


def test_leaving_without_ending_mpi_is_a_failure(mpi: str) -> None:
    done = run(
        mpi,
        2,
        *python("""
import os
import re
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    os._exit(0)
MPI.COMM_WORLD.Barrier()
"""),
    )
    assert done.returncode == 1
    assert "rank 1 left with exit code 0, but without ending MPI" in done.stderr


def test_mpi_abort_gives_its_code_and_names_its_rank(mpi: str) -> None:
    done = run(
        mpi,
        2,
        *python("""
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    MPI.COMM_WORLD.Abort(7)
MPI.COMM_WORLD.Barrier()
"""),
    )
    assert done.returncode == 7
    assert re.search(r"ringtrainrun: rank 1 \(host \S+\) failed with exit code 7", done.stderr), done.stderr


# Horovod's sections, with values of our own.
CONFIGURATION = """
controller: mpi
params: {fusion_threshold_mb: 16, cycle_time_ms: 5, cache_capacity: 512, hierarchical_allreduce: true, hierarchical_allgather: true}
autotune: {enabled: true, log_file: LOG, warmup_samples: 2, steps_per_sample: 5, bayes_opt_max_samples: 9, gaussian_process_noise: 0.5}
timeline: {filename: TIMELINE, mark_cycles: true}
stall_check: {enabled: true, warning_time_seconds: 50, shutdown_time_seconds: 90}
library_options: {mpi_threads_disable: true, num_nccl_streams: 2, ccl_bgt_affinity: 1, gloo_timeout_seconds: 40}
logging: {level: INFO, hide_timestamp: true}
"""


def test_the_controller_of_a_configuration_file_is_the_mpi(mpi: str, tmp_path: Path) -> None:
    """Which starts the ranks, and connects them; no flag says so."""
    text = CONFIGURATION.replace("LOG", str(tmp_path / "log.csv")).replace("TIMELINE", str(tmp_path / "trace.json"))
    (tmp_path / "run.yaml").write_text(text)
    program = """
import ringtrain as rt, numpy as np
rt.init()
total = rt.allreduce(np.ones(3), op=rt.Sum)[0]
from mpi4py import MPI
print(total, MPI.COMM_WORLD.size)
"""
    command = [python_with(mpi), "-m", "ringtrain.launch", "-np", "2", "--config-file", f"{tmp_path}/run.yaml"]
    done = subprocess.run(
        [*command, *python(program)], capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] 2.0 2" for rank in range(2)]
    assert (tmp_path / "trace.json").exists()
