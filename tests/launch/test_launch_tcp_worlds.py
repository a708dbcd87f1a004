"""init() in jobs without MPI: worlds whose ranks the launcher has introduced to each other, several in one job, and what is refused."""

from __future__ import annotations

import os
import subprocess
import textwrap

import pytest
from environments import python_with, rank_environment, ringtrainrun

PATIENCE = 60.0
HOST = os.uname().nodename
pytestmark = pytest.mark.tcp


def run(ranks: int, program: str, *flags: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*ringtrainrun("tcp", ranks, *flags), "python", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=rank_environment(**variables),
    )


def test_ranks_meet_again_and_again_and_no_mpi_is_loaded() -> None:
    """Each world is a new one, with listeners, a secret and an epoch of its own. No rank waits at its end for one that has left."""
    done = run(3, """
        import sys, numpy as np, ringtrain as rt
        for turn in range(10):
            rt.init(shutdown_timeout_seconds=30)
            assert (rt.size(), rt.local_size(), rt.cross_size()) == (3, 3, 1)
            assert rt.allreduce(np.array([rt.rank()]), op=rt.Sum)[0] == 3
            rt.shutdown()
        assert not rt.is_initialized() and "mpi4py" not in sys.modules
        print("fine")
    """)  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("fine") == 3, done


def test_ranks_of_pretended_hosts_exchange_tensors_over_tcp() -> None:
    done = run(4, """
        import numpy as np, ringtrain as rt
        rt.init()
        assert (rt.local_size(), rt.cross_size()) == (2, 2)
        for count in (1, 1000, 1_000_000):
            total = rt.allreduce(np.full(count, rt.rank() + 1, np.float32), op=rt.Sum, name="x")
            assert (total == 10).all()
        print("fine")
    """, RINGTRAIN_HOST_LAYOUT="2+2")  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("fine") == 4, done


def test_ranks_know_the_site_of_a_host_file(tmp_path) -> None:
    """Another one, which the launcher's own machine was given, does not count."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{HOST} slots=2 site=ams\n")
    program = "import os; print(os.environ['RINGTRAIN_SITE'])"
    done = run(2, program, "-hostfile", str(hosts), RINGTRAIN_SITE="fra")
    assert sorted(done.stdout.splitlines()) == ["[0] ams", "[1] ams"], done


def test_ranks_of_pretended_sites_exchange_tensors_over_tcp() -> None:
    done = run(4, """
        import numpy as np, ringtrain as rt
        rt.init()
        for count in (1, 1000, 100_001, 1_000_000):
            for dtype in (np.float32, np.float16):
                total = rt.allreduce(np.full(count, rt.rank() + 1, dtype), op=rt.Sum, name=f"{dtype} {count}")
                assert (total == 10).all()
        rows = rt.allgather(np.full((1000 * (1 + rt.rank()), 5), rt.rank()))
        assert [int((rows == rank).sum()) for rank in range(4)] == [5000, 10000, 15000, 20000]
        print("fine")
    """, RINGTRAIN_HOST_LAYOUT="1+1|1+1")  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("fine") == 4, done


def test_list_of_ranks() -> None:
    """The listed ranks form a world of their own; the others are told that they are not in it, or are alone."""
    done = run(4, """
        import os, numpy as np, ringtrain as rt
        rank = int(os.environ["RINGTRAIN_RANK"])
        if rank == 1:
            try:
                rt.init(comm=[0, 2])
            except ValueError as error:
                assert "comm must contain this rank, but rank 1 is not in [0, 2]" in str(error)
        rt.init(comm=[1] if rank == 1 else [3, 2, 0, 2])
        print(rt.rank(), rt.size(), rt.allreduce(np.array([rank]), op=rt.Sum)[0])
    """)  # fmt: skip
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == ["[0] 0 3 5", "[1] 0 1 1", "[2] 1 3 5", "[3] 2 3 5"]


def test_a_rank_that_never_comes_is_named_on_all_others() -> None:
    done = run(3, """
        import os, time, ringtrain as rt
        if os.environ["RINGTRAIN_RANK"] == "1":
            time.sleep(50)
        rt.init(start_timeout_seconds=6)
    """)  # fmt: skip
    words = "TimeoutError: init: expected all 3 ranks to call init() within 6 s, but rank 1 did not."
    assert done.returncode == 1 and done.stderr.count(f"[0] ringtrain.errors.{words}") >= 1, done
    assert done.stderr.count(f"[2] ringtrain.errors.{words}") >= 1


def test_exceptions_and_exit_codes_are_those_of_the_first_cause() -> None:
    done = run(3, """
        import numpy as np, ringtrain as rt
        rt.init()
        for step in range(10):
            if rt.rank() == 1 and step == 5:
                raise LookupError("batch 5 is missing")
            rt.allreduce(np.ones(1000), "gradient")
    """)  # fmt: skip
    assert done.returncode == 1, done
    peers = "rank 1 ended with an uncaught exception: LookupError: batch 5 is missing"
    assert f"[0] ringtrain.errors.PeerLostError: {peers}" in done.stderr.replace("\n[2]", "\n[0]"), done.stderr
    last = [line for line in done.stderr.splitlines() if line.startswith("ringtrainrun: ")][-1]
    assert last.startswith(f"ringtrainrun: rank 1 (host {HOST}) failed with exit code 1"), done.stderr


def test_a_code_by_which_open_mpi_blames_a_peer_is_the_ranks_own_here() -> None:
    done = run(2, """
        import os, time, ringtrain as rt
        rt.init()
        if rt.rank() == 1:
            os._exit(14)
        rt.barrier()
    """)  # fmt: skip
    last = [line for line in done.stderr.splitlines() if line.startswith("ringtrainrun: ")][-1]
    assert done.returncode == 14 and f"rank 1 (host {HOST}) failed with exit code 14" in last, done.stderr
    assert "Open MPI" not in done.stderr


def test_a_rank_that_is_through_waits_for_one_that_works_on() -> None:
    done = run(2, """
        import time, numpy as np, ringtrain as rt
        rt.init(shutdown_timeout_seconds=0.2)
        rt.allreduce(np.ones(1))
        if rt.rank() == 1:
            time.sleep(4)
            print("saved", flush=True)
    """)  # fmt: skip
    assert done.returncode == 0 and "saved" in done.stdout, done


@pytest.mark.openmpi
def test_a_world_of_mpi_is_refused_where_no_mpi_has_started_the_ranks() -> None:
    """A communicator would be one of this rank alone."""
    done = run(2, """
        import ringtrain as rt
        from mpi4py import MPI
        for arguments in ({"comm": MPI.COMM_WORLD}, {"transport": "mpi"}):
            try:
                rt.init(**arguments)
            except NotImplementedError as error:
                print(error)
    """)  # fmt: skip
    said = "init: MPI must have started the ranks if it is to connect them, but ringtrainrun did without it, and"
    assert done.returncode == 0, done
    assert done.stdout.count(f"{said} comm is an mpi4py communicator.") == 2
    assert done.stdout.count(f"{said} transport is 'mpi'. Start the job with ringtrainrun --transport mpi.") == 2


@pytest.mark.openmpi
def test_tcp_is_refused_where_an_mpi_has_started_the_ranks() -> None:
    program = "import ringtrain as rt; rt.init(transport='tcp')"
    done = subprocess.run(
        [*ringtrainrun("openmpi", 2), "python", "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=rank_environment(),
    )
    assert done.returncode == 1
    assert "init: transport must be 'mpi' or 'auto' where Open MPI's mpirun has started the ranks" in done.stderr


def test_a_transport_for_jobs_leaves_a_process_without_launcher_alone() -> None:
    program = "import ringtrain as rt; rt.init(); print(rt.size())"
    done = subprocess.run(
        [python_with("tcp"), "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=rank_environment(RINGTRAIN_TRANSPORT="tcp"),
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_a_launcher_that_is_gone_is_named() -> None:
    done = run(2, """
        import os, ringtrain as rt
        os.environ["RINGTRAIN_LAUNCHER"] = "ringtrainrun-of-yesterday"
        try:
            rt.init()
        except NotImplementedError as error:
            print(error)
    """)  # fmt: skip
    said = "init: ringtrainrun must introduce the ranks to each other, but its agent on this host cannot be reached"
    assert done.returncode == 0 and done.stdout.count(said) == 2, done
