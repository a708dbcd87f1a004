"""``init_method="ringtrain://"``: the default group of torch.distributed meets in ringtrain's world, under any launcher."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from environments import python_with, rank_environment, ringtrainrun

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, torch, torch.distributed as dist
import ringtrain.torch as hvd

assert os.environ.get("MASTER_ADDR") is None or TOLD, os.environ["MASTER_ADDR"]
for turn in range(2):
    dist.init_process_group("ringtrain", init_method="ringtrain://")
    assert (dist.get_rank(), dist.get_world_size()) == (hvd.rank(), hvd.size()) and hvd.size() == 2
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [2.0] * 3
    halves = [dist.new_group([rank]) for rank in range(2)]
    dist.all_reduce(ones, group=halves[dist.get_rank()])
    assert ones.tolist() == [2.0] * 3
    dist.destroy_process_group()
print("met")
"""
LINES = {
    "torchrun": [python_with("tcp"), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "ringtrainrun": ringtrainrun("tcp", 2, python_with("tcp")),
    "nothing told": [*ringtrainrun("tcp", 2, "env"), "-u", "MASTER_ADDR", "-u", "MASTER_PORT", python_with("tcp")],
}


@pytest.mark.tcp
@pytest.mark.timeout(700)
@pytest.mark.parametrize("launcher", LINES)
def test_ranks_meet(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("TOLD", str(launcher != "nothing told")))
    done = subprocess.run(
        [*map(str, LINES[launcher]), str(script)], capture_output=True, text=True, timeout=600,
        env=rank_environment(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])),
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("met") == 2, done.stdout[-3000:] + done.stderr[-3000:]
