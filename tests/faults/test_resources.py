"""What the machine does not give: shared memory, disk, descriptors, locked memory; and clocks that disagree."""

import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import needs
import pytest
from environments import python_with, rank_environment, ringtrainrun

from benchmarks.jobs import Job, namespace_prefix

pytestmark = [
    pytest.mark.openmpi,
]
SECONDS = 90.0
own_mounts = needs.machine(
    "" if namespace_prefix() else "this kernel gives no process mounts of its own: run as root, in no container"
)

SUMS = """
    import sys, numpy as np, ringtrain as rt
    rt.init()
    for size in (10, 1_000_000):
        assert rt.allreduce(np.ones(size, np.float32), name="sum", op=rt.Sum).tolist() == [float(rt.size())] * size
    print("right", flush=True)
"""


def run(job: Job, *prefix: str, program: str = SUMS, ranks: int = 2, **variables: str) -> subprocess.CompletedProcess:
    """Runs the program on some ranks; what is given first stands before the launcher's command line."""
    command = ringtrainrun("openmpi", ranks, python_with("openmpi"), "-c", textwrap.dedent(program))
    return job.run(*prefix, *command, seconds=SECONDS, env=rank_environment(**variables))


def each_rank_is_right(done: subprocess.CompletedProcess) -> bool:
    return done.returncode == 0 and done.stdout.count("right") == 2


@own_mounts
def test_a_full_shared_memory_is_said_and_mpi_serves_instead(watch: Callable[..., Job]) -> None:
    done = run(watch(shared_memory_bytes=1 << 20), OMPI_MCA_btl="self,tcp")  # Open MPI's own wants some too
    assert each_rank_is_right(done), done
    assert "use the network instead of shared memory" in done.stderr and "cannot be reserved in /dev/shm" in done.stderr


def test_few_descriptors_and_no_locked_memory_are_enough(job: Job) -> None:
    """Of the launcher, the engine, the agent and each rank."""
    assert each_rank_is_right(done := run(job, "prlimit", "--nofile=128", "--memlock=0")), done


def test_too_few_descriptors_end_the_job(job: Job) -> None:
    """Of a rank, which MPI cannot start with; it says so itself."""
    python = python_with("openmpi")
    command = ringtrainrun("openmpi", 2, "prlimit", "--nofile=12", python, "-c", textwrap.dedent(SUMS))
    done = job.run(*command, seconds=SECONDS, env=rank_environment())
    assert done.returncode != 0 and "Too many open files" in done.stderr, done


@own_mounts
def test_a_full_disk_ends_the_trace_and_not_the_job(job: Job, tmp_path: Path) -> None:
    """Until then it is valid; that it ended early is said."""
    done = run(
        job,
        program=f"""
        import json, subprocess, numpy as np, ringtrain as rt
        rt.init()
        if rt.rank() == 0:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", "{tmp_path}"], check=True)
        rt.barrier()
        rt.start_timeline("{tmp_path}/trace")
        for turn in range(5000):
            rt.allreduce(np.ones(10), name=f"turn {{turn}}")
        try:
            rt.stop_timeline()
        except rt.RingtrainError as problem:
            print("said:", problem, flush=True)
        trace = json.load(open("{tmp_path}/trace" + ".1" * rt.rank()))
        print("events", len(trace), flush=True)
        assert rt.allreduce(np.ones(10), name="goes on", op=rt.Sum)[0] == 2
        print("right", flush=True)
    """,
    )
    assert each_rank_is_right(done), done
    assert done.stdout.count("No space left on device") == 2 and done.stdout.count("events") == 2, done.stdout


# What a process is told of the time of day: a year later with every second call.
JUMPING_CLOCK = """
    #define _GNU_SOURCE
    #include <stdatomic.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>

    static long jump(void) {
      static atomic_int calls;
      return atomic_fetch_add(&calls, 1) % 2 * 31536000L;
    }
    int clock_gettime(clockid_t clock, struct timespec *now) {
      int result = syscall(SYS_clock_gettime, clock, now);
      if (clock == CLOCK_REALTIME) now->tv_sec += jump();
      return result;
    }
"""


def test_clocks_that_jump_and_disagree_end_nothing(job: Job, tmp_path: Path) -> None:
    """Rank 1's time of day leaps by a year, to and fro, and its monotonic clock is ten days ahead of rank 0's.

    It shows that neither deadlines nor signs of life depend on the time of day, nor on clocks being alike between
    ranks.
    """
    apart = ["unshare", "--time", "--monotonic", "864000"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("needs a kernel with time namespaces, Linux 5.6 or later, and root: sudo bin/test")
    (tmp_path / "clock.c").write_text(JUMPING_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "clock.so", tmp_path / "clock.c"], check=True)
    program = textwrap.dedent("""
        import time, numpy as np, ringtrain as rt
        rt.init()
        first, second = time.time(), time.time()
        for step in range(100):
            assert rt.allreduce(np.full(1000, rt.rank() + 1.0), name="sum", op=rt.Sum)[0] == 3
            time.sleep(0.02)
        print("right", abs(second - first) > 1e6, time.monotonic(), flush=True)
    """)
    (tmp_path / "rank.py").write_text(program)
    shifted = f"{' '.join(apart)} env LD_PRELOAD={tmp_path}/clock.so"
    chosen = f'[ $RINGTRAIN_RANK = 0 ] || exec {shifted} "$@"; exec "$@"'
    command = ringtrainrun("openmpi", 2, "sh", "-c", chosen, "sh", python_with("openmpi"), str(tmp_path / "rank.py"))
    done = job.run(*command, seconds=SECONDS, env=rank_environment())
    assert each_rank_is_right(done), done
    said = {line.split()[0]: line.split()[2:] for line in done.stdout.splitlines()}
    assert [said["[0]"][0], said["[1]"][0]] == ["False", "True"]
    assert float(said["[1]"][1]) - float(said["[0]"][1]) > 800_000
