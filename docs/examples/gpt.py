"""A small GPT on the texts of Python's own help, with gradient accumulation, clipping, warm-up and checkpoints.

    ringtrainrun -np 2 python docs/examples/gpt.py --steps 200 --save-every 50
    ringtrainrun -np 2 python docs/examples/gpt.py --steps 200 --resume checkpoint-50.pt

A run that resumes ends with the same bits as one that was never interrupted: the checkpoint holds the place within the
epoch, and the random state of each rank, which dropout draws from. Everything else is equal on all ranks.
"""

import argparse
import hashlib
import os
import pydoc_data.topics

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import ringtrain.torch as hvd

CONTEXT = 64
PASSES = 2  # backward passes in a step
WARM_UP = 20  # steps


def main() -> None:
    options = parse_options()
    hvd.init()
    torch.manual_seed(options.seed + hvd.rank())  # dropout differs between ranks; the broadcast makes the rest equal
    text = Text()
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=PASSES)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    sampler = hvd.DistributedSampler(text, policy="truncate", seed=options.seed)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": sampler}
    step = resume(options.resume, parts) if options.resume else 0
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # A generator of its own: the loader draws a seed at each start, and would take it from the dropout's random
    # numbers.
    loader = DataLoader(text, batch_size=8, sampler=sampler, drop_last=True, generator=torch.Generator())
    batches = endless(loader, sampler)
    while step < options.steps:
        loss = train_step(model, optimizer, batches)
        schedule.step()
        step += 1
        if step % 10 == 0:
            mean = hvd.allreduce(loss, name="loss").item()
            if hvd.rank() == 0:
                print(f"step {step}: loss {mean:.4f} of all ranks, learning rate {schedule.get_last_lr()[0]:.2g}")
        if options.save_every and step % options.save_every == 0:
            save(f"{options.folder}/checkpoint-{step}.pt", parts, step)
    if hvd.rank() == 0:
        print(f"parameters after step {step}: {digest(model)}")
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small GPT on all ranks.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS")
    parser.add_argument("--folder", default=".", help="where checkpoints go")
    parser.add_argument("--resume", metavar="FILE", help="a checkpoint to go on from")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


# ---- one step ----


def train_step(model: "GPT", optimizer: torch.optim.Optimizer, batches) -> torch.Tensor:
    """Nothing travels before the last backward pass, which returns with the mean over ranks: that is what is clipped."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for _ in range(PASSES):
        tokens = next(batches)
        scores = model(tokens[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()) / PASSES
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def endless(loader: DataLoader, sampler: hvd.DistributedSampler):
    """Batches of epoch after epoch, from the sampler's place on."""
    while True:
        yield from loader
        sampler.set_epoch(sampler.epoch + 1)


# ---- checkpoints ----


def save(path: str, parts: dict, step: int) -> None:
    """Rank 0 writes what is equal on all ranks, and what is not, of all of them."""
    random_states = hvd.allgather_object(torch.get_rng_state(), name="random states")
    if hvd.rank() == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, "step": step, "random_states": random_states}, f"{path}.growing")
        os.replace(f"{path}.growing", path)  # whole, whenever the job ends


def resume(path: str, parts: dict) -> int:
    """Rank 0 reads the file, which need not be on the others' disks; returns the step to go on from."""
    states = hvd.broadcast_object(torch.load(path) if hvd.rank() == 0 else None, root_rank=0)
    for name, part in parts.items():
        part.load_state_dict(states[name])
    if len(states["random_states"]) == hvd.size():  # with another number of ranks the order of samples still goes on
        torch.set_rng_state(states["random_states"][hvd.rank()])
    return states["step"]


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()[:16]


# ---- text and model ----


class Text(Dataset):
    """The help texts as bytes, cut into windows of CONTEXT + 1 tokens."""

    def __init__(self):
        topics = pydoc_data.topics.topics
        text = "".join(topics[name] for name in sorted(topics)).encode()
        count = len(text) // (CONTEXT + 1)
        self.windows = torch.frombuffer(bytearray(text[: count * (CONTEXT + 1)]), dtype=torch.uint8).view(count, -1)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.windows[index].long()


class Block(nn.Module):
    """Attention to what came before, then a small network for each token; both added to what comes in."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.queries_keys_values(self.before_attention(x)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.mix(attended))
        return x + self.dropout(self.network(self.before_network(x)))


class GPT(nn.Module):
    """Scores (batch, length, 256) of the byte that follows each of the bytes (batch, length)."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, dropout: float = 0.1):
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight  # shared, as in GPT-2

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


if __name__ == "__main__":
    main()
