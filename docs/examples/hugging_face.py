"""A vision transformer of Hugging Face's, made from a configuration, on handwritten digits: own loop or Trainer.

    pip install scikit-learn transformers
    ringtrainrun -np 2 python docs/examples/hugging_face.py
    ringtrainrun -np 2 -x LOCAL_RANK=-1 python docs/examples/hugging_face.py --trainer      # needs accelerate

Trainer takes each rank for a process of its own: it gets the distributed optimizer and the rank's sampler, and whatever
it writes, rank 0 alone must write. Without ``-x LOCAL_RANK=-1``, Accelerate sets up torch.distributed beside ringtrain,
and where there are GPUs wraps the model in DDP. Leave ``use_cpu`` alone: it makes Accelerate do so whatever the variables
say, and gradients are averaged twice.
"""

import argparse
import hashlib

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import ringtrain.torch as hvd

BATCH = 32


def main() -> None:
    options = parse_options()
    hvd.init()
    torch.manual_seed(options.seed)
    training, test = Digits(is_test=False), Digits(is_test=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sampler = hvd.DistributedSampler(training, seed=options.seed)
    train = train_with_trainer if options.trainer else train_in_a_loop
    train(model, optimizer, training, sampler, options.epochs)
    accuracy = accuracy_on_all_ranks(model, test)
    equal = len(set(hvd.allgather_object(digest(model), name="digests"))) == 1
    if hvd.rank() == 0:
        print(f"test accuracy: {accuracy:.4f}; parameters of all ranks are {'equal' if equal else 'NOT EQUAL'}")
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a vision transformer on all ranks.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--trainer", action="store_true", help="let transformers.Trainer do it")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def make_model() -> ViTForImageClassification:
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, num_labels=10,
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    )  # fmt: skip
    return ViTForImageClassification(config)


def train_in_a_loop(model, optimizer, training, sampler, epochs: int) -> None:
    model.train()
    loader = DataLoader(training, BATCH, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
        loss = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f} of all ranks")


def train_with_trainer(model, optimizer, training, sampler, epochs: int) -> None:
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    arguments = TrainingArguments(
        num_train_epochs=epochs, per_device_train_batch_size=BATCH, report_to="none", disable_tqdm=hvd.rank() != 0,
        save_strategy="no",  # on rank 0 alone it may be another
    )  # fmt: skip
    ShardTrainer(
        model=model, args=arguments, train_dataset=training, optimizers=(optimizer, schedule), sampler=sampler
    ).train()


class ShardTrainer(Trainer):
    """A Trainer that reads this rank's share."""

    def __init__(self, *, sampler: hvd.DistributedSampler, **arguments):
        super().__init__(**arguments)
        self.sampler = sampler

    def _get_train_sampler(self, *_) -> hvd.DistributedSampler:
        return self.sampler


class Digits(Dataset):
    """1,797 images of 8 x 8 pixels, every sixth for the test, in the form that the model takes."""

    def __init__(self, is_test: bool):
        digits = load_digits()
        chosen = (torch.arange(len(digits.target)) % 6 == 0) == is_test
        self.images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[chosen] / 16
        self.labels = torch.tensor(digits.target)[chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


@torch.no_grad()
def accuracy_on_all_ranks(model: ViTForImageClassification, test: Digits) -> float:
    """Each rank counts on its share, of which no sample is read twice; the counts are added up."""
    model.eval()
    batch = test[hvd.shard(len(test), "uneven", seed=None)]
    right = (model(**batch).logits.argmax(1) == batch["labels"]).sum()
    counts = hvd.allreduce(torch.stack([right, torch.tensor(len(batch["labels"]))]), name="accuracy", op=hvd.Sum)
    return (counts[0] / counts[1]).item()


def digest(model: ViTForImageClassification) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()


if __name__ == "__main__":
    main()
