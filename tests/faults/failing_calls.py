"""Ranks of which one call of a C function fails: a server of trials, and who asks it. failing_calls.c makes the call fail.

As a program it is the server. It has loaded what a rank needs, reads trials, one line of JSON each, forks the ranks of each,
which open a world, use it, close it and open another, and writes what became of them. `Server` starts it with the library
preloaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".c")
RANKS = 2
TURNS = 3
DEADLINE = 60.0  # of a trial, on a busy machine
BOUNDS = {"start_timeout_seconds": 3.0, "dead_after_seconds": 10.0, "shutdown_timeout_seconds": 1.0}


# ---- who asks ----


def preloadable(folder: Path) -> Path:
    """failing_calls.c as a library, in this folder."""
    library = folder / "failing_calls.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o", library, SOURCE, "-ldl"],
                   check=True)  # fmt: skip
    return library


class Server:
    """A server, as a process of a job.

    Args:
        job: a `Job`.
        library: of `preloadable`.
        environment: of its process.
    """

    def __init__(self, job: Any, library: Path, environment: dict[str, str]):
        self.job = job
        environment = {**environment, "LD_PRELOAD": str(library)}
        self.process = job.start(
            sys.executable, __file__, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **trial: object) -> dict[str, Any]:
        """What becomes of a trial's ranks.

        Args:
            trial: `layout` of the ranks on hosts; and where something is to fail `function`, `site`, `call`, `error` and
                `always` as fail_call has them, in the rank `rank`.
        """
        self.process.stdin.write(json.dumps(trial) + "\n")
        self.process.stdin.flush()
        result = json.loads(self.process.stdout.readline())
        result["left"] = self.job.segments()
        return result

    def close(self) -> None:
        """Ends it."""
        self.process.stdin.close()
        self.process.wait()


# ---- a rank ----


def work(rank: int, folder: str, layout: str) -> None:
    """A world from its beginning to its end, with each operation, and all results looked at."""
    import numpy as np

    import ringtrain as rt

    rt.init(rank=rank, size=RANKS, rendezvous=f"file://{folder}", host_layout=layout, **BOUNDS)
    few, many = np.arange(10, dtype=np.float32), np.arange(300_000, dtype=np.float32)
    pair = rt.add_process_set([*range(RANKS)])
    for _ in range(TURNS):
        for name, array in (("few", few), ("many", many)):
            result = rt.allreduce(array * (rank + 1), name=name, op=rt.Sum)
            assert (result == array * (RANKS * (RANKS + 1) // 2)).all(), name
        handles = [rt.allreduce_async(few, name=f"few {i}", op=rt.Sum) for i in range(3)]
        assert all((rt.synchronize(handle) == few * RANKS).all() for handle in handles)
        rows = rt.allgather(np.full((rank + 1, 2), rank, np.int64), name="rows")
        assert rows[:, 0].tolist() == [r for r in range(RANKS) for _ in range(r + 1)], rows
        assert rt.broadcast(np.full(5, rank), root_rank=1, name="root").tolist() == [1] * 5
        shares = rt.alltoall(np.full(RANKS * 3, rank), name="shares")
        assert shares.tolist() == [r for r in range(RANKS) for _ in range(3)], shares
        assert (rt.allreduce(few, name="set", op=rt.Sum, process_set=pair) == few * RANKS).all()
        rt.barrier()
    rt.remove_process_set(pair)
    rt.shutdown()


def run(rank: int, trial: dict[str, Any], folder: str) -> dict[str, Any]:
    """What becomes of a rank; its process goes on whatever that is."""
    import ringtrain as rt
    from ringtrain.errors import RingtrainError

    told: dict[str, Any] = {}
    before = len(os.listdir("/proc/self/fd"))
    with calls_watched(rank, trial) as library:
        try:
            work(rank, folder, trial["layout"])
            told["right"] = True
        except (RingtrainError, MemoryError) as problem:
            told["error"] = f"{type(problem).__name__}: {problem}"
        rt.shutdown()
        if "function" not in trial:
            told["called"] = called(library)
    gc.collect()  # the world may be kept by the frames of its error
    told["threads"] = len(os.listdir("/proc/self/task"))
    told["descriptors"] = len(os.listdir("/proc/self/fd")) - before
    rt.init()  # nothing is in the way of another world
    rt.shutdown()
    return told


@contextlib.contextmanager
def calls_watched(rank: int, trial: dict[str, Any]) -> Iterator[ctypes.CDLL]:
    """The library that is preloaded, at its work."""
    library = ctypes.CDLL(None)
    if trial.get("rank", rank) == rank:
        assert library.watch_calls_of(b"_core.")
    if trial.get("rank") == rank:
        name, site, call = trial["function"].encode(), ctypes.c_uint64(trial["site"]), ctypes.c_long(trial["call"])
        assert library.fail_call(name, site, call, trial["error"], trial.get("always", 0))
    yield library
    library.fail_no_call()


def called(library: ctypes.CDLL) -> list[tuple[str, int, int]]:
    """Function, site and number of calls, of all that were called."""
    name, site, calls = ctypes.c_char_p(), ctypes.c_uint64(), ctypes.c_long()
    found, number = [], 0
    while (known := library.called_place(number, ctypes.byref(name), ctypes.byref(site), ctypes.byref(calls))) >= 0:
        if known:
            found.append(((name.value or b"").decode(), site.value, calls.value))
        number += 1
    return found


# ---- the server ----


class Rank:
    """A forked rank: what it tells and what it writes come through pipes."""

    def __init__(self, rank: int, trial: dict[str, Any], folder: str):
        told, tell = os.pipe()
        said, say = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            try:
                os.dup2(say, 1)
                os.dup2(say, 2)
                os.write(tell, json.dumps(run(rank, trial, folder)).encode())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(tell)
        os.close(say)
        self.pipes = {told: b"", said: b""}
        self.told, self.said = told, said

    def result(self) -> dict[str, Any]:
        """Of a rank that has ended."""
        said = self.pipes[self.said].decode(errors="replace")
        failed = re.search(r"^failed at(.*)\n", said, re.MULTILINE)
        return {
            **json.loads(self.pipes[self.told] or b"{}"),
            "failed_at": failed[1].split() if failed else [],
            "said": said.replace(failed[0], "") if failed else said,
            "code": os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1]),
        }


def perform(trial: dict[str, Any]) -> dict[str, Any]:
    """What became of each rank of a trial; hung: it was longer than DEADLINE."""
    folder = tempfile.mkdtemp()
    deadline = time.monotonic() + DEADLINE
    ranks = [Rank(rank, trial, os.path.join(folder, "meeting")) for rank in range(RANKS)]
    hung = not listen(ranks, deadline)
    if hung:
        for rank in ranks:
            os.kill(rank.process, signal.SIGKILL)
        listen(ranks, deadline + DEADLINE)
    shutil.rmtree(folder)
    return {"hung": hung, "ranks": [rank.result() for rank in ranks]}


def listen(ranks: list[Rank], deadline: float) -> bool:
    """Takes what they tell and say until all have ended, which is returned, or until the deadline."""
    with selectors.DefaultSelector() as open_pipes:
        for rank in ranks:
            for pipe in rank.pipes:
                with contextlib.suppress(OSError):  # it has ended
                    os.fstat(pipe)
                    open_pipes.register(pipe, selectors.EVENT_READ, rank)
        while open_pipes.get_map():
            if time.monotonic() > deadline:
                return False
            for key, _ in open_pipes.select(1.0):
                data = os.read(key.fd, 1 << 16)
                key.data.pipes[key.fd] += data
                if not data:
                    open_pipes.unregister(key.fd)
                    os.close(key.fd)
    return True


def serve() -> None:
    import numpy  # noqa: F401

    import ringtrain._bootstrap.start
    import ringtrain.api  # noqa: F401

    gc.freeze()  # what is there is not looked at again in each rank
    for line in sys.stdin:
        print(json.dumps(perform(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()
