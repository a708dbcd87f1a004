"""`ringtrain.run`: a Python function on all ranks, its results as a list.

The launcher runs as a process of its own, so this works in notebooks and from any thread. Function, arguments and
results go through private files of the user's own and through the launcher's connections to its agents (ssh); see
`call`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.launch.interpreter import module
from ringtrain.launch.job_folder import temporary_folder
from ringtrain.launch.settings import TRANSPORTS

SECONDS_TO_STOP = 15.0  # for the launcher, which gives the ranks some seconds to end


class RunError(RuntimeError):
    """The job ended without a result from each rank, and without an exception of the function.

    Attributes:
        code: the exit code of ringtrainrun.
    """

    def __init__(self, text: str, code: int = 1):
        super().__init__(text)
        self.code = code


class RankTraceback(Exception):
    """Cause of an exception that `run` raises: where it happened, on its rank."""

    def __init__(self, rank: int, text: str):
        super().__init__(f"on rank {rank}\n{text}")


def run(
    func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, num_proc: int = 1,
    min_num_proc: int | None = None, max_num_proc: int | None = None, slots: int | None = None, reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None, hosts: str | None = None, hostfile: str | None = None,
    host_discovery_script: str | None = None, start_timeout: float | None = None, ssh_port: int | None = None,
    ssh_identity_file: str | None = None, disable_cache: bool | None = None, output_filename: str | None = None,
    verbose: bool | int | None = None, use_gloo: bool | None = None, use_mpi: bool | None = None, mpi_args: str | None = None,
    network_interface: str | None = None, network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None, np: int | None = None, min_np: int | None = None, max_np: int | None = None, *,
    env: Mapping[str, str] | None = None, share_gpus: bool = False, transport: str | None = None,
) -> list[Any]:  # fmt: skip
    """Calls a function on `num_proc` ranks and returns what it returned, in rank order. The arguments are `horovod.run`'s.

    Example:
        >>> ringtrain.run(train, args=(0.01,), num_proc=2)

    The function calls `ringtrain.init()` itself if it wants a world. It, its arguments and its results are pickled by
    cloudpickle; functions of notebooks, of the main script and lambdas will do.

    Args:
        func: what to call.
        args, kwargs: its arguments, the same on every rank.
        num_proc: number of ranks; `np` is short for it.
        min_num_proc, max_num_proc: bounds around `num_proc`, which stays the number of ranks; also `min_np`, `max_np`.
        slots: ranks that each host may run that `hosts` or `hostfile` name without a number.
        hosts, hostfile: as -H of ringtrainrun, such as "node-a:4,node-b:4"; or a file of them.
        start_timeout, ssh_port, ssh_identity_file, output_filename, verbose, mpi_args: the flags of ringtrainrun.
        network_interfaces: a list of names or networks, or one text with commas. `network_interface` is its older name.
        use_mpi: take mpirun in a Slurm allocation too.
        executable: the ranks' Python; default this one. It must find ringtrain and cloudpickle.
        reset_limit, cooldown_range, disable_cache, use_gloo: without effect; the launcher says so in one line.
        host_discovery_script: refused, since the number of ranks does not change during a run.
        env: further environment variables of the ranks.
        share_gpus: let a host have more ranks than GPUs.
        transport: "mpi", "tcp", which needs no MPI, or "auto" (the default): as `ringtrainrun --transport` says.

    Raises:
        The exception of the rank that failed first, caused by a RankTraceback that shows where.
        InvalidArgumentError: a ValueError; arguments that contradict each other.
        UnsupportedError: a NotImplementedError; `host_discovery_script`.
        RunError: a RuntimeError; the ranks could not be started, or one was killed; see the launcher's output on
            stderr.
    """
    import cloudpickle

    ranks = _number_of_ranks(
        num_proc, np, min_np if min_num_proc is None else min_num_proc, max_np if max_num_proc is None else max_num_proc
    )
    _check_choices(hosts, hostfile, host_discovery_script, use_gloo, use_mpi, transport)
    if network_interface is not None:
        warnings.warn("network_interface has become network_interfaces.", DeprecationWarning, stacklevel=2)
        network_interfaces = network_interface if network_interfaces is None else network_interfaces
    if network_interfaces is not None and not isinstance(network_interfaces, str):
        network_interfaces = ",".join(network_interfaces)
    flags = {"-H": hosts, "--hostfile": hostfile, "--slots-per-host": slots, "--start-timeout": start_timeout,
             "--ssh-port": ssh_port, "--ssh-identity-file": ssh_identity_file, "--network-interfaces": network_interfaces or None,
             "--output-filename": output_filename, "--mpi-args": mpi_args, "--reset-limit": reset_limit,
             "--transport": transport}  # fmt: skip
    switches = {"--verbose": verbose, "--share-gpus": share_gpus, "--disable-cache": disable_cache, "--gloo": use_gloo,
                "--mpi": use_mpi}  # fmt: skip
    line = module("ringtrain.launch", "-np", str(ranks))
    line += [
        f"{flag}={value}" if flag.startswith("--") else f"{flag}{value}"
        for flag, value in flags.items()
        if value is not None
    ]
    line += [switch for switch, is_on in switches.items() if is_on]
    line += ["--blacklist-cooldown-range", *map(str, cooldown_range)] if cooldown_range else []
    with tempfile.TemporaryDirectory(prefix="ringtrain-run-", dir=temporary_folder()) as name:
        folder = Path(name)
        call = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
        with os.fdopen(os.open(folder / "function", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pickle.dumps((sys.path, call)))
        in_rank = module("ringtrain.launch.call", python=executable or sys.executable)
        code = _wait([*line, "--function-folder", name, "--", *in_rank], dict(os.environ, **(env or {})))
        results = [folder / f"result.{rank}" for rank in range(ranks)]
        if code == 0 and all(result.exists() for result in results):
            return [pickle.loads(result.read_bytes()) for result in results]
        _raise_first(folder)
    raise RunError(
        f"run: expected a result from each of {ranks} ranks, but ringtrainrun ended with code {code}. "
        "See its output on stderr.",
        code,
    )


def _number_of_ranks(num_proc: int, np: int | None, least: int | None, most: int | None) -> int:
    """The number of ranks, which is fixed; raises InvalidArgumentError for one outside of the bounds."""
    ranks = num_proc if np is None else np
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InvalidArgumentError(f"run: num_proc must be a whole number of at least 1, but is {ranks!r}.")
    if num_proc not in (1, ranks):
        raise InvalidArgumentError(
            f"run: num_proc and np must be the same, but are {num_proc} and {np}. Give one of them."
        )
    if not (least or ranks) <= ranks <= (most or ranks):
        raise InvalidArgumentError(
            f"run: num_proc must be from min_num_proc to max_num_proc, but is {ranks} and these are {least} and {most}. "
            "The number of ranks does not change during a run."
        )
    return ranks


def _check_choices(
    hosts: str | None, hostfile: str | None, script: str | None, use_gloo: bool | None, use_mpi: bool | None,
    transport: str | None
) -> None:  # fmt: skip
    if hosts is not None and hostfile is not None:
        raise InvalidArgumentError("run: hosts must come from hosts or hostfile, but both are given. Leave one out.")
    if use_gloo and use_mpi:
        raise InvalidArgumentError("run: only one of use_gloo and use_mpi may be True, but both are. Leave both out.")
    if transport not in (None, *TRANSPORTS):
        raise InvalidArgumentError(f"run: transport must be one of {', '.join(TRANSPORTS)}, but is {transport!r}.")
    if script is not None:
        raise UnsupportedError(
            "run: hosts must be known at the start, but host_discovery_script finds them during the run. "
            "Name them in hosts or hostfile."
        )


def _wait(line: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the launcher; Ctrl-C ends the ranks before it goes on here."""
    launcher = subprocess.Popen(line, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return launcher.wait()
    except BaseException:
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGKILL,
        ):  # the first ones may be ignored, as by this process
            launcher.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(SECONDS_TO_STOP)
                break
        raise


def _raise_first(folder: Path) -> None:
    """Raises the exception of the rank that the launcher names as the first cause, if it left one."""
    if not (folder / "first").exists():
        return
    rank = (folder / "first").read_text()
    if (folder / f"failure.{rank}").exists():
        problem, text = pickle.loads((folder / f"failure.{rank}").read_bytes())
        raise problem from RankTraceback(int(rank), text)
