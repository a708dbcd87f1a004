"""The driver's side of `run`: one barrier stage, whose tasks each start a rank.

A task that fails has Spark kill the others at once, and what the driver hears is a text of Java's. So tasks do not fail: they
return how their rank has ended, and tell it here as soon as it has, by an accumulator.
"""

from __future__ import annotations

import math
import pickle
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark import AccumulatorParam, InheritableThread, SparkContext

from ringtrain._rendezvous.meeting import SECRET_BYTES
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.launch.function import RankTraceback, RunError
from ringtrain.spark import task
from ringtrain.spark.task import Outcome

SECONDS_TO_START = 600.0  # as Horovod waits for executors
SECONDS_TO_FOLLOW = 15.0  # for the other ranks, when one has failed: then they are killed
SECONDS_BETWEEN_LOOKS = 0.1


def run(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, num_proc: int | None = None,
    start_timeout: float | None = None, use_mpi: bool | None = None, use_gloo: bool | None = None,
    extra_mpi_args: str | None = None, env: Mapping[str, str] | None = None, stdout: Any = None, stderr: Any = None,
    verbose: int = 1, nics: str | Sequence[str] | None = None, prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:  # fmt: skip
    """Calls a function on `num_proc` ranks in Spark's executors and returns what it returned, in rank order.

    Example:
        >>> ringtrain.spark.run(train, args=(0.01,), num_proc=2)

    The arguments are `horovod.spark.run`'s. Each rank is a process beside a task of one barrier stage, so all start
    together or none does. ringtrain's world is open when the function begins; `init()` in it does nothing, and torchrun's
    variables are set. ringtrain, and cloudpickle, must be installed where the executors run.

    Args:
        fn: what to call. Arguments and results are pickled by cloudpickle.
        args, kwargs: its arguments, the same on every rank.
        num_proc: number of ranks; default all slots of the application (`defaultParallelism`).
        start_timeout: seconds until Spark must have started all tasks; default 600.
        env: further environment variables of the ranks; options of ringtrain go there, too.
        nics: names of network interfaces, or networks, on which ranks may listen.
        executable: the ranks' Python; default that of the executors.
        use_mpi, stdout, stderr: refused. What ranks print is in their executors' logs.
        use_gloo, extra_mpi_args, verbose, prefix_output_with_timestamp: without effect.

    Raises:
        The exception of the rank that failed first, caused by a RankTraceback that shows where.
        InvalidArgumentError: a ValueError; no SparkContext is active, or arguments that cannot be.
        UnsupportedError: a NotImplementedError; an argument that is refused.
        TimeoutError: Spark had no slots for all ranks within `start_timeout`.
        RunError: a RuntimeError; a rank was killed, or an executor was lost.
    """
    refused = {"use_mpi": use_mpi, "stdout": stdout, "stderr": stderr}
    if given := [name for name, value in refused.items() if value]:
        raise UnsupportedError(
            f"spark.run: {', '.join(given)} must be left out. TCP connects the ranks, and executors log what they print."
        )
    context = SparkContext._active_spark_context
    if context is None:
        raise InvalidArgumentError(
            "spark.run: a SparkContext must be active, but none is. Call SparkSession.builder.getOrCreate() before; "
            "Spark Connect has none."
        )
    ranks = context.defaultParallelism if num_proc is None else num_proc
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InvalidArgumentError(f"spark.run: num_proc must be a whole number of at least 1, but is {ranks!r}.")
    job = task.SparkJob(
        _pickled((fn, tuple(args), dict(kwargs or {}))), list(sys.path), secrets.token_bytes(SECRET_BYTES),
        _variables(env, nics), executable,
    )  # fmt: skip
    ended = _Stage(context, job, ranks).outcomes(SECONDS_TO_START if start_timeout is None else start_timeout)
    if (first := first_failure(ended)) is not None:
        _raise(first)
    return [pickle.loads(outcome.result) for outcome in ended]


def first_failure(ended: Sequence[Outcome]) -> Outcome | None:
    """The one that explains the others: of a function's own error, else of a process that died, else the first; pure.

    A rank whose peer has gone says so, by a HorovodInternalError; it is no cause where another one is.
    """
    failed = [outcome for outcome in ended if outcome.kind != "returned"]
    return min(failed, key=lambda outcome: (_WEIGHTS[outcome.kind], outcome.rank), default=None)


_WEIGHTS = {"raised": 0, "died": 1, "lost a peer": 2}


class _Stage:
    """The barrier stage of one run."""

    def __init__(self, context: SparkContext, job: task.SparkJob, ranks: int):
        self._context = context
        self._job = job
        self._ranks = ranks
        self._group = f"ringtrain-{secrets.token_hex(8)}"
        self._failures = context.accumulator([], _Lists())
        self._ended: list[Outcome] = []
        self._problem: BaseException | None = None

    def outcomes(self, seconds_to_start: float) -> list[Outcome]:
        """Of all ranks in order; or only of some, if one has failed and others did not end in time.

        Raises:
            TimeoutError: the tasks did not start in time.
            RunError: Spark has ended the stage, and no function is the cause.
        """
        thread = InheritableThread(target=self._collect, daemon=True, name="ringtrain-spark")
        thread.start()
        is_over = False
        try:
            is_over = self._wait(thread, seconds_to_start)
        finally:
            if not is_over:  # given up, or Ctrl-C
                self._context.cancelJobGroup(self._group)
                thread.join(SECONDS_TO_FOLLOW)
        ended = self._ended or list(self._failures.value)
        if is_over and self._problem is not None and all(outcome.kind == "lost a peer" for outcome in ended):
            raise RunError(
                f"spark.run: expected a result from each of {self._ranks} ranks, but Spark ended the stage, as it does when an "
                "executor is lost. See its logs, and call run again: nothing is repeated by itself."
            ) from self._problem
        return sorted(ended, key=lambda outcome: outcome.rank)

    def _collect(self) -> None:
        job, failures = self._job, self._failures
        try:
            self._context.setJobGroup(self._group, "ringtrain.spark.run", interruptOnCancel=True)
            slices = self._context.parallelize(range(self._ranks), self._ranks)
            self._ended = slices.barrier().mapPartitions(lambda _: task.run(job, failures)).collect()
        except BaseException as problem:
            self._problem = problem

    def _wait(self, thread: InheritableThread, seconds_to_start: float) -> bool:
        """Until the stage ends, True; False when another rank has had time to learn that one has failed.

        Raises TimeoutError if its tasks do not start in time.
        """
        begun, has_started, failed_at = time.monotonic(), False, math.inf
        while thread.is_alive():
            thread.join(SECONDS_BETWEEN_LOOKS)
            now = time.monotonic()
            has_started = has_started or self._has_started()
            if not has_started and now > begun + seconds_to_start and thread.is_alive():
                raise TimeoutError(
                    f"spark.run: Spark must start {self._ranks} tasks together within {seconds_to_start:g} s, but had no slots "
                    "for them. Ask for fewer ranks (num_proc), or give the application more executors or cores."
                )
            failed_at = min(failed_at, now) if self._failures.value else math.inf
            if now > failed_at + SECONDS_TO_FOLLOW:
                return False
        return True

    def _has_started(self) -> bool:
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._group)]
        stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
        return any(stage.numActiveTasks or stage.numCompletedTasks for stage in stages if stage is not None)


class _Lists(AccumulatorParam):
    def zero(self, value: list[Outcome]) -> list[Outcome]:
        return []

    def addInPlace(self, value1: list[Outcome], value2: list[Outcome]) -> list[Outcome]:
        value1 += value2
        return value1


def _raise(outcome: Outcome) -> None:
    if outcome.kind == "died":
        raise RunError(f"spark.run: expected a result from each rank, but rank {outcome.rank} ended with code {outcome.code}. "
                       "Its executor's log has its output.", outcome.code)  # fmt: skip
    problem, text = pickle.loads(outcome.result)
    raise problem from RankTraceback(outcome.rank, text)


def _variables(env: Mapping[str, str] | None, nics: str | Sequence[str] | None) -> dict[str, str]:
    names = nics if isinstance(nics, str) or nics is None else ",".join(nics)
    return {**({"RINGTRAIN_NETWORK_INTERFACES": names} if names else {}), **(env or {})}


def _pickled(value: object) -> bytes:
    import cloudpickle

    return cloudpickle.dumps(value)
