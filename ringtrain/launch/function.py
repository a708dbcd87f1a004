"""`ringtrain.run`: a Python function on all ranks, its results as a list.

The launcher runs as a process of its own, so this works in notebooks and from any thread. Function, arguments and results
go through private files of the user's own and through the launcher's connections to its agents (ssh); see `call`.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class RunError(RuntimeError):
    """The job ended without a result from each rank, and without an exception of the function."""


class RankTraceback(Exception):
    """Cause of an exception that `run` raises: where it happened, on its rank."""

    def __init__(self, rank: int, text: str):
        super().__init__(f"on rank {rank}\n{text}")


def run(
    func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, np: int = 1, *,
    hosts: str | None = None, hostfile: str | None = None, start_timeout: float | None = None, ssh_port: int | None = None,
    ssh_identity_file: str | None = None, network_interfaces: str | None = None, output_filename: str | None = None,
    mpi_args: str | None = None, env: Mapping[str, str] | None = None, verbose: bool = False,
    share_gpus: bool = False, use_mpi: bool | None = None, use_gloo: bool | None = None, disable_cache: bool | None = None,
) -> list[Any]:  # fmt: skip
    """Calls a function on `np` ranks and returns what it returned, in rank order.

    The function calls `ringtrain.init()` itself if it wants a world. It, its arguments and its results are pickled by
    cloudpickle; functions of notebooks, of the main script and lambdas will do.

    Args:
        func: what to call; `args` and `kwargs` are the same on every rank.
        np: number of ranks.
        hosts: as -H of ringtrainrun, such as "node-a:4,node-b:4"; the other arguments are its flags too.
        env: further environment variables of the ranks.
        use_mpi, use_gloo, disable_cache: accepted for Horovod's sake, without effect.

    Raises:
        The exception of the rank that failed first, caused by a RankTraceback that shows where.
        RunError: the ranks could not be started, or one was killed; the launcher's words stand on stderr.

    Example:
        >>> ringtrain.run(train, args=(0.01,), np=2)
    """
    import cloudpickle

    flags = {"-H": hosts, "--hostfile": hostfile, "--start-timeout": start_timeout, "--ssh-port": ssh_port,
             "--ssh-identity-file": ssh_identity_file, "--network-interfaces": network_interfaces,
             "--output-filename": output_filename, "--mpi-args": mpi_args}  # fmt: skip
    line = [sys.executable, "-m", "ringtrain.launch", "-np", str(np)]
    line += [f"{flag}={value}" if flag.startswith("--") else f"{flag}{value}"
             for flag, value in flags.items() if value is not None]
    line += ["--verbose"] if verbose else []
    line += ["--share-gpus"] if share_gpus else []
    with tempfile.TemporaryDirectory(prefix="ringtrain-run-") as name:
        folder = Path(name)
        call = cloudpickle.dumps((func, tuple(args), dict(kwargs or {})))
        with os.fdopen(os.open(folder / "function", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pickle.dumps((sys.path, call)))
        code = _wait([*line, "--function-folder", name, "--", sys.executable, "-m", "ringtrain.launch.call"],
                     dict(os.environ, **(env or {})))
        if code == 0:
            return [pickle.loads((folder / f"result.{rank}").read_bytes()) for rank in range(np)]
        _raise_first(folder)
    raise RunError(f"run: expected a result from each of {np} ranks, but ringtrainrun ended with code {code}. "
                   "Its words stand on stderr.")


def _wait(line: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the launcher; Ctrl-C ends the ranks before it goes on here."""
    launcher = subprocess.Popen(line, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return launcher.wait()
    except BaseException:
        launcher.send_signal(signal.SIGINT)
        launcher.wait()
        raise


def _raise_first(folder: Path) -> None:
    """Raises the exception of the rank that the launcher names as the first cause, if it left one."""
    if not (folder / "first").exists():
        return
    rank = (folder / "first").read_text()
    if (folder / f"failure.{rank}").exists():
        problem, text = pickle.loads((folder / f"failure.{rank}").read_bytes())
        raise problem from RankTraceback(int(rank), text)
