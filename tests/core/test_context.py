"""Opening and closing worlds, who may call what when, waiting, aborting, forking, and how a process ends."""

import ctypes
import gc
import inspect
import os
import platform
import re
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path

import needs
import numpy as np
import pytest
from eventually import eventually
from worlds import World, sizes

import ringtrain as rt
from ringtrain import errors
from ringtrain._binding.tensor_memory import as_buffer
from ringtrain._bootstrap import opening
from ringtrain._runtime import context, pending, stacks
from ringtrain.testing import World as ThreadWorld

own_world = pytest.mark.on_threads("opens a world of one, which the launcher's ranks are not")


def script(text, **environment):
    """Runs a script in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )


# ---- importing and starting ----


def test_import_loads_no_framework_and_no_mpi():
    done = script("""
        import sys, ringtrain
        print([name for name in ("torch", "tensorflow", "keras", "jax", "mpi4py", "cloudpickle") if name in sys.modules])
    """)
    assert done.stdout.strip() == "[]", done


@own_world
def test_world_of_one_loads_no_mpi():
    done = script("""
        import sys, ringtrain as rt, numpy as np
        rt.init()
        assert (rt.rank(), rt.size(), rt.local_rank(), rt.local_size(), rt.cross_rank(), rt.cross_size()) == (0, 1, 0, 1, 0, 1)
        assert rt.is_homogeneous()
        assert rt.allreduce(np.arange(3)).tolist() == [0, 1, 2]
        print("mpi4py" in sys.modules, "libmpi" in open("/proc/self/maps").read())
    """)
    assert done.stdout.strip() == "False False", done


@own_world
def test_init_and_shutdown_200_times():
    threads = threading.active_count()
    for turn in range(200):
        rt.init()
        assert rt.is_initialized() and rt.allreduce(np.array([turn]), op=rt.Sum)[0] == turn
        rt.shutdown()
        assert not rt.is_initialized()
    assert threading.active_count() <= threads  # fewer, if one of an earlier test has ended meanwhile
    assert len(os.listdir("/proc/self/task")) < 50, "threads of closed contexts must end"


def test_worlds_of_several_open_and_close_many_times():
    for _turn in range(20):
        with World(sizes()[-1]) as world:
            world.run(lambda rank: rt.allreduce(np.array([rank]), op=rt.Max))


@own_world
def test_second_init_does_nothing(caplog):
    rt.init()
    try:
        first = context.current()
        rt.init(chunk_bytes=None)
        assert context.current() is first and not caplog.records
        rt.init(cache_capacity=5)
        assert "the world is open already, so cache_capacity has no effect" in caplog.text
    finally:
        rt.shutdown()
    rt.shutdown()  # and neither does a second shutdown


@own_world
def test_comm_and_process_sets_of_a_world_of_one():
    only = rt.ProcessSet([0])
    for arguments in ({"comm": []}, {"comm": [0]}, {"process_sets": "dynamic"}, {"process_sets": [only, [0]]}):
        rt.init(**arguments)
        assert rt.size() == 1
        rt.shutdown()
    assert only.process_set_id is not None
    for comm in ("all", 5, [0, 1], [-1], ["zero"]):
        with pytest.raises(ValueError, match="comm must"):
            rt.init(comm=comm)
        assert not rt.is_initialized()


@own_world
def test_options_are_refused_by_name_and_range():
    for options, words in (
        ({"cache_capcity": 5}, "did you mean 'cache_capacity'"),
        ({"cache_capacity": -1}, r"expected a whole number in \[0, 1048576\] but found '-1'"),
        ({"algorithm": "tree"}, "expected one of auto"),
    ):
        with pytest.raises(ValueError, match=words):
            rt.init(**options)
        assert not rt.is_initialized()


# ---- before and after ----

QUESTIONS = [
    rt.rank,
    rt.size,
    rt.local_rank,
    rt.local_size,
    rt.cross_rank,
    rt.cross_size,
    rt.is_homogeneous,
    rt.counters,
]
OPERATIONS = [
    lambda: rt.allreduce(np.ones(1)),
    lambda: rt.allgather_object(1),
    lambda: rt.broadcast_object(1),
    rt.barrier,
    rt.join,
    lambda: rt.add_process_set([0]),
    lambda: rt.start_timeline("nowhere"),
]


def assert_not_initialized():
    assert not rt.is_initialized()
    for call in QUESTIONS:
        with pytest.raises(ValueError, match=r"init\(\)"):
            call()
    for call in OPERATIONS:
        with pytest.raises(rt.HorovodInternalError, match=r"init\(\)"):
            call()


def test_before_init():
    assert_not_initialized()


@own_world
def test_after_shutdown():
    rt.init()
    pending = rt.allreduce_async(np.ones(3))
    rt.synchronize(pending)
    rt.shutdown()
    assert_not_initialized()
    assert rt.synchronize(pending).tolist() == [1.0] * 3  # what was done stays done


@own_world
def test_places_in_a_layout():
    with ThreadWorld(5, "2+3") as world:
        assert world.run(lambda rank: (rt.local_rank(), rt.local_size(), rt.cross_rank(), rt.cross_size())) == [
            (0, 2, 0, 2), (1, 2, 0, 2), (0, 3, 1, 2), (1, 3, 1, 2), (2, 3, 0, 1),
        ]  # fmt: skip
        assert not any(world.run(lambda rank: rt.is_homogeneous()))
    with ThreadWorld(4, "2+2") as world:
        assert all(world.run(lambda rank: rt.is_homogeneous()))


@own_world
def test_layout_that_does_not_fit():
    with pytest.raises(ValueError, match="2"):
        ThreadWorld(3, "2+2")
    with pytest.raises(ValueError):
        ThreadWorld(0)


# ---- one rank fails, leaves or is late ----


@own_world
def test_world_raises_the_first_failure_and_ends_the_others():
    def on_rank(rank):
        if rank == 2:
            eventually(lambda: ranks_that_wait() == 3, "the other ranks wait")
            raise LookupError("batch 7 is missing")
        rt.allreduce(np.ones(10), "never")

    def ranks_that_wait():
        return sum(frame.filename == pending.__file__ for frames in stacks.of_threads(1).values() for frame in frames)

    with ThreadWorld(4) as world, pytest.raises(LookupError, match="batch 7 is missing") as raised:
        world.run(on_rank)
    if sys.version_info >= (3, 11):
        (note,) = raised.value.__notes__
        assert {f"rank-{rank}" for rank in (0, 1, 3)} <= {*re.findall(r"rank-\d", note)}
        assert 'rt.allreduce(np.ones(10), "never")' in note


@pytest.mark.least_ranks(2)
def test_abort_fails_pending_and_later_operations_with_the_cause(world):
    def on_rank(rank):
        if rank == 0:
            context.current().abort("rank 0 ran out of patience")
        for _ in range(2):
            with pytest.raises(errors.PeerLostError, match="rank 0 ran out of patience"):
                rt.allreduce(np.ones(5), "doomed")
        assert rt.is_initialized() and rt.rank() == rank

    world.run(on_rank)


@pytest.mark.parametrize("size", sizes(least=2))
def test_shutdown_of_one_rank_fails_the_others(size):
    """Pending operations, and those submitted later; questions are still answered."""

    def on_rank(rank):
        if rank == size - 1:
            rt.barrier()
            rt.shutdown()
            assert not rt.is_initialized()
            return
        pending = rt.allreduce_async(np.ones(5), "pending")
        rt.barrier()
        for call in (lambda: rt.synchronize(pending), lambda: rt.allreduce(np.ones(5), "later")):
            with pytest.raises(errors.ClosedError, match=rf"rank {size - 1}.*shutdown\(\)"):
                call()
        assert rt.size() == size and rt.rank() == rank

    with World(size, shutdown_timeout_seconds=0.5) as world:
        world.run(on_rank)


@pytest.mark.parametrize("size", sizes(least=2))
def test_shutdown_fails_what_is_pending_here(size):
    def on_rank(rank):
        if rank == 0:
            pending = rt.allreduce_async(np.ones(5), "left behind")
            rt.shutdown()
            with pytest.raises(errors.ClosedError):
                rt.synchronize(pending)

    with World(size, shutdown_timeout_seconds=0.5) as world:
        world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_wait_with_a_deadline(world):
    def on_rank(rank):
        if rank == 0:
            handle = rt.allreduce_async(np.ones(2), "slow", rt.Sum)
            with pytest.raises(TimeoutError, match="0.05 s"):
                handle.wait(0.05)
            rt.barrier()
        else:
            rt.barrier()
            handle = rt.allreduce_async(np.ones(2), "slow", rt.Sum)
        assert handle.wait(30).tolist() == [rt.size()] * 2

    world.run(on_rank)


@own_world
def test_start_that_not_all_ranks_join(monkeypatch):
    """The error names the option that sets the deadline."""
    real = opening.open_in_process

    def all_but_the_last(hub, rank, chosen):
        return real(hub, rank, chosen) if rank < 2 else types.SimpleNamespace(abort=lambda cause: None)

    monkeypatch.setattr(opening, "open_in_process", all_but_the_last)
    with pytest.raises(TimeoutError, match="RINGTRAIN_START_TIMEOUT_SECONDS"):
        ThreadWorld(3, start_timeout_seconds=0.3)


@own_world
def test_rank_that_fails_alone_does_not_leave_the_others_waiting():
    """Also where the error is one of ours, which peers mostly hear of by themselves."""

    def on_rank(rank):
        if rank == 0:
            raise errors.InvalidArgumentError("rank 0 alone saw this")
        rt.allreduce(np.ones(1), "waits for rank 0")

    with ThreadWorld(3) as world, pytest.raises(errors.InvalidArgumentError, match="rank 0 alone"):
        world.run(on_rank)


@own_world
def test_world_that_is_dropped_ends_its_threads():
    before = len(os.listdir("/proc/self/task"))
    world = ThreadWorld(4)
    world.run(lambda rank: rt.allreduce(np.ones(1)))
    del world
    gc.collect()
    # The kernel lists a thread for a moment after it was joined.
    eventually(lambda: len(os.listdir("/proc/self/task")) <= before, "the world's threads end with it")


SCHEDULING = "=IIQiIQQQ"  # of sched_getattr(2): size, policy, flags, nice, priority, runtime, deadline, period
SYS_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


@own_world
@needs.machine("" if tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 12) else "needs Linux 6.12")
@needs.machine("" if platform.machine() in SYS_SCHED_GETATTR else f"needs one of {', '.join(SYS_SCHED_GETATTR)}")
def test_drivers_run_in_short_slices():
    """So that a driver that wakes need not wait for a computing thread's slice to end; others keep theirs."""

    def slice_of(thread):
        asked = ctypes.create_string_buffer(struct.calcsize(SCHEDULING))
        ctypes.CDLL(None).syscall(SYS_SCHED_GETATTR[platform.machine()], thread, asked, len(asked), 0)
        return struct.unpack(SCHEDULING, asked)[5]

    def name_of(thread):
        try:
            return Path(f"/proc/self/task/{thread}/comm").read_text()
        except OSError:  # a thread of an earlier test that has just ended
            return ""

    def slices(world):
        world.run(lambda rank: rt.barrier())
        return [slice_of(int(task)) for task in os.listdir("/proc/self/task") if name_of(task) == "ringtrain\n"]

    with ThreadWorld(2) as world:
        deadline = time.monotonic() + 30
        while slices(world).count(100_000) < 2:
            assert time.monotonic() < deadline, slices(world)
    assert slice_of(os.getpid()) > 100_000


# ---- waiting ----


@own_world
def test_waiting_lets_other_threads_run():
    counted = []

    def on_rank(rank):
        if rank == 0:
            return rt.allreduce(np.ones(1), "wait")
        begun = time.monotonic()
        while time.monotonic() < begun + 0.3 or (len(counted) <= 1000 and time.monotonic() < begun + 30):
            counted.append(1)
        return rt.allreduce(np.ones(1), "wait")

    with ThreadWorld(2) as world:
        world.run(on_rank)
    assert len(counted) > 1000


@own_world
def test_ctrl_c_interrupts_a_wait():
    done = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent("""
            import threading, numpy as np, ringtrain as rt
            from ringtrain._runtime import context
            from ringtrain.testing import World
            world = World(2)
            context.make_current(world.contexts[0])
            try:
                print("waiting", flush=True)
                rt.allreduce(np.ones(1), "never")
            except KeyboardInterrupt:
                print("interrupted", flush=True)
                world.contexts[0].abort("interrupted")
        """)], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert done.stdout.readline() == "waiting\n"
    time.sleep(0.3)
    done.send_signal(signal.SIGINT)
    assert done.communicate(timeout=60)[0] == "interrupted\n"


@own_world
def test_many_threads_of_one_rank():
    """Threads of one rank submit and wait at once, each under names of its own."""

    def worker(current, thread, failures):
        try:
            context.make_current(current)
            for turn in range(50):
                found = rt.allreduce(np.full(100, float(thread + turn)), f"thread.{thread}", rt.Sum)
                assert (found == 2 * (thread + turn)).all()
        except BaseException as problem:
            failures.append(problem)

    def on_rank(rank):
        failures = []
        threads = [threading.Thread(target=worker, args=(context.current(), i, failures)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures

    with ThreadWorld(2) as world:
        world.run(on_rank)


# ---- how processes end ----


@own_world
def test_forked_child_gets_a_clear_error():
    done = script("""
        import os, ringtrain as rt, numpy as np
        rt.init()
        handle = rt.allreduce_async(np.ones(3))
        child = os.fork()
        if child == 0:
            assert not rt.is_initialized()
            assert (rt.rank(), rt.size(), rt.local_rank(), rt.is_homogeneous()) == (0, 1, 0, True)  # as a loader's worker asks
            for call in (rt.counters, rt.init, lambda: rt.allreduce(np.ones(1))):
                try:
                    call()
                    os._exit(1)
                except rt.RingtrainError as error:
                    assert "forked" in str(error), error
            del handle
            rt.shutdown()
            raise SystemExit(0)  # through the exit handlers
        assert os.waitpid(child, 0)[1] == 0
        assert rt.synchronize(handle).tolist() == [1, 1, 1]
        print("parent goes on")
    """)
    assert done.stdout == "parent goes on\n" and done.returncode == 0, done


@own_world
@pytest.mark.parametrize(
    "ending, code", [("raise SystemExit(3)", 3), ("import sys; sys.exit(4)", 4), ("raise ValueError('x')", 1), ("", 0)]
)
def test_exit_code_is_kept(ending, code):
    done = script(f"import ringtrain as rt\nrt.init()\n{ending}")
    assert done.returncode == code, done
    assert ("ValueError: x" in done.stderr) == ("ValueError" in ending)


@own_world
def test_ranks_that_are_announced_without_a_place_to_meet_are_refused():
    done = script(
        "import ringtrain as rt; rt.init()", RANK="1", WORLD_SIZE="2", MASTER_ADDR="10.0.0.9", MASTER_PORT="1"
    )
    assert "ringtrainrun -np 2" in done.stderr and "torchrun" in done.stderr and done.returncode == 1, done


@own_world
@pytest.mark.parametrize(
    "variables, extra",
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, "openmpi"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "mpich"),
    ],
)
def test_launcher_without_mpi(variables, extra):
    done = script("import sys; sys.modules['mpi4py'] = None\nimport ringtrain as rt; rt.init()", **variables)
    assert f"pip install ringtrain[{extra}]" in done.stderr and done.returncode == 1, done


@own_world
def test_log_level_shows_lines_of_the_library():
    wait_for_nobody = """
        import numpy as np, ringtrain as rt
        from ringtrain._runtime import context
        from ringtrain.testing import World
        from ringtrain._binding import log
        log.configure()
        world = World(2, stall_warning_seconds=0.05, stall_abort_seconds=0.5)
        context.make_current(world.contexts[0])
        try:
            rt.allreduce(np.ones(1), "nobody else")
        except rt.RingtrainError:
            pass
        world.close()
    """
    assert "ringtrain WARNING: allreduce 'nobody else'" in script(wait_for_nobody, RINGTRAIN_LOG_LEVEL="info").stderr
    assert "nobody else" not in script(wait_for_nobody, RINGTRAIN_LOG_LEVEL="error").stderr
    assert "expected one of debug" in script(wait_for_nobody, RINGTRAIN_LOG_LEVEL="loud").stderr


def test_attributes_of_one_request_do_not_stay_for_the_next(world):
    """Requests come from a pool, and keep what the last one asked for if the next asks for the same."""

    def on_rank(rank):
        ones, size = np.ones(3, np.float32), world.size
        for _ in range(2):
            weighted = rt.allreduce(ones * rank, name="a", weight=rank + 1, postscale_factor=2.0)
            expected = 2.0 * sum(each * (each + 1) for each in range(size)) / sum(range(1, size + 1))
            np.testing.assert_allclose(weighted, ones * expected, rtol=1e-6)
            np.testing.assert_array_equal(rt.allreduce(ones, name="b", op=rt.Sum), ones * size)
            np.testing.assert_array_equal(rt.broadcast(ones * rank, size - 1, name="c"), ones * (size - 1))
            np.testing.assert_array_equal(rt.broadcast(ones * rank, 0, name="d"), ones * 0)
            np.testing.assert_array_equal(rt.allgather(ones, name="e"), np.ones(3 * size, np.float32))
            np.testing.assert_allclose(rt.allreduce(ones, name="f"), ones)

    world.run(on_rank)


@pytest.mark.on_threads("one rank gives another room than the others")
@pytest.mark.parametrize("operation", ["allgather", "reducescatter"])
@pytest.mark.parametrize("room_of_rank_0", ["what it gets", "one element more"])
def test_rows_come_into_room_of_their_size(operation, room_of_rank_0):
    """Elsewhere the core allocates, on this rank alone."""
    reduction = {} if operation == "allgather" else {"reduction": "sum"}

    def on_rank(rank):
        given = np.arange(6, dtype=np.float32) * (rank + 1)
        gets = 12 if operation == "allgather" else 3
        fits = rank > 0 or room_of_rank_0 == "what it gets"
        target = np.zeros(gets if fits else gets + 1, np.float32)
        operation_under_way = context.current().submit(
            operation, "rows", [as_buffer(given)], [as_buffer(target)], waits=True, room=True, **reduction
        )
        operation_under_way.wait()
        assert operation_under_way.has_filled(0) == fits
        if fits:
            return target.tolist()
        assert not target.any()
        return np.frombuffer(operation_under_way.allocated()[0], np.float32).tolist()

    expected = [[0, 1, 2, 3, 4, 5, 0, 2, 4, 6, 8, 10]] * 2 if operation == "allgather" else [[0, 3, 6], [9, 12, 15]]
    with World(2) as world:
        assert world.run(on_rank) == expected


@own_world
def test_a_rank_that_was_stopped_says_so():
    """Others may have taken it for silent: what it says tells that from a network that is cut (`elastic/authority.h`)."""
    rank = subprocess.Popen([sys.executable, "-c", textwrap.dedent("""
        import sys
        from ringtrain._binding._native import lib
        from ringtrain._runtime.context import current
        from ringtrain.testing import World

        def ask(_rank):
            return current().suspects(lib.RT_UNHEARD)

        with World(2, dead_after_seconds=4) as world:
            print(world.run(ask), flush=True)
            sys.stdin.readline()
            print(world.run(ask), flush=True)
        """)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        before = rank.stdout.readline()
        os.kill(rank.pid, signal.SIGSTOP)
        os.waitpid(rank.pid, os.WUNTRACED)  # on a busy machine a thread runs on for a while
        time.sleep(2.1)  # more than half of the bound
        rank.stdin.write("\n")
        rank.stdin.flush()
        os.kill(rank.pid, signal.SIGCONT)
        assert (before, rank.stdout.readline()) == ("[[], []]\n", "[[0], [1]]\n")
    finally:
        rank.kill()
        rank.communicate()


def here():
    """Where this is called, as errors have it."""
    frame = inspect.currentframe().f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@pytest.mark.on_threads("looks at what each rank was told")
@pytest.mark.parametrize("level", ["DEBUG", "INFO"])
@pytest.mark.parametrize(
    "submit", [rt.allreduce_async, lambda *given: rt.grouped_allreduce_async([given[0]], given[1])]
)
def test_a_name_that_is_in_flight_is_refused_with_its_places(level, submit, caplog):
    """The first one for whoever asks for it: it takes more than a tenth of a submission."""

    def body(rank):
        if rank == 0:
            first, where = submit(np.ones(2), "twice"), here()
            with pytest.raises(rt.errors.InvalidArgumentError) as caught:
                submit(np.ones(2), "twice")
        rt.barrier()
        if rank == 1:
            first = submit(np.ones(2), "twice")
        rt.synchronize(first)
        return (str(caught.value), where) if rank == 0 else None

    with caplog.at_level(level, "ringtrain"), World(2) as world:
        text, where = world.run(body)[0]
    assert "'twice': the name must not be in flight" in text and f" It comes again at {__file__}:" in text
    if level == "DEBUG":
        assert text.endswith(f", and came first at {where}.") or submit is not rt.allreduce_async
        assert f"came first at {__file__}:" in text
    else:
        assert text.endswith("with RINGTRAIN_LOG_LEVEL=debug this says where it came first.")
