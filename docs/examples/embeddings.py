"""Factors of users and films in tables whose rows are dealt over the ranks.

    ringtrainrun -np 2 python docs/examples/embeddings.py

No rank holds a whole table. A step fetches the rows that its samples need, and sends their gradients back.
"""

import torch

import ringtrain.torch as hvd

USERS, FILMS, WIDTH = 400, 200, 8


class Ratings(torch.nn.Module):
    """The rating is the product of two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = hvd.ShardedEmbeddingCollection(  # both travel together
            {"user": hvd.ShardedEmbedding(USERS, WIDTH, seed=1, scale=0.3),
             "film": hvd.ShardedEmbedding(FILMS, WIDTH, seed=2, scale=0.3)}
        )  # fmt: skip

    def forward(self, users: torch.Tensor, films: torch.Tensor) -> torch.Tensor:
        rows = self.tables({"user": users, "film": films})
        return (rows["user"] * rows["film"]).sum(1)


def main() -> None:
    hvd.init()
    tastes = torch.randn(USERS, 2, generator=torch.Generator().manual_seed(3))  # the same on all ranks
    themes = torch.randn(FILMS, 2, generator=torch.Generator().manual_seed(4))
    random = torch.Generator().manual_seed(5 + hvd.rank())  # other samples on each rank

    model = Ratings()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.3)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(1, 201):
        users = torch.randint(USERS, (256,), generator=random)
        films = torch.randint(FILMS, (256,), generator=random)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(users, films), (tastes[users] * themes[films]).sum(1))
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"step {step}: loss {mean:.4f}")

    rows = sum(len(parameter) - 1 for parameter in model.parameters())  # the last one of each is spare
    print(f"rank {hvd.rank()} holds {rows} rows of {USERS + FILMS}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
