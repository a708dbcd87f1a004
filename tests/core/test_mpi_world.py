"""Worlds over real MPI, in jobs of their own: which ranks they have, whose MPI it is, and how its processes end."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from environments import EACH_MPI, python_with, rank_environment, ringtrainrun


def job(mpi, ranks, text, **environment):
    """Runs a script on some ranks under an MPI."""
    command = ringtrainrun(mpi, ranks, python_with(mpi), "-c", textwrap.dedent(text))
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=rank_environment(**environment))


def alone(mpi, text, **environment):
    """Runs a script without a launcher, in the environment that has this MPI."""
    command = [python_with(mpi), "-c", textwrap.dedent(text)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=rank_environment(**environment))


@EACH_MPI
def test_shutdown_leaves_mpi_alone(mpi):
    done = job(mpi, 2, """
        import numpy as np, ringtrain as rt
        for turn in range(200):
            rt.init()
            assert rt.size() == 2 and rt.allreduce(np.array([rt.rank()]), op=rt.Sum)[0] == 1
            rt.shutdown()
        from mpi4py import MPI
        assert MPI.COMM_WORLD.allreduce(1) == 2 and not MPI.Is_finalized()
        print("alive", flush=True)
    """)  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("alive") == 2, done


@pytest.mark.mpich
@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_world_by_the_standard_abi(tmp_path):
    """Of MPI 5, with an mpi4py that is built for it; its released wheels are for the others."""
    python = Path(python_with("mpich"))
    compiler = python.with_name("mpicc_abi")
    site = tmp_path / "site"
    install = f"-m pip install --quiet --no-deps --no-binary mpi4py --target {site} mpi4py==4.1.2".split()
    built = subprocess.run(
        [python, *install], capture_output=True, text=True, env=rank_environment(MPICC=str(compiler))
    )
    assert built.returncode == 0, built.stderr
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    done = job("mpich", 3, """
        import numpy as np, ringtrain as rt
        rt.init()
        from mpi4py import MPI
        half = MPI.COMM_WORLD.Split(color=rt.rank() % 2)
        assert MPI.COMM_WORLD.allreduce(1) == rt.size() == 3
        total = rt.allreduce(np.full(300_000, rt.rank() + 1.0), op=rt.Sum)
        assert (total == 6).all() and rt.allgather(np.full(rt.rank(), rt.rank())).tolist() == [1, 2, 2]
        rt.shutdown()
        rt.init(comm=half)
        maps = open("/proc/self/maps").read()
        print("libmpi_abi" in maps, "libmpi.so" in maps, rt.size() == half.size, flush=True)
    """, PYTHONPATH=path)  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("True False True") == 3, done


@EACH_MPI
def test_list_of_ranks(mpi):
    """The listed ranks form a world of their own; the others are told that they are not in it."""
    done = job(mpi, 3, """
        import numpy as np, ringtrain as rt
        from mpi4py import MPI
        rank = MPI.COMM_WORLD.Get_rank()
        try:
            rt.init(comm=[2, 0])
            assert rt.size() == 2 and rt.rank() == rank // 2
            print("sum", rt.allreduce(np.array([rank]), op=rt.Sum)[0], flush=True)
            rt.shutdown()
        except ValueError as error:
            assert rank == 1 and "rank 1 is not in [0, 2]" in str(error), error
            print("left out", flush=True)
        try:
            rt.init(comm=[0, 3])
        except ValueError as error:
            assert "[0, 3)" in str(error), error
            print("no such rank", flush=True)
    """)  # fmt: skip
    assert done.returncode == 0, done
    assert (done.stdout.count("sum 2"), done.stdout.count("left out"), done.stdout.count("no such rank")) == (
        2,
        1,
        3,
    ), done


@EACH_MPI
def test_communicator_is_duplicated(mpi):
    done = job(mpi, 2, """
        import numpy as np, ringtrain as rt
        from mpi4py import MPI
        half = MPI.COMM_WORLD.Split(color=MPI.COMM_WORLD.Get_rank())
        rt.init(comm=half)
        assert (rt.rank(), rt.size()) == (0, 1)
        half.Free()
        assert rt.allreduce(np.array([5]), op=rt.Sum)[0] == 5
        rt.shutdown()
        reverse = MPI.COMM_WORLD.Split(key=-MPI.COMM_WORLD.Get_rank())
        rt.init(comm=reverse)
        assert rt.rank() == 1 - MPI.COMM_WORLD.Get_rank()
        print("fine", flush=True)
    """)  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("fine") == 2, done


@EACH_MPI
def test_process_sets_from_communicators(mpi):
    """Each rank brings its part of a split, and one a part that the others have no share in; and what MPI's probes say."""
    done = job(mpi, 3, """
        import numpy as np, ringtrain as rt
        from ringtrain._bootstrap import probes
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        part = rt.ProcessSet(world.Split(color=world.Get_rank() % 2))
        first = rt.ProcessSet(world.Split(color=0 if world.Get_rank() < 2 else MPI.UNDEFINED))
        assert not probes.mpi_enabled() and part.ranks is None
        rt.init(comm=world, process_sets=[part, first])
        assert probes.mpi_enabled() and probes.mpi_built() and probes.mpi_threads_supported() and not probes.gloo_enabled()
        assert part.ranks == [[0, 2], [1]][rt.rank() % 2] and part.size() == len(part.ranks)
        assert rt.allreduce(np.ones(1), op=rt.Sum, process_set=part)[0] == part.size()
        if rt.rank() < 2:
            assert first.included() and rt.allreduce(np.ones(1), op=rt.Sum, process_set=first)[0] == 2
        else:
            assert not first.included()
        try:
            rt.add_process_set(rt.ProcessSet(world))
        except NotImplementedError as error:
            assert "Give the ranks" in str(error)
            print("fine", flush=True)
    """)  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("fine") == 3, done


@EACH_MPI
def test_uncaught_exception_is_the_others_error(mpi):
    """The peers fail with the first cause, and the job with the code of the rank that failed."""
    done = job(mpi, 3, """
        import numpy as np, ringtrain as rt
        rt.init()
        for step in range(10):
            if rt.rank() == 1 and step == 5:
                raise LookupError("batch 5 is missing")
            try:
                rt.allreduce(np.ones(1000), "gradient")
            except rt.RingtrainError as error:
                print("told:", error, flush=True)
                raise SystemExit(0)
    """)  # fmt: skip
    assert done.stdout.count("told: rank 1 ended with an uncaught exception: LookupError: batch 5 is missing") == 2, (
        done
    )
    assert "LookupError: batch 5 is missing" in done.stderr and done.returncode == 1, done


@EACH_MPI
def test_exit_code_of_a_rank_is_the_jobs(mpi):
    done = job(mpi, 2, """
        import sys, numpy as np, ringtrain as rt
        rt.init()
        rt.allreduce(np.ones(1))
        sys.exit(7 * rt.rank())
    """)  # fmt: skip
    assert done.returncode == 7, done


@EACH_MPI
def test_rank_that_never_starts_is_not_waited_for(mpi):
    """MPI_Init would wait for ever, and keeps the GIL."""
    done = job(mpi, 2, """
        import os, time, ringtrain as rt
        if os.environ["RINGTRAIN_RANK"] == "1":
            time.sleep(90)
        print("printed before")
        rt.init(start_timeout_seconds=1)
    """)  # fmt: skip
    assert done.returncode == 1 and "printed before" in done.stdout, done
    assert (
        "init of MPI: expected all 2 ranks to call init() within 1 s but not all did, seen on rank 0" in done.stderr
    ), done


@EACH_MPI
def test_rank_that_is_through_waits_for_one_that_saves(mpi):
    """Rank 1 works on for longer than any deadline of shutdown; nobody may end it, although they have lost a world before."""
    done = job(mpi, 2, """
        import time, numpy as np, ringtrain as rt
        from ringtrain._runtime import context
        rt.init(shutdown_timeout_seconds=0.5)
        try:
            rt.barrier()  # from which a slow rank may hear of the abort
            if rt.rank() == 0:
                context.current().abort("given up")
            rt.allreduce(np.ones(1))
        except rt.errors.RingtrainError:
            rt.shutdown()
        rt.init(shutdown_timeout_seconds=0.5)
        rt.allreduce(np.ones(1))
        if rt.rank() == 1:
            time.sleep(8)
            print("saved", flush=True)
    """)  # fmt: skip
    assert done.returncode == 0 and "saved" in done.stdout, done


@EACH_MPI
@pytest.mark.parametrize("owner", ["ringtrain's", pytest.param("user's", marks=pytest.mark.long)])
def test_rank_that_failed_does_not_wait_for_one_that_computes(mpi, owner):
    first = "from mpi4py import MPI" if owner == "user's" else ""
    done = job(mpi, 2, f"""
        {first}
        import time, numpy as np, ringtrain as rt
        rt.init(shutdown_timeout_seconds=0.5)
        rt.allreduce(np.ones(1))
        if rt.rank() == 0:
            raise LookupError("no such file")
        time.sleep(90)
        print("through", flush=True)
    """)  # fmt: skip
    assert done.returncode == 1 and "through" not in done.stdout and "no such file" in done.stderr, done


@EACH_MPI
def test_users_thread_level_is_checked(mpi):
    done = job(mpi, 1, """
        import mpi4py
        mpi4py.rc.thread_level = "serialized"
        from mpi4py import MPI
        import ringtrain as rt
        try:
            rt.init(comm=MPI.COMM_WORLD)
        except NotImplementedError as error:
            print("refused:", error, flush=True)
    """)  # fmt: skip
    granted_more = done.returncode == 0 and done.stdout == ""  # MPI may give a higher level than asked for
    assert "refused: init: MPI's thread level must be MPI_THREAD_MULTIPLE" in done.stdout or granted_more, done


@pytest.mark.openmpi
@pytest.mark.mpich
@pytest.mark.parametrize("mpi, variables, launcher", [
    ("openmpi", {"PMI_RANK": "1", "PMI_SIZE": "2"}, "MPICH's mpiexec"),
    ("mpich", {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, "Open MPI's mpirun"),
])  # fmt: skip
def test_wrong_launcher_is_refused_and_both_are_named(mpi, variables, launcher):
    """Never N silent worlds of one."""
    done = alone(mpi, "import ringtrain as rt; rt.init()", **variables)
    library = {"openmpi": "Open MPI", "mpich": "MPICH"}[mpi]
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0 and launcher in last and library in last and "ringtrainrun" in last, done


@EACH_MPI
def test_rank_bound_to_one_core_is_told_which_flag_helps(mpi):
    done = job(mpi, 1, """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        from mpi4py import MPI
        import ringtrain as rt
        rt.init(comm=MPI.COMM_WORLD)
    """, RINGTRAIN_LOG_LEVEL="warning")  # fmt: skip
    assert "--bind-to none" in done.stderr + done.stdout, done


def test_tests_ran_in_a_process_without_mpi():
    assert "mpi4py.MPI" not in sys.modules, "a world of one must not load MPI, nor may a test do so here"


@EACH_MPI
def test_the_program_finalises_mpi_while_the_world_is_open(mpi):
    done = job(mpi, 2, """
        import numpy as np, ringtrain as rt
        rt.init()
        rt.allreduce(np.ones(1000), name="x")
        from mpi4py import MPI
        MPI.Finalize()
        assert not rt.is_initialized()
        print("finalised", flush=True)
    """)  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("finalised") == 2, done
    assert "MPI_Finalize was called on rank" in done.stderr, done.stderr


@EACH_MPI
def test_one_rank_finalises_mpi_while_others_work(mpi):
    """Their operation fails, in words, and the job ends."""
    done = job(mpi, 2, """
        import numpy as np, ringtrain as rt
        rt.init()
        rt.allreduce(np.ones(1000), name="x")
        if rt.rank() == 1:
            from mpi4py import MPI
            MPI.Finalize()
        else:
            rt.allreduce(np.ones(1000), name="y")
    """)  # fmt: skip
    assert done.returncode == 1, done
    assert "MPI_Finalize was called on rank 1" in done.stderr, done.stderr
    assert "rank 1 called shutdown() or ended without submitting it" in done.stderr, done.stderr


@EACH_MPI
def test_sums_have_the_same_bits_over_tcp(mpi):
    """Of random floats in one world over each transport, on hosts of one rank: small ones, and a ring of several chunks."""
    done = job(mpi, 3, """
        import numpy as np, ringtrain as rt
        from mpi4py import MPI
        from ringtrain._binding import options
        from ringtrain._bootstrap import opening
        from ringtrain._runtime import context
        rt.init(host_layout="1+1+1")
        listener, addresses = opening.listen("127.0.0.1:0")
        peers = MPI.COMM_WORLD.allgather(addresses)
        chosen = options.resolve({"host_layout": "1+1+1"})
        over_tcp = opening.open_tcp(listener, rt.rank(), peers, bytearray(range(32)), 1, chosen)
        def sums():
            random = np.random.default_rng(rt.rank())
            return [rt.allreduce(random.standard_normal(count).astype(dtype), f"{count}.{dtype}", op).tobytes()
                    for count in (1, 300, 20011, 3_000_017) for dtype in ("float32", "float16") for op in (rt.Sum, rt.Average)]
        assert rt.cross_size() == 3
        over_mpi = sums()
        context.make_current(over_tcp)
        assert rt.cross_size() == 3 and sums() == over_mpi
        over_tcp.close()
        context.make_current(None)
        print("equal", flush=True)
        rt.shutdown()
    """)  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("equal") == 3, done
