"""``op=PerItem``: losses are sums over tokens, and ranks and passes have different numbers of them."""

import copy

import pytest
import torch
from refusals import said_alike
from torch import nn

import ringtrain.torch as hvd
from ringtrain.errors import InvalidArgumentError
from ringtrain.testing import World

STEPS, PASSES, BATCH, LONGEST, WORDS = 3, 2, 3, 9, 11
PADDING = -100


class SmallGpt(nn.Module):
    """Words and places, one block with causal attention, and the next word."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Parameter(torch.randn(LONGEST, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, WORDS)
        self.double()

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(LONGEST, dtype=torch.float64)
        return self.out(self.block(self.words(x) + self.places, mask, is_causal=True))


torch.manual_seed(0)
START = SmallGpt()  # ranks are threads, which share torch's generator


def batch(rank, step, turn):
    """Sentences and their next words, padded: of lengths that differ among ranks, passes and steps."""
    source = torch.Generator().manual_seed(1000 * rank + 10 * step + turn)
    x = torch.randint(WORDS, (BATCH, LONGEST), generator=source)
    y = torch.randint(WORDS, (BATCH, LONGEST), generator=source)
    lengths = torch.randint(1, LONGEST + 1 if rank else 4, (BATCH,), generator=source)
    y[torch.arange(LONGEST) >= lengths[:, None]] = PADDING
    return x, y


def loss_of(model, x, y, reduction="sum"):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PADDING, reduction=reduction)


def tokens(y):
    return int((y != PADDING).sum())


def trained(rank, wraps=lambda optimizer, model: optimizer, has_none=lambda rank, step: False):
    model = copy.deepcopy(START)
    optimizer = wraps(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for turn in range(PASSES):
            x, y = batch(rank, step, turn)
            if has_none(rank, step):
                optimizer.count(0)
                continue
            optimizer.count(tokens(y))
            loss_of(model, x, y).backward()
        optimizer.step()
    if hasattr(optimizer, "flush"):
        optimizer.flush()
    return [each.detach().clone() for each in model.parameters()]


def in_one_process(size, has_none=lambda rank, step: False):
    """The mean over the tokens of all ranks and passes."""
    model = copy.deepcopy(START)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        own = [batch(r, step, turn) for r in range(size) for turn in range(PASSES) if not has_none(r, step)]
        x, y = (torch.cat(part) for part in zip(*own, strict=True))
        loss_of(model, x, y, "mean").backward()
        optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def per_item(**given):
    return lambda optimizer, model: hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=PASSES, op=hvd.PerItem, **given
    )


def require_near(found, expected, most=1e-12):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=most)


@pytest.mark.parametrize("size, layout", [(1, None), (2, None), (3, None), (2, "1+1")], ids=str)
def test_ranks_equal_one_process_over_all_tokens(size, layout):
    with World(size, layout) as world:
        ranks = world.run(trained, per_item())
    for each in ranks[1:]:
        require_near(each, ranks[0], most=0)
    require_near(ranks[0], in_one_process(size))


def test_an_average_of_means_is_another_thing():
    """What is common, and why there is ``PerItem``: the loss is a mean over the rank's own tokens."""

    def averaged(rank):
        model = copy.deepcopy(START)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            model.named_parameters(),
            backward_passes_per_step=PASSES,
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            for turn in range(PASSES):
                x, y = batch(rank, step, turn)
                (loss_of(model, x, y, "mean") / PASSES).backward()
            optimizer.step()
        return [each.detach().clone() for each in model.parameters()]

    with World(2) as world:
        found = world.run(averaged)[0]
    apart = max(float((mine - theirs).abs().max()) for mine, theirs in zip(found, in_one_process(2), strict=True))
    assert apart > 1e-3


def test_a_rank_without_an_item_counts_zero():
    def has_none(rank, step):
        return rank == 1 and step % 2 == 1

    with World(2) as world:
        ranks = world.run(trained, per_item(), has_none)
    require_near(ranks[0], in_one_process(2, has_none))
    require_near(ranks[1], ranks[0], most=0)


@pytest.mark.parametrize("given", [{"groups": 2}, {"mode": "shares"}, {"mode": "buckets"}], ids=str)
def test_it_goes_with_other_options(given):
    def wraps(optimizer, model):
        modes = {"shares": hvd.ShardedStep(model), "buckets": hvd.Synchronous(gradient_as_bucket_view=True)}
        options = {**given, "mode": modes[given["mode"]]} if "mode" in given else given
        return per_item(**options)(optimizer, model)

    with World(2) as world:
        ranks = world.run(trained, wraps)
    require_near(ranks[0], in_one_process(2))


def test_sparse_gradients_are_means_over_items():
    def rows(rank):
        table = nn.Embedding(6, 2, sparse=True).double()
        nn.init.ones_(table.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), op=hvd.PerItem)
        optimizer.count(3 - rank)
        table(torch.tensor([0, 1, 1][rank:])).sum().backward()
        optimizer.step()
        return table.weight.detach()[:2, 0].tolist()

    with World(2) as world:
        assert world.run(rows) == [[1 - 1 / 5, 1 - 4 / 5]] * 2


@pytest.mark.parametrize("layout", [None, "1+1"], ids=str)
@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16], ids=["fp16", "bf16"])
def test_sums_over_many_items_have_room_in_16_bits(compression, layout):
    def step(rank):
        weight = nn.Parameter(torch.zeros(8))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.PerItem, compression=compression)
        items = 90_000 + 20_000 * rank
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.count(items)
            (weight * items).sum().backward()
            optimizer.step()
        return weight.tolist()

    with World(2, layout) as world:
        assert world.run(step) == [pytest.approx([-2.0] * 8, rel=1e-2)] * 2


MODES = {
    "Synchronous": hvd.Synchronous,
    "ShardedStep": hvd.ShardedStep,
    "LocalSteps": lambda: hvd.LocalSteps(every=1),
    "exact at the beginning": lambda: hvd.LocalSteps(every=2, warmup=2),
    "exact within a host": lambda: hvd.LocalSteps(every=1, within="host"),
}


@pytest.mark.parametrize("layout", ["4", "2+2"])
@pytest.mark.parametrize("mode", MODES)
def test_means_over_different_numbers_of_samples_are_weighed(mode, layout):
    def step(rank):
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), mode=MODES[mode]())
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.arange(float(1 + rank), dtype=torch.float64)
            optimizer.count_samples(len(x))
            ((weight - x) ** 2).mean().backward()
            optimizer.step()
        return weight.item()

    with World(4, None if layout == "4" else layout) as world:
        assert world.run(step) == [pytest.approx(1.0)] * 4  # the mean of 0, 0, 1, 0, 1, 2, 0, 1, 2 and 3


def test_a_closure_has_the_mean_loss():
    def losses(rank):
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), op=hvd.PerItem)
        x = torch.arange(3.0 if rank else 2.0, dtype=torch.float64)

        def closure():
            optimizer.zero_grad()
            loss = ((weight - x) ** 2).sum()
            optimizer.count(len(x))
            loss.backward()
            return loss

        return float(optimizer.step(closure)), weight.item()

    with World(2) as world:
        assert world.run(losses) == [(6 / 5, 4 / 5)] * 2


@pytest.mark.parametrize("sums", [True, False], ids=["items", "samples"])
def test_what_is_counted_before_a_closure_is_of_each_evaluation(sums):
    x = [torch.arange(2.0, dtype=torch.float64), torch.arange(3.0, 8.0, dtype=torch.float64)]

    def searched(wraps, x):
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = wraps(torch.optim.LBFGS([weight], max_iter=6, lr=0.3))
        for _ in range(2):
            if isinstance(optimizer, torch.optim.LBFGS) and hasattr(optimizer, "count"):
                (optimizer.count if sums else optimizer.count_samples)(len(x))

            def closure():
                optimizer.zero_grad()
                loss = (weight - x) ** 4
                loss = loss.sum() if sums and hasattr(optimizer, "count") else loss.mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        return weight.item()

    op = hvd.PerItem if sums else hvd.Average
    with World(2) as world:
        found = world.run(lambda rank: searched(lambda o: hvd.DistributedOptimizer(o, op=op), x[rank]))
    assert found == [pytest.approx(searched(lambda o: o, torch.cat(x)), abs=1e-12)] * 2


@pytest.mark.parametrize("sums", [True, False], ids=["items", "samples"])
@pytest.mark.parametrize("mode", [hvd.Synchronous, hvd.ShardedStep], ids=str)
def test_a_batch_that_is_given_up_before_its_pass_does_not_count(mode, sums):
    def steps(rank):
        weight = nn.Parameter(torch.ones(2))
        op = hvd.PerItem if sums else hvd.Average
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=op, mode=mode())
        count = optimizer.count if sums else optimizer.count_samples
        for _ in range(2):
            optimizer.zero_grad()
            count(7)
            optimizer.zero_grad()
            count(1 + rank)
            (weight * ((3.0 if sums else 1.0) + rank)).sum().backward()
            optimizer.step()
        return weight.tolist()

    gradient = (3 + 4) / 3 if sums else (1 * 1 + 2 * 2) / 3
    with World(2) as world:
        assert world.run(steps) == [pytest.approx([1 - 2 * gradient] * 2)] * 2


def test_an_overflow_on_one_rank_skips_the_step_and_its_count():
    def steps(rank):
        weight = nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.PerItem)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (float("inf") if rank else 1.0, 1.0):
            optimizer.zero_grad()
            optimizer.count(1 + rank)
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return weight.tolist()

    with World(2) as world:
        assert world.run(steps) == [pytest.approx([1 - 2 / 3] * 2)] * 2


def add_a_group(optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


BETWEEN = {
    "counted, then set to zero": lambda o, count: (count(), o.zero_grad()),
    "set to zero with the module, then counted": lambda o, count: (
        o.param_groups[0]["params"][0].grad.zero_(),
        count(),
    ),
    "a group is added": lambda o, count: (add_a_group(o), o.zero_grad(), count()),
    "counted, then a group is added": lambda o, count: (count(), add_a_group(o), o.zero_grad()),
    "counted, then a state is loaded": lambda o, count: (count(), o.load_state_dict(copy.deepcopy(o.state_dict()))),
    "gradients are gone": lambda o, count: (setattr(o.param_groups[0]["params"][0], "grad", None), count()),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_items_of_a_skipped_step_do_not_count_in_the_next_one(between):
    def steps(rank):
        weight = nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.PerItem)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def backward(factor):
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        optimizer.count(10)
        backward(float("inf"))
        BETWEEN[between](optimizer, lambda: optimizer.count(1 + rank))
        weight.grad = None
        backward(1.0)
        return weight.tolist()

    with World(2) as world:
        assert world.run(steps) == [pytest.approx([1 - 2 / 3] * 2)] * 2


def test_items_that_were_counted_before_a_new_world_are_forgotten():
    def counted(rank):
        weight = nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.PerItem)
        optimizer.count(10)
        return weight, optimizer

    def step(rank):
        weight, optimizer = before[rank]
        optimizer.count(1 + rank)
        weight.sum().backward()
        optimizer.step()
        return weight.tolist()

    with World(2) as world:
        before = world.run(counted)
    with World(2) as world:
        assert world.run(step) == [pytest.approx([1 - 2 / 3] * 2)] * 2


@pytest.mark.parametrize("zeroes", ["never", "none", "zeros"])
def test_a_step_without_zeros_before_it_is_warned_of_once(zeroes, caplog):
    def steps(rank):
        weight = nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.PerItem)
        for _ in range(3):
            if zeroes != "never":
                optimizer.zero_grad(set_to_none=zeroes == "none")
            optimizer.count(1)
            weight.sum().backward()
            optimizer.step()

    with World(2) as world:
        world.run(steps)
    told = [each for each in caplog.messages if "expected gradients to be set to zero after step()" in each]
    assert len(told) == (2 if zeroes == "never" else 0)


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_gradients_of_shares_are_clipped_by_the_norm_of_all(p):
    def clipped(rank, mode, clip):
        weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), mode=mode())
        (weight * (1.0 + rank)).pow(2).sum().backward()
        norm = clip([weight], 0.1, norm_type=p)
        optimizer.step()
        return float(norm), weight.tolist()

    with World(2) as world:
        expected = world.run(clipped, hvd.Synchronous, torch.nn.utils.clip_grad_norm_)
        assert world.run(clipped, hvd.ShardedStep, hvd.clip_grad_norm_) == expected


def test_a_step_without_any_item_has_sums():
    def step(rank):
        weight = nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.PerItem)
        weight.grad = torch.zeros(2)
        optimizer.count(0)
        (weight * 0.0).sum().backward()
        optimizer.step()
        return weight.tolist()

    with World(2) as world:
        assert world.run(step) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("forgets", [(0, 1), (1,)], ids=str)
def test_who_forgets_to_count_is_told_on_all_ranks(forgets):
    def step(rank):
        weight = nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.PerItem)
        if rank not in forgets:
            optimizer.count(2)
        with pytest.raises(InvalidArgumentError) as caught:
            weight.sum().backward()
            optimizer.step()
        return str(caught.value)

    with World(2, stall_abort_seconds=20) as world:
        one, other = world.run(step)
    assert said_alike([one, other]) and "an optimizer gets it by count() before each backward pass" in one
    assert forgets != (1,) or "Found on rank 1." in one


def test_bad_counts():
    with World(2) as world:

        def on_rank(rank):
            weight = nn.Parameter(torch.ones(2))
            plain = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
            with pytest.raises(InvalidArgumentError, match="count: the optimizer must have op=PerItem"):
                plain.count(2)
            counting = hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0), op=hvd.PerItem)
            for wrong in (1.5, "3", True, -1):
                with pytest.raises(InvalidArgumentError, match="items of count"):
                    counting.count(wrong)

        world.run(on_rank)
