"""A pytest plugin: a test that changes what all tests of its process share puts it back, or fails.

Else the next test would depend on which tests ran before it. What is looked at costs a fraction of a millisecond. Outside of
the folders that have been cleared of it, a run warns of such tests at its end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from eventually import eventually

from ringtrain._rendezvous.launcher import OPENMPI_TCP_SETTINGS, UCX_SETTINGS

SIGNALS = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE]
SIGNALS += [signal.SIGUSR1, signal.SIGUSR2]
CLEARED = ("tests/core/", "tests/averaging/")
FOR_GOOD = ("ringtrain.", "torch.")  # packages that hook themselves into the process once, to its end
OF_PYTEST = {"PYTEST_CURRENT_TEST"}
# Set by importing a library, whichever test does so first.
OF_LIBRARIES = {
    "TF2_BEHAVIOR",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "RINGTRAIN_RANK_PROCESS",  # which init() sets once in the process of a rank
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    *UCX_SETTINGS,  # which init() sets before MPI reads them
    *OPENMPI_TCP_SETTINGS,
}
SECONDS_TO_END = 10.0  # of a thread that has been told to
MISSING = "(missing)"


def state() -> dict[str, Any]:
    """What tests of a process share, by name."""
    found = {f"os.environ {name}": value for name, value in os.environ.items() if name not in OF_PYTEST | OF_LIBRARIES}
    found["os.getcwd()"] = os.getcwd()
    found["os.sched_getaffinity()"] = os.sched_getaffinity(0)
    found["sys.path"] = list(sys.path)
    found["sys.excepthook"] = unless_for_good(sys.excepthook)
    found["signal mask"] = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    found |= {f"handler of {number.name}": unless_for_good(signal.getsignal(number)) for number in SIGNALS}
    found |= {f"np.geterr() {kind}": what for kind, what in np.geterr().items()}
    modules = {name: module for name, module in list(sys.modules.items()) if name.startswith("ringtrain")}
    found |= {f"sys.modules {name}": id(module) for name, module in modules.items()}
    found["libraries"] = sorted(LIBRARIES.keys() & sys.modules.keys())
    for library, look in LIBRARIES.items():
        if library in sys.modules:
            found |= look(sys.modules[library])
    return found


def unless_for_good(hook: Any) -> Any:
    """A hook, or what there is at first where a package has its own, which calls that."""
    own = str(getattr(hook, "__module__", "")).startswith(FOR_GOOD)
    return "at first" if own or hook in (sys.__excepthook__, signal.SIG_DFL) else hook


def of_torch(torch: Any) -> dict[str, Any]:
    from torch.nn.modules import module
    from torch.optim import optimizer

    hooks = {"modules": vars(module), "optimizers": vars(optimizer)}
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": str(torch.get_default_device()),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.is_autocast_enabled('cpu')": torch.is_autocast_enabled("cpu"),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
    } | {
        f"torch's {name} of all {kind}": len(value)
        for kind, names in hooks.items()
        for name, value in names.items()
        if name.startswith("_global_") and isinstance(value, Mapping)
    }


def of_keras(keras: Any) -> dict[str, Any]:
    return {
        "keras.config.floatx()": keras.config.floatx(),
        "keras.config.dtype_policy()": keras.config.dtype_policy().name,
        "keras.config.image_data_format()": keras.config.image_data_format(),
        "keras.distribution.distribution()": keras.distribution.distribution(),
    }


def of_tensorflow(tf: Any) -> dict[str, Any]:
    return {
        "tf.config.functions_run_eagerly()": tf.config.functions_run_eagerly(),
        "tf.executing_eagerly()": tf.executing_eagerly(),
    }


def of_jax(jax: Any) -> dict[str, Any]:
    return {f"jax.config {name}": value for name, value in jax.config.values.items()}


def of_ringtrain(ringtrain: Any) -> dict[str, Any]:
    guard = sys.modules.get("ringtrain._training.step_guard")
    under_way = guard.under_way() if guard else None
    return {"ringtrain.is_initialized()": ringtrain.is_initialized(), "guard.under_way()": under_way}


LIBRARIES = {
    "torch": of_torch, "keras": of_keras, "tensorflow": of_tensorflow, "jax": of_jax, "ringtrain": of_ringtrain,
}  # fmt: skip


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is other than before, a line each. What came with a module that was imported meanwhile does not count."""
    names = [name for name in before if now.get(name, MISSING) != before[name]]
    names += [name for name in now if name not in before and name.startswith("os.environ ")]
    if before.get("libraries") != now.get("libraries"):  # whose import sets variables
        names = [name for name in names if name != "libraries" and not name.startswith("os.environ ")]
    return [f"{name}: {before.get(name, MISSING)!r} before, {now.get(name, MISSING)!r} now" for name in names]


def threads() -> set[threading.Thread]:
    """Those that end with what a test has opened: ranks, and all for which Python would wait at its end."""
    return {each for each in threading.enumerate() if each.name.startswith("rank-") or not each.daemon}


# As a plugin's, it begins before all other fixtures of a test, and ends behind them.
@pytest.fixture(autouse=True)
def a_test_leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    before, threads_before = state(), threads()
    yield
    forget_what_is_compiled()
    cleared = request.node.nodeid.startswith(CLEARED)
    if found := differences(before, state()):
        said = "\n".join([f"{request.node.nodeid} leaves behind, for all that run after it:", *found])
        pytest.fail(said, pytrace=False) if cleared else warnings.warn(pytest.PytestWarning(said), stacklevel=1)
    if cleared:
        eventually(lambda: not threads() - threads_before, "the threads of the test end with it", SECONDS_TO_END)


def forget_what_is_compiled() -> None:
    """A process in which anything was given to torch.compile is treated as one that compiles: later tests see it."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and dynamo.cached_backends:
        sys.modules["torch._dynamo"].reset()
