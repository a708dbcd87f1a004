"""``LocalSteps(every=H, fragments=P, overlap=D)``: parts of the parameters that travel while training goes on."""

import copy
import io

import numpy as np
import pytest
import torch
from local_steps_by_hand import streaming_by_hand
from modes import in_mode
from torch_models import assert_all_close, assert_same_bits, batches, network, parameters, sgd, share, train

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain.errors import InvalidArgumentError
from ringtrain.testing import World

STEPS = 11
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def adam(arguments):
    return torch.optim.AdamW(arguments, lr=0.01)


def streaming(model, make=sgd, **arguments):
    model = copy.deepcopy(model)
    return model, hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **in_mode(arguments))


def run(model, make, data, rank, ranks, **arguments):
    """A rank's parameters after each step, and after a last ``synchronize``."""
    mine, optimizer = streaming(model, make, **arguments)
    seen = []
    for batch in data:
        train(mine, optimizer, [share(batch, rank, ranks)])
        seen.append(parameters(mine))
    optimizer.synchronize()
    return seen, parameters(mine)


METHODS = {
    "fragments": (sgd, {"every": 4, "fragments": 3}),
    "overlap": (adam, {"every": 3, "overlap": 2}),
    "Streaming DiLoCo": (adam, {"every": 5, "fragments": 2, "overlap": 3, "merge": "half", "outer": hvd.Outer(0.4, 0.9)}),
    "DiLoCo, additive": (sgd, {"every": 4, "fragments": 4, "overlap": 2, "outer": hvd.Outer(0.7, 0.9)}),
}  # fmt: skip


@pytest.mark.parametrize(
    "method",
    [pytest.param(each, marks=pytest.mark.long if each in ("fragments", "overlap") else ()) for each in METHODS],
)
def test_ranks_are_the_oracle_after_each_step(method):
    make, arguments = METHODS[method]
    model, data = network(torch.float64), batches(3, torch.float64, STEPS)
    expected = streaming_by_hand(model, make, data, 3, **arguments)
    with World(3, "2+1") as world:
        found = world.run(lambda rank: run(model, make, data, rank, 3, **arguments))
    for rank, (seen, last) in enumerate(found):
        for mine, theirs in zip(seen, expected, strict=True):
            assert_all_close(mine, theirs[rank], **CLOSE)
        assert_same_bits(last, found[0][1])


def resumed(model, optimizer, make, start, **arguments):
    """A new model and optimizer that go on from the files of others."""
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    model, optimizer = streaming(start, make, **arguments)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return model, optimizer


def test_a_resumed_run_has_the_bits_of_one_that_was_never_interrupted():
    """Saved with a fragment on its way."""
    model, data = network(), batches(2, steps=8)
    arguments = {"every": 4, "fragments": 2, "overlap": 3, "merge": "half", "outer": hvd.Outer(0.4, 0.9)}

    def on_rank(rank, stop):
        mine, optimizer = streaming(model, adam, **arguments)
        for step, batch in enumerate(data):
            if step == stop:
                assert optimizer.state_dict()["local_steps"]["fragments"]["flights"]
                mine, optimizer = resumed(mine, optimizer, adam, network(), **arguments)
            train(mine, optimizer, [share(batch, rank, 2)])
        optimizer.synchronize()
        return parameters(mine)

    with World(2) as world:
        whole, again = world.run(on_rank, None), world.run(on_rank, 5)
    assert_same_bits(whole[0], whole[1])
    assert_same_bits(whole[0], again[0])


def test_what_compression_has_lost_of_a_fragment_on_its_way_can_be_saved():
    """Saved in each round; what has been lost is made up for only where that is loaded too."""

    def off_by(rank, loads, rounds=12):
        weight = torch.nn.Linear(8192, 1, bias=False).double()
        torch.nn.init.zeros_(weight.weight)
        arguments = {"every": 2, "overlap": 1, "compression": hvd.Compression.int4}
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(weight.parameters(), 1.0), weight.named_parameters(), **in_mode(arguments)
        )
        own = torch.from_numpy(np.random.default_rng(rank).standard_normal(8192))
        for step in range(2 * rounds):
            if step % 2 == 0 and step:
                kept = optimizer.compression_state()
                weight, optimizer = resumed(
                    weight, optimizer, lambda given: torch.optim.SGD(given, 1.0), weight, **arguments
                )
                if loads:
                    optimizer.load_compression_state(kept)
            weight.weight.grad = own[None].clone()
            optimizer.step()
        optimizer.synchronize()
        exact = -2 * rounds * hvd.allreduce(own, name=f"exact.{loads}")
        return ((weight.weight[0] - exact).norm() / exact.norm()).item()

    with World(2, "1+1") as world:
        loading, forgetting = (world.run(off_by, each)[0] for each in (True, False))
    assert loading < forgetting / 4 and forgetting > 0.02


def test_all_ranks_begin_with_what_the_root_has_on_its_way():
    model, data = network(), batches(2, steps=9)

    def on_rank(rank):
        mine, optimizer = streaming(model, adam, every=4, overlap=3)
        for step, batch in enumerate(data):
            if step == 5:
                hvd.broadcast_parameters(mine.state_dict(), 1)
                hvd.broadcast_optimizer_state(optimizer, 1)
                state = optimizer.state_dict()["local_steps"]["fragments"]
                assert [each["left"] for each in state["flights"]] == [4]
            train(mine, optimizer, [share(batch, rank, 2)])
        optimizer.synchronize()
        return parameters(mine)

    with World(2) as world:
        found = world.run(on_rank)
    assert_same_bits(found[0], found[1])


def test_buffers_wait_for_all_parameters():
    """They do nothing before the model is evaluated."""

    def on_rank(rank):
        weight, count, mean = torch.nn.Parameter(torch.zeros(2)), torch.tensor(rank), torch.tensor([float(rank)])
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], 1.0),
            [("w", weight)],
            mode=hvd.LocalSteps(every=2, overlap=1, named_buffers=[("count", count), ("mean", mean)]),
        )
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            (weight.sum() * (rank + 1)).backward()
            optimizer.step()
            seen.append((weight[0].item(), count.item(), mean.item()))
        optimizer.synchronize()
        return seen, (weight[0].item(), count.item(), mean.item())

    with World(2) as world:
        found = world.run(on_rank)
    assert [seen for seen, _ in found] == [
        [(-1.0, 0, 0.0), (-2.0, 0, 0.0), (-4.0, 0, 0.0)],  # the third step merges -3 with a step of -1
        [(-2.0, 1, 1.0), (-4.0, 1, 1.0), (-5.0, 1, 1.0)],
    ]
    assert [last for _, last in found] == [(-4.5, 1, 0.5)] * 2


def test_sixteen_bit_parameters_merge_in_float32():
    def on_rank(rank):
        weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], 2.0**-8), [("w", weight)], mode=hvd.LocalSteps(every=2, overlap=1)
        )
        for _ in range(4):
            optimizer.zero_grad()
            (weight.sum() * (1.0 if rank == 0 else 0.0)).backward()
            optimizer.step()
        optimizer.synchronize()
        return weight.tolist()

    with World(2) as world:
        assert world.run(on_rank) == [[1 - 2.0**-7] * 4] * 2


def test_a_parameter_that_is_frozen_while_it_travels():
    """It is merged, and averaged with the rest until all are synchronised; then it is the user's own affair."""

    def on_rank(rank):
        one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([one, other], 1.0),
            [("one", one), ("other", other)],
            mode=hvd.LocalSteps(every=3, fragments=2, overlap=2),
        )
        for step in range(5):
            if step == 2:
                one.requires_grad = False
                one.grad = None
            optimizer.zero_grad()
            sum((rank + 1) * each.sum() for each in (one, other) if each.requires_grad).backward()
            optimizer.step()
        optimizer.synchronize()
        return one.tolist(), other.tolist(), list(optimizer.state_dict()["local_steps"]["common"])

    with World(2) as world:
        assert world.run(on_rank) == [([-3.0] * 2, [-7.5] * 2, ["other"])] * 2


@pytest.mark.parametrize("arguments, text", [
    ({"every": 4, "merge": "half"}, "merge must be additive without overlap"),
    ({"every": 4, "fragments": 5}, "fragments must be between 1 and 4"),
])  # fmt: skip
def test_arguments_that_cannot_be(arguments, text):
    def on_rank(rank):
        with pytest.raises(InvalidArgumentError, match=text):
            streaming(network(), **arguments)

    with World(1) as world:
        world.run(on_rank)


def test_a_rank_without_data_and_hosts_as_workers():
    model, data = network(torch.float64), batches(3, torch.float64, 9)

    def on_rank(rank):
        mine, optimizer = streaming(model, every=3, fragments=3, overlap=2, within="host", warmup=2)
        for batch in data[: 9 if rank < 2 else 5]:
            train(mine, optimizer, [share(batch, rank, 3)])
        optimizer.join()
        return parameters(mine), rt.counters()["local_steps"]

    with World(3, "2+1", stall_abort_seconds=30) as world:
        found = world.run(on_rank)
    assert [steps for _, steps in found] == [7, 7, 3]
    for values, _ in found:
        assert_same_bits(values, found[0][0])
