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

told = {name: os.environ.pop(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
for turn in range(TURNS_WITHOUT + 2):
    if turn == TURNS_WITHOUT:
        os.environ.update(told)
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
}


@pytest.mark.tcp
@pytest.mark.timeout(700)
@pytest.mark.parametrize("launcher", LINES)
def test_ranks_meet(launcher: str, tmp_path: Path) -> None:
    """Again and again; under ringtrainrun also without the place to meet that it tells torch."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("TURNS_WITHOUT", "2" if launcher == "ringtrainrun" else "0"))
    done = subprocess.run(
        [*map(str, LINES[launcher]), str(script)], capture_output=True, text=True, timeout=600,
        env=rank_environment(PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])),
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("met") == 2, done.stdout[-3000:] + done.stderr[-3000:]
