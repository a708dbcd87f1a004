"""ringtrain.spark.run in a real Spark: results in rank order, the first cause, nothing repeated and nothing left."""

from __future__ import annotations

import shutil
import subprocess
import textwrap
from pathlib import Path

import needs
import pytest
from environments import python_with_trainers, rank_environment

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(420),
    needs.machine("" if shutil.which("java") else "needs Java, for Spark: bin/test --long installs it"),
]
SECONDS = 400
BEGIN = """
    import os, signal, time
    import pytest
    from pyspark.sql import SparkSession
    import ringtrain.spark
    from ringtrain.launch.function import RankTraceback, RunError

    session = SparkSession.builder.master("MASTER").config("spark.ui.enabled", "false").getOrCreate()
    offset, folder = 5, os.environ["FOLDER"]

    def note(what):
        with open(os.path.join(folder, what), "w") as file:
            file.write(str(os.getpid()))

    def is_gone(what):
        try:
            os.kill(int(open(os.path.join(folder, what)).read()), 0)
        except ProcessLookupError:
            return True

    def wait_for(condition):
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert condition()
"""


def in_spark(tmp_path: Path, program: str, master: str) -> None:
    python = python_with_trainers("pyspark")
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(BEGIN).replace("MASTER", master) + textwrap.dedent(program))
    # Another user's Java options, and a host name that nobody resolves, are not what is tested.
    variables = rank_environment(FOLDER=str(tmp_path), PYSPARK_PYTHON=python, SPARK_LOCAL_IP="127.0.0.1")
    done = subprocess.run(
        [python, str(script)], capture_output=True, text=True, env=variables, cwd=tmp_path, timeout=SECONDS
    )
    assert done.returncode == 0 and "all is well" in done.stdout, done.stdout + done.stderr[-6000:]


def test_results_and_what_ranks_see(tmp_path: Path) -> None:
    in_spark(tmp_path, """
        import numpy as np

        def total(scale, power=1):
            import ringtrain as rt
            rt.init()
            x = rt.allreduce(np.full(2, rt.rank() + 1.0), op=rt.Sum)
            return rt.rank(), rt.size(), rt.local_rank(), offset + scale * float(x[0]) ** power, os.environ["EXTRA"]

        def as_torch_has_it():
            import torch
            torch.distributed.init_process_group("ringtrain")
            ones = torch.ones(1)
            torch.distributed.all_reduce(ones)
            rank = torch.distributed.get_rank(), int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
            torch.distributed.destroy_process_group()
            return ones.item(), *rank

        expected = [(rank, 2, rank, 5 + 10 * 9.0, "yes") for rank in range(2)]
        assert ringtrain.spark.run(total, (10,), {"power": 2}, num_proc=2, env={"EXTRA": "yes"}) == expected
        assert ringtrain.spark.run(as_torch_has_it) == [(3.0, rank, rank, 3) for rank in range(3)]
        print("all is well")
    """, "local[3]")  # fmt: skip


def test_failures(tmp_path: Path) -> None:
    in_spark(tmp_path, """
        def fail(how):
            import ringtrain as rt
            rt.init()
            if rt.rank() == 1 and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rt.rank() == 1:
                raise KeyError("the cause")
            if how == "asleep":
                note("asleep")
                time.sleep(1000)
            rt.barrier()

        def runs(how, **named):
            return ringtrain.spark.run(fail, (how,), **{"num_proc": 2, **named})

        with pytest.raises(KeyError, match="the cause") as raised:
            runs("raised")
        assert isinstance(raised.value.__cause__, RankTraceback) and "on rank 1" in str(raised.value.__cause__)
        with pytest.raises(RunError, match="rank 1 ended with code 137"):
            runs("killed")
        with pytest.raises(KeyError, match="the cause"):
            runs("asleep")
        wait_for(lambda: is_gone("asleep"))
        with pytest.raises(TimeoutError, match="Spark must start 4 tasks together within 5 s"):
            runs("raised", num_proc=4, start_timeout=5)
        for named, kind in (({"use_mpi": True}, NotImplementedError), ({"num_proc": 0}, ValueError)):
            with pytest.raises(kind, match="spark.run: "):
                runs("raised", **named)
        session.stop()
        with pytest.raises(ValueError, match="a SparkContext must be active"):
            runs("raised")
        print("all is well")
    """, "local[2]")  # fmt: skip


def test_a_lost_executor_ends_the_run_and_nothing_is_repeated(tmp_path: Path) -> None:
    """Two executors that are processes of their own: what one rank does to that of the other."""
    in_spark(tmp_path, """
        def executor_of(process):
            while True:
                line = open(f"/proc/{process}/cmdline").read()
                if "ExecutorBackend" in line:
                    return process
                process = int(open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[1])

        def train():
            import ringtrain as rt
            rt.init()
            executors = rt.allgather_object(executor_of(os.getpid()))
            assert executors[0] != executors[1]
            note(f"began-{rt.rank()}-{os.getpid()}")
            rt.barrier()
            if rt.rank() == 0:
                os.kill(executors[1], signal.SIGKILL)
            time.sleep(1000)

        with pytest.raises(RunError, match="Spark ended the stage, as it does when an executor is lost"):
            ringtrain.spark.run(train, num_proc=2)
        began = [name for name in os.listdir(folder) if name.startswith("began")]
        assert len(began) == 2
        wait_for(lambda: all(map(is_gone, began)))
        print("all is well")
    """, "local-cluster[2,1,1024]")  # fmt: skip


def test_torch_distributor(tmp_path: Path) -> None:
    in_spark(tmp_path, """
        from pyspark.ml.torch.distributor import TorchDistributor

        def train(scale):
            import torch
            torch.distributed.init_process_group("ringtrain")
            ones = torch.full((1,), scale)
            torch.distributed.all_reduce(ones)
            backend = torch.distributed.get_backend()
            torch.distributed.destroy_process_group()
            return backend, ones.item()

        for local_mode in (True, False):
            distributor = TorchDistributor(num_processes=2, local_mode=local_mode, use_gpu=False)
            assert distributor.run(train, 2.0) == ("ringtrain", 4.0)
        print("all is well")
    """, "local[2]")  # fmt: skip
