"""Local steps, for a network that is too slow for gradients: ranks train alone, and average every eight steps.

    ringtrainrun -np 2 python docs/examples/local_steps.py

A synchronisation sends what has changed, in 8 bits, so a step sends 1/32 of the bytes of its gradients.
"""

import torch

import ringtrain as rt
import ringtrain.torch as hvd


def main() -> None:
    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.003),
        model.named_parameters(),
        compression=hvd.Compression.int8,
        mode=hvd.LocalSteps(every=8, warmup=40, named_buffers=model.named_buffers()),  # 40 exact steps first
    )
    random = torch.Generator().manual_seed(1 + hvd.rank())  # other samples on each rank
    for step in range(1, 201):
        x = torch.randn(64, 16, generator=random)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), height(x))
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"step {step}: loss {mean:.4f}")

    optimizer.synchronize()  # on all ranks, before the model is evaluated or saved
    model.eval()
    if hvd.rank() == 0:
        x = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))
        error = torch.nn.functional.mse_loss(model(x), height(x)).item()
        print(f"test loss {error:.4f}, {rt.counters()['synchronisations']} synchronisations")
    hvd.shutdown()


def height(x: torch.Tensor) -> torch.Tensor:
    """What is to be learnt of a vector."""
    return x[:, :4].sum(1, keepdim=True).sin()


if __name__ == "__main__":
    main()
