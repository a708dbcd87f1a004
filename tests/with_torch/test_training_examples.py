"""The README's example does what the README says, as it stands there."""

import re
from pathlib import Path

import torch
from torch_models import assert_replicas_equal, batches, network, parameters, share

ROOT = Path(__file__).parents[2]


def readme_example() -> str:
    """The first block of Python in the README."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found, "README.md has no Python example"
    return found[1]


def test_readme_example_trains(world):
    code = compile(readme_example(), "README.md", "exec")
    lines = [line for line in readme_example().splitlines() if line.strip()]
    assert len(lines) <= 12

    def make_loader(rank, size):
        for x, y in batches(size):
            yield share((x, y.argmax(1)), rank, size)

    models = {rank: network() for rank in range(world.size)}

    def on_rank(rank):
        before = parameters(models[rank])
        exec(code, {"make_model": lambda: models[rank], "make_loader": make_loader})
        after = parameters(models[rank])
        assert_replicas_equal(after)
        assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))

    world.run(on_rank)
