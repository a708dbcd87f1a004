"""What the manual's programs compute on two ranks is what one process computes with the batches of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from test_docs import blocks, run_on_two_ranks, versions

# Programs that a test puts between those of a page.
NOTES_BATCHES = """
class _Noted:
    def __iter__(self):
        for batch in _loader:
            seen.append(batch)
            yield batch
_loader, seen = loader, []
loader = _Noted()
"""


def notes(name: str, model: str = "model") -> str:
    """Keeps a copy of a model under a name."""
    return f"import copy\n{name} = copy.deepcopy({model})\n"


def halves(program: str, line: str) -> list[str]:
    """A program before a line, and from there on."""
    before, found, after = program.partition(f"\n{line}")
    assert found, f"{line!r} is not in the page"
    return [f"{before}\n", f"{line}{after}"]


def take_steps(
    models: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer, batches: Sequence[Sequence[Any]],
    backward: Callable[[torch.nn.Module, Any], None], step: Callable[[], Any],
) -> None:  # fmt: skip
    """Updates the first model by the mean gradients of all, each on its own batches, and gives the others its parameters.

    Buffers, as of BatchNorm, stay those of each.
    """
    for of_step in zip(*batches, strict=True):
        for model, batch in zip(models, of_step, strict=True):
            model.zero_grad()
            backward(model, batch)
        for mine, *others in zip(*(model.parameters() for model in models), strict=True):
            mine.grad = sum((each.grad for each in others), mine.grad) / len(models)
        step()
        for mine, *others in zip(*(model.parameters() for model in models), strict=True):
            for each in others:
                each.data.copy_(mine.data)


def assert_close(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def cross_entropy(model: torch.nn.Module, batch: Any) -> None:
    torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def test_training() -> None:
    page = blocks("training.md", "python")
    places = {text: next(n for n, block in enumerate(page) if text in block) for text in (
        "loader = ", "for epoch in range(2)", "with optimizer.skip_synchronize()", "model_in_shares = ",
    )}  # fmt: skip
    loader, loop, longer, shares = places.values()
    ranks = run_on_two_ranks(
        *page[: loader + 1],
        NOTES_BATCHES + notes("begin"),
        *page[loader + 1 : loop + 1],
        notes("after_loop") + "of_loop, seen[:] = list(seen), []\n",
        *page[loop + 1 : longer + 1],
        notes("after_longer"),
        *page[longer + 1 : shares],
        *(part for part in _around(page[shares], "for x, y in loader:", notes("shares_begin", "model_in_shares"))),
        page="training.md",
    )
    models = [rank["begin"] for rank in ranks]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=2 * 0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: (1 + min(update / 500, 1)) / 2)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
        optimizer.step()

    of_loop = [rank["of_loop"] for rank in ranks]
    take_steps(models, optimizer, of_loop, cross_entropy, lambda: (step(), schedule.step()))
    assert_close(ranks[0]["after_loop"], models[0])
    take_steps(models, optimizer, [batches[-1:] for batches in of_loop], cross_entropy, step)
    assert_close(ranks[0]["after_longer"], models[0])

    models = [rank["shares_begin"] for rank in ranks]
    optimizer = torch.optim.AdamW(models[0].parameters(), lr=0.01)
    take_steps(models, optimizer, [rank["seen"] for rank in ranks], cross_entropy, step)
    assert_close(ranks[0]["model_in_shares"], models[0])


def _around(program: str, line: str, between: str) -> list[str]:
    before, after = halves(program, line)
    return [before, between, after]


def test_accumulation() -> None:
    start, fixed, block = blocks("accumulation.md", "python")
    ranks = run_on_two_ranks(start, notes("begin"), fixed, notes("after_fixed"), block, page="accumulation.md")
    models, batches = [rank["begin"] for rank in ranks], [rank["batches"] for rank in ranks]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)

    def passes(divisor: int) -> Callable[[torch.nn.Module, Any], None]:
        def backward(model: torch.nn.Module, of_step: Any) -> None:
            for x, y in of_step:
                (torch.nn.functional.cross_entropy(model(x), y) / divisor).backward()

        return backward

    fours = [[each[0:4], each[4:8], each[8:10]] for each in batches]
    take_steps(models, optimizer, fours, passes(4), optimizer.step)
    assert_close(ranks[0]["after_fixed"], models[0])
    take_steps(models, optimizer, [[each] for each in batches], passes(10), optimizer.step)
    assert_close(ranks[0]["model"], models[0])


def test_from_ddp() -> None:
    program = versions(blocks("migrate-from-ddp.md", "diff")[0])[1]
    ranks = run_on_two_ranks(
        *_around(program, "for epoch in range(2):", NOTES_BATCHES + notes("begin")), page="migrate-from-ddp.md"
    )
    models = [rank["begin"] for rank in ranks]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)

    def backward(model: torch.nn.Module, batch: Any) -> None:
        for part in (slice(4), slice(4, None)):
            cross_entropy(model, [each[part] for each in batch])

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
        optimizer.step()

    take_steps(models, optimizer, [rank["seen"] for rank in ranks], backward, step)
    assert_close(ranks[0]["model"], models[0])


def test_from_horovod() -> None:
    program = versions(blocks("migrate-from-horovod.md", "diff")[0])[1]
    ranks = run_on_two_ranks(
        *_around(program, "scaler = ", NOTES_BATCHES + notes("begin")), page="migrate-from-horovod.md"
    )
    models = [rank["begin"] for rank in ranks]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=2 * 0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")

    def backward(model: torch.nn.Module, batch: Any) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        scaler.scale(loss).backward()

    take_steps(
        models, optimizer, [rank["seen"] for rank in ranks], backward, lambda: (scaler.step(optimizer), scaler.update())
    )
    assert scaler.get_scale() == ranks[0]["scaler"].get_scale()
    assert_close(ranks[0]["model"], models[0])


ROWS, WIDTH = 50, 4


def test_embeddings(tmp_path: Path) -> None:
    """With fewer rows than the page's; what the pieces of the page leave out stands here."""
    table, loop, files = blocks("embeddings.md", "python")[:3]
    small = table.replace("100_000_000, 64", f"{ROWS}, {WIDTH}").replace("Linear(64, 1)", f"Linear({WIDTH}, 1)")
    given = f"""
rank = hvd.rank()
drawn = torch.Generator().manual_seed(rank)
loader = [
    (torch.randint({ROWS}, (8,), generator=drawn), torch.randn(8, generator=drawn)) for _ in range(2 + rank)
]
loss_of_each = lambda found, labels: (found.squeeze(-1) - labels) ** 2
begin = copy.deepcopy(dense)
hvd.save_tables(first, model)
rows = hvd.plain_weight(first, "0")
"""
    after = "hvd.save_tables(last, model)\ntrained = hvd.plain_weight(last, '0')\n"
    folders = [tmp_path / name for name in ("first", "last", "dense")]
    for each in folders:
        each.mkdir()
    prepare = f"import copy, torch\nfirst, last, folder = {list(map(str, folders))!r}\n"
    ranks = run_on_two_ranks(prepare, small, given, loop, after, _behind_a_barrier(files), page="embeddings.md")
    plain = torch.nn.Embedding.from_pretrained(torch.as_tensor(ranks[0]["rows"]).clone(), freeze=False)
    model = torch.nn.Sequential(plain, ranks[0]["begin"])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    for step in range(3):
        model.zero_grad()
        for rank in ranks:
            for ids, labels in rank["loader"][step : step + 1]:
                (((model(ids).squeeze(-1) - labels) ** 2).sum() / 256 / 2).backward()
        optimizer.step()
    for rank in ranks:
        torch.testing.assert_close(torch.as_tensor(rank["trained"]), plain.weight.detach(), rtol=1e-4, atol=1e-6)
        assert_close(rank["model"][1], model[1])


def _behind_a_barrier(program: str) -> str:
    """The part that saves, and that which loads, which other programs run."""
    saves, loads = program.split("\ndense, options")
    return f"{saves}\nimport ringtrain\nringtrain.barrier()\ndense, options{loads}"
