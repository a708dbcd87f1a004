"""Fixtures shared by the Python tests; see ``worlds`` for the two ways in which a world comes about."""

import gc
import operator
import os
import random
import re
import signal
import sys
import threading
import zlib

import leaks
import pytest
import timeouts
import turns
import worlds
from hypothesis import HealthCheck, settings

from ringtrain import testing
from ringtrain.bench import namespaces

settings.register_profile(  # and on a slow machine, too
    "same examples in every run",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same examples in every run")

SIGNALS = {signal.SIGINT: signal.default_int_handler} | dict.fromkeys(
    [signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2], signal.SIG_DFL
)


def pytest_generate_tests(metafunc):
    if "world" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("least_ranks")
        least = marker.args[0] if marker else 1
        sizes = [
            pytest.param(size, marks=pytest.mark.long if is_costly(metafunc, size) else ())
            for size in worlds.sizes(least)
        ]
        metafunc.parametrize("world", sizes, indirect=True, ids=lambda size: f"{size}ranks")


# What Open MPI and MPICH have in common is tested with the former: under MPICH, in every run, what an MPI itself does.
OF_EACH_MPI = re.compile("tests/(launch/test_launch_over_mpi|native/test_native)")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not select
def pytest_collection_modifyitems(items):
    if worlds.LAUNCHED:
        items[:] = [item for item in items if not item.get_closest_marker("on_threads")]
    for item in items:
        if item.get_closest_marker("mpich") and not OF_EACH_MPI.match(item.nodeid):
            item.add_marker("long")


def is_costly(metafunc, size: int) -> bool:
    """What a larger world has to say is said by a smaller one too.

    An adapter sees of four ranks or seven what it sees of three. The core has other schedules for four and for seven, which
    is odd and no power of two, as three is; those of three in particular are in worlds.configurations().
    """
    return size in ((4, 7) if re.match("test_(torch|training)", metafunc.module.__name__) else (3,))


def pytest_configure(config):
    config.pluginmanager.register(leaks)
    config.pluginmanager.register(timeouts)
    # What nohup, a shell's background job or a runner of tests ignores or blocks, all that the tests start would, too.
    for number, handler in SIGNALS.items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # Compiling is most of what tests of JAX take. Long runs compile as users do.
    if config.option.markexpr == "not long":
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    # On a machine with fewer GPUs than a test has ranks, the launcher would refuse them. Who wants GPUs names them.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    # Jobs of tests that name no transport are over the MPI of their environment; ranks of a launcher have theirs.
    if not worlds.LAUNCHED:
        os.environ["RINGTRAIN_TRANSPORT"] = "mpi"
    config.addinivalue_line("markers", "least_ranks(n): the fixture `world` has n ranks at least")
    config.addinivalue_line("markers", "on_threads(why): makes its ranks itself, and is left out under a launcher")
    config.addinivalue_line("markers", "one_by_one: counts on each gradient travelling by itself")


def pytest_collection_finish():
    """What collecting has left, with two frameworks in it, lives to the end: no collection of garbage looks through it again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """Ranks of a launcher end in a world that is sound.

    pytest raises SystemExit by itself, with a code that nobody knows before: after a world that failed, as some tests
    make it, such a rank leaves without MPI_Finalize, and the launcher ends those that are slower.
    """
    if worlds.LAUNCHED:
        worlds.LaunchedWorld(worlds.sizes()[0]).close()


@pytest.fixture(autouse=True)
def same_random_numbers_in_every_run(request):
    """A test draws what it drew yesterday, whatever ran before it; ranks that a launcher started draw different numbers."""
    seed = zlib.crc32(request.node.nodeid.encode()) % 2**31 + worlds.LAUNCHED_RANK
    random.seed(seed)
    for module, name in [("numpy", "random.seed"), ("torch", "random.manual_seed"), ("tensorflow", "random.set_seed")]:
        if module in sys.modules:
            operator.attrgetter(name)(sys.modules[module])(seed)


@pytest.fixture(autouse=True)
def ranks_take_turns_often(request):
    """Most tests' ranks are threads: a race between them shows in this run then, not in one of a hundred.

    With TensorFlow less often: it runs so much Python that turns of 10 us take a tenth of its tests' time.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4 if re.match("test_(tensorflow|keras|fuzz_keras)", request.module.__name__) else 1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def ranks_take_turns_in_tensorflows_dispatcher():
    turns.take_turns_in_tensorflows_dispatcher()


@pytest.fixture(autouse=True)
def ranks_take_turns_in_torchs_optimizers(monkeypatch):
    """The first optimizer of a class wraps the class's step, for hooks. Two ranks that make one at once may both wrap it.

    Then each hook runs twice in a step, to the end of the process.
    """
    if "torch" not in sys.modules:
        return
    from torch.optim import Optimizer

    wrap, turn = Optimizer._patch_step_function, threading.Lock()

    def wrap_in_turn(self):
        with turn:
            wrap(self)

    monkeypatch.setattr(Optimizer, "_patch_step_function", wrap_in_turn)


@pytest.fixture(autouse=bool(os.environ.get("RINGTRAIN_TEST_BUCKET_VIEWS")))
def gradients_as_bucket_views(monkeypatch):
    """Distributed optimizers make gradients views of buckets after one step, unless a compressor takes them one by one."""
    import ringtrain.torch as hvd
    from ringtrain._training import bucket_plan
    from ringtrain.torch.compression import compression_in_the_core

    def optimizer_with_buckets(*arguments, make=hvd.DistributedOptimizer, **named):
        by_core = compression_in_the_core(named.get("compression", hvd.Compression.none)) is not None
        return make(*arguments, **{"mode": hvd.Synchronous(gradient_as_bucket_view=by_core), **named})

    monkeypatch.setattr(hvd, "DistributedOptimizer", optimizer_with_buckets)
    monkeypatch.setattr(bucket_plan, "STEADY_STEPS", 1)


@pytest.fixture(autouse=True)
def early_or_late_gradients(request, monkeypatch):
    """Gradients of PyTorch leave while the backward pass goes on, or when it has ended: each in half of the tests.

    It depends on the cores of the machine else. RINGTRAIN_TEST_OTHER_OVERLAP=1 deals the other way round.
    """
    if "with_torch" in request.node.nodeid:
        from ringtrain.torch import bucketing, exchange

        half = zlib.crc32(request.node.nodeid.rpartition("/")[2].encode()) % 2
        pays = half != bool(os.environ.get("RINGTRAIN_TEST_OTHER_OVERLAP"))
        monkeypatch.setattr(exchange, "overlap_pays", lambda session, parameters: pays)
        if request.node.get_closest_marker("one_by_one"):
            monkeypatch.setattr(exchange, "growth_of_groups", lambda settings, makes_buckets: bucketing.Growth.NONE)


@pytest.fixture
def world(request):
    """A world on one host with the default options, for each size; the launcher's world under a launcher."""
    with worlds.World(request.param) as opened:
        yield opened


@pytest.fixture
def two():
    """Two ranks as threads of this process."""
    with testing.World(2) as opened:
        yield opened


@pytest.fixture
def compared_always(monkeypatch):
    """Parameters are compared in each step."""
    from ringtrain._training import drift

    monkeypatch.setattr(drift, "PERIOD", 0.0)
    monkeypatch.setattr(drift, "SHARE", float("inf"))


@pytest.fixture(scope="session")
def three_hosts():
    """Hosts on this machine, for all tests that need no links of a certain rate: real sshds, interfaces of different names,
    a docker0 that leads nowhere, and a bare PATH. A test leaves no process and no file on them."""
    with namespaces.HostNetwork(
        {"node-a": "eth0", "node-b": "ens5", "node-c": "enp3s0"}, login_path="/nonexistent"
    ) as made:
        yield made
