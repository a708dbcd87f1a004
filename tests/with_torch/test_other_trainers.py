"""Ignite and Ray Train over ringtrain, on two ranks: the same parameters as over gloo."""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest
from environments import python_with_trainers, rank_environment, transport_of

pytestmark = [
    pytest.mark.long,
]
ROOT = Path(__file__).parents[2]
SECONDS = 280
IGNITE = """
    import hashlib, json, os, sys
    import ignite.distributed as idist
    import torch
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import MeanSquaredError

    backend, spawned = sys.argv[1], json.loads(sys.argv[2])
    if backend == "ringtrain":
        import ringtrain.ignite

    def training(local_rank):
        torch.manual_seed(3 + idist.get_rank())  # ranks begin with different parameters
        network = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        model = idist.auto_model(network)
        optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05))
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        loader = idist.auto_dataloader(data, batch_size=16)
        trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss, device=idist.device())
        evaluator = create_supervised_evaluator(model, {"error": MeanSquaredError()})
        trainer.add_event_handler(Events.COMPLETED, lambda _: idist.barrier())
        trainer.run(loader, max_epochs=3)
        evaluator.run(loader)
        numbers = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()
        line = {"rank": idist.get_rank(), "size": idist.get_world_size(), "model": idist.model_name(),
                "digest": hashlib.sha256(numbers.tobytes()).hexdigest(), "error": evaluator.state.metrics["error"],
                "gathered": idist.all_gather(idist.get_rank() + 1), "sum": idist.all_reduce(float(local_rank + 1)),
                "told": idist.broadcast("of rank 1" if idist.get_rank() == 1 else None, src=1, safe_mode=True)}
        os.write(1, ("end " + json.dumps(line) + "\\n").encode())

    if __name__ == "__main__":
        with idist.Parallel(backend=backend, **spawned) as parallel:
            parallel.run(training)
"""
RAY = """
    import hashlib, json, os, sys
    import ray, torch
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model

    def training(settings):
        torch.manual_seed(3 + ray.train.get_context().get_world_rank())
        model = prepare_model(torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        for _ in range(3):
            for inputs, targets in prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=8)):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
        numbers = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()
        end = {"backend": torch.distributed.get_backend(), "rank": torch.distributed.get_rank(), "model": type(model).__name__,
               "digest": hashlib.sha256(numbers.tobytes()).hexdigest()}
        with open(os.path.join(settings["folder"], f"{end['backend']}-{end['rank']}"), "w") as file:
            json.dump(end, file)

    if __name__ == "__main__":
        ray.init(num_cpus=3, include_dashboard=False)
        for backend in ("ringtrain", "gloo"):
            TorchTrainer(
                training, train_loop_config={"folder": sys.argv[1]}, torch_config=TorchConfig(backend=backend),
                scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=sys.argv[1]),
            ).fit()
"""


def run(tmp_path: Path, program: str, library: str, *arguments: str, launcher: str = "") -> str:
    script, python = tmp_path / "train.py", python_with_trainers(library)
    script.write_text(textwrap.dedent(program))
    line = {
        "": [python],
        "ringtrainrun": [python, "-m", "ringtrain.launch", *transport_of("tcp"), "-np", "2", python],
        "torchrun": [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    }[launcher]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "ringtrain-horovod")])  # as if both were installed
    # On a busy machine workers come late; and no token is to be left behind.
    ray = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "200", "RAY_AUTH_MODE": "disabled"}
    variables = rank_environment(PYTHONPATH=paths, RINGTRAIN_TRANSPORT="auto", **ray)
    command = [*line, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=tmp_path, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize("backend, launcher", [
    ("ringtrain", "ringtrainrun"), ("ringtrain", "torchrun"), ("ringtrain", ""),
    ("horovod", "ringtrainrun"), ("horovod", ""),
])  # fmt: skip
def test_ignite_equals_gloo(tmp_path: Path, backend: str, launcher: str) -> None:
    """Started by a launcher, or by Ignite itself; its backend "horovod" is ringtrain-horovod."""
    spawned = {} if launcher else {"nproc_per_node": 2}
    said = run(tmp_path, IGNITE, "ignite", backend, json.dumps(spawned), launcher=launcher)
    gloo = run(tmp_path, IGNITE, "ignite", "gloo", "{}", launcher="torchrun")
    ours, theirs = (
        sorted((json.loads(each) for each in re.findall(r"end (\{[^}]*\})", text)), key=lambda end: end["rank"])
        for text in (said, gloo)
    )
    assert [each.pop("model") for each in ours] == [f"{'native' if backend == 'ringtrain' else backend}-dist"] * 2
    assert [each.pop("model") for each in theirs] == ["native-dist"] * 2
    assert [each["size"] for each in ours] == [2, 2] and len({each["digest"] for each in ours}) == 1
    if backend == "ringtrain":
        assert ours == theirs
    else:  # running statistics of batch normalisation are each rank's own, which DDP broadcasts
        assert ours[0]["digest"] == theirs[0]["digest"] and ours[0]["told"] == "of rank 1"


def test_ray_equals_gloo(tmp_path: Path) -> None:
    run(tmp_path, RAY, "ray", str(tmp_path))
    ends = [
        json.loads((tmp_path / f"{backend}-{rank}").read_text()) for backend in ("ringtrain", "gloo") for rank in (0, 1)
    ]
    assert [each["backend"] for each in ends] == ["ringtrain", "ringtrain", "gloo", "gloo"]
    assert {each["model"] for each in ends} == {"DistributedDataParallel"}
    assert len({each["digest"] for each in ends}) == 1
