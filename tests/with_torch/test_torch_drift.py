"""Ranks that train apart are told so: each planted cause of drift, in each mode; and what only looks like one is let be."""

import copy
import itertools
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import pytest
import torch
from modes import in_mode
from torch_models import mean_square, network, parameters

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain._training import drift
from ringtrain._training.adapter.checks import named_ranks
from ringtrain.errors import InvalidArgumentError, MismatchError
from ringtrain.testing import World

pytestmark = pytest.mark.least_ranks(2)

MODES = [
    {}, {"compression": hvd.Compression.int8}, {"compression": hvd.Compression.powersgd(rank=1)},
    {"groups": 2}, {"gradient_as_bucket_view": True}, {"late": True}, {"sharded": True}, {"op": hvd.Adasum},
]  # fmt: skip


@pytest.fixture
def compared_always(monkeypatch):
    """Parameters are compared in each round."""
    monkeypatch.setattr(drift, "PERIOD", 0.0)
    monkeypatch.setattr(drift, "SHARE", float("inf"))


def wrapped(start, make=lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), **arguments):
    """A copy of a model, and an optimizer with a group for each half of it."""
    model = copy.deepcopy(start)
    own = list(model.parameters())
    optimizer = make([{"params": own[:2]}, {"params": own[2:]}])
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **in_mode(arguments))


def trains(model, optimizer, steps, between=lambda step: None, before_update=lambda step: None):
    """Some steps; calls ``between`` before each, ``before_update`` behind each backward pass."""
    for step in range(steps):
        between(step)
        optimizer.zero_grad()
        x = torch.full((3, 4), float(step + rt.rank()))
        mean_square(model(x), torch.ones(3, 2)).backward()
        before_update(step)
        optimizer.step()


def refused(world, body, *words):
    """All ranks raise the same error, with these words."""

    def on_rank(rank):
        with pytest.raises(MismatchError) as caught:
            body(rank)
        return str(caught.value)

    texts = world.run(on_rank)
    assert len(set(texts)) == 1
    for each in words:
        assert each in texts[0]


def last(world):
    return f"rank {world.size - 1}"


# ---- settings ----


@pytest.mark.parametrize("arguments", MODES, ids=str)
@pytest.mark.parametrize("name, value", [("lr", 0.05), ("weight_decay", 0.01), ("nesterov", True)])
def test_other_settings_are_refused_before_the_update(world, arguments, name, value):
    start = network()
    late = arguments.get("late", False)

    def body(rank):
        model, optimizer = wrapped(start, **arguments)
        trains(model, optimizer, 2)
        before = [each.clone() for each in parameters(model)]
        if rank == world.size - 1:
            optimizer.param_groups[1][name] = value
        try:
            trains(model, optimizer, 1 + late)
        finally:
            assert late or all(map(torch.equal, before, parameters(model)))

    refused(world, body, f"{name} of group 1 must be the same on all ranks, but is ", f"on {last(world)}")


def test_betas_are_settings(world):
    start = network()

    def body(rank):
        model, optimizer = wrapped(start, torch.optim.AdamW)
        optimizer.param_groups[0]["betas"] = (0.9, 0.999 if rank else 0.99)
        trains(model, optimizer, 1)

    refused(
        world, body, "betas of group 0 must be the same on all ranks, but is [0.9, 0.99] on rank 0 and [0.9, 0.999] on"
    )


def test_a_schedule_that_runs_out_of_step(world):
    start = network()

    def body(rank):
        model, optimizer = wrapped(start)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        trains(model, optimizer, 5, between=lambda step: schedule.step() if step and (step < 3 or not rank) else None)

    refused(world, body, "lr of group 0", "but is 0.0125 on rank 0 and 0.025 on")


def test_a_setting_that_changes_behind_the_backward_pass_is_seen_in_the_next_step(world):
    start = network()

    def body(rank):
        model, optimizer = wrapped(start)

        def set_rate(step):
            optimizer.param_groups[0]["lr"] = 0.3 if rank == 0 and step == 1 else 0.2

        trains(
            model, optimizer, 4, before_update=set_rate, between=lambda step: optimizer.param_groups[0].update(lr=0.1)
        )

    refused(
        world, body, "lr of group 0 must be the same on all ranks, but was in the last step 0.3 on rank 0 and 0.2 on"
    )


def test_a_rate_that_is_set_behind_the_backward_pass_which_one_rank_has_not(world):
    """That rank comes to the round when it has set the rate, the others before."""
    start = network()

    def body(rank):
        model, optimizer = wrapped(start)
        for step in range(4):
            optimizer.zero_grad()
            if rank or step != 1:
                mean_square(model(torch.ones(3, 4)), torch.ones(3, 2)).backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            optimizer.step()
        return parameters(model)

    for other in (results := world.run(body))[1:]:
        assert all(map(torch.equal, results[0], other))


def test_a_rate_in_a_tensor(world):
    start = network()

    def body(rank):
        model, optimizer = wrapped(start, lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.5)))
        trains(model, optimizer, 1)
        optimizer.param_groups[1]["lr"] = torch.tensor(0.5 + rank)
        trains(model, optimizer, 1)

    refused(world, body, "lr of group 1 must be the same on all ranks, but is 0.5 on rank 0 and 1.5 on rank 1")


# ---- parameters ----


# With ShardedStep each step hands on the values of one rank.
OTHERS = [mode for mode in MODES if "sharded" not in mode]


@pytest.mark.parametrize("arguments", OTHERS, ids=str)
def test_no_broadcast_at_the_start(world, arguments):
    start = network()

    def body(rank):
        model, optimizer = wrapped(start, **arguments)
        with torch.no_grad():
            model[4].bias[1] += 0.25 * (rank == 0)
            model[4].weight[0, 0] += 0.5 * (rank == 0)
        trains(model, optimizer, 4)

    which = "parameter '4.weight' must be the same on all ranks, but those of"
    refused(world, body, f"step 'optimizer.0': {which}", "by up to 0.5", "2 of 6 parameters differ.")


def test_after_the_first_step_and_no_later(world):
    start = network()

    def body(rank):
        model, optimizer = wrapped(start)
        with torch.no_grad():
            model[0].bias += rank
        trains(model, optimizer, 1)
        with pytest.raises(MismatchError, match=r"parameter '0\.bias'"):
            trains(model, optimizer, 1)

    world.run(body)


@pytest.mark.parametrize("arguments", OTHERS, ids=str)
def test_an_assignment_on_one_rank(world, arguments, compared_always):
    start = network()

    def body(rank):
        model, optimizer = wrapped(start, **arguments)

        def assign(step):
            if step == 4 and rank == world.size - 1:
                with torch.no_grad():
                    model[2].weight[3, 3] = 8.0

        trains(model, optimizer, 9, between=assign)

    refused(world, body, "parameter '2.weight' must be the same on all ranks")


def test_a_hook_that_another_library_runs_on_one_rank(world, compared_always):
    start = network()

    def body(rank):
        model, optimizer = wrapped(start)
        if rank == 0:
            optimizer.register_step_post_hook(lambda *_: model[4].bias.data.mul_(1 + 2**-20))
        trains(model, optimizer, 6)

    refused(world, body, "parameter '4.bias' must be the same on all ranks")


def test_a_layer_that_its_first_batch_makes(world):
    generators = [torch.Generator().manual_seed(rank) for rank in range(world.size)]

    def body(rank):
        model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))
        model(torch.ones(1, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for each in model.parameters():
            torch.nn.init.normal_(each, generator=generators[rank])
        trains(model, optimizer, 2)

    refused(world, body, "parameter '0.weight' must be the same on all ranks", "4 of 4 parameters differ.")


def test_another_world_compares_anew():
    start = network()
    with World(2) as first:
        living = first.run(lambda rank: wrapped(start))
        first.run(lambda rank: trains(*living[rank], 3))
    with World(2) as second:

        def body(rank):
            with torch.no_grad():
                living[rank][0][0].bias += rank
            trains(*living[rank], 1)
            with pytest.raises(MismatchError, match=r"parameter '0\.bias'"):
                trains(*living[rank], 1)

        second.run(body)


@pytest.mark.parametrize("arguments", MODES, ids=str)
def test_replicas_that_may_differ(world, arguments):
    start = network()

    def body(rank):
        model, optimizer = wrapped(start, replicas="differ", **arguments)
        optimizer.param_groups[0]["lr"] = 0.1 + rank
        with torch.no_grad():
            model[0].bias += rank
        trains(model, optimizer, 4)

    world.run(body)


def test_all_ranks_say_whether_replicas_may_differ(world):
    start = network()

    def body(rank):
        model, optimizer = wrapped(start, replicas="equal" if rank else "differ")
        trains(model, optimizer, 1)

    refused(world, body, "replicas must be the same on all ranks, but is differ on rank 0 and equal on")


def test_replicas_is_one_of_two_words(world):
    def body(rank):
        with pytest.raises(InvalidArgumentError, match=r'replicas must be "equal" or "differ", but is True\.'):
            wrapped(network(), replicas=True)

    world.run(body)


# ---- what is no drift ----


@contextmanager
def climbed(model):
    """Within this block parameters are a little up their gradients; behind it they are what they were."""
    with torch.no_grad():
        kept = [each.clone() for each in model.parameters()]
        for each in model.parameters():
            each += 0.05 * each.grad
    yield
    with torch.no_grad():
        for each, value in zip(model.parameters(), kept, strict=True):
            each.copy_(value)


def test_parameters_that_change_within_a_step_on_all_ranks(world, compared_always):
    """As sharpness-aware minimisation does, and one that clips weights."""
    start = network()

    def body(rank):
        model, optimizer = wrapped(start)
        for step in range(6):
            x = torch.full((3, 4), float(step + rank))
            optimizer.zero_grad()
            mean_square(model(x), torch.ones(3, 2)).backward()
            with climbed(model):
                optimizer.zero_grad()
                mean_square(model(x), torch.ones(3, 2)).backward()
            with torch.no_grad():
                for each in model.parameters():
                    each.clamp_(-1.5, 1.5)
            optimizer.step()

    world.run(body)


@pytest.mark.parametrize("way", ["no_sync", "passes"])
def test_perturbations_by_the_gradients_of_one_rank(world, compared_always, way):
    """As sharpness-aware and adversarial training have them: restored before the update."""
    start = network()

    def body(rank):
        model, optimizer = wrapped(start, backward_passes_per_step=2 if way == "passes" else 1)
        for step in range(6):
            optimizer.zero_grad()
            x = torch.full((3, 4), float(step + rank))
            with optimizer.no_sync() if way == "no_sync" else nullcontext():
                mean_square(model(x), torch.ones(3, 2)).backward()
            with climbed(model):
                mean_square(model(x), torch.ones(3, 2)).backward()
            optimizer.step()

    world.run(body)


@pytest.mark.parametrize("way", ["autograd.grad", "no_sync"])
def test_steps_that_no_backward_pass_ends_are_compared_too(world, way):
    start = network()

    def body(rank):
        model, optimizer = wrapped(start)
        with torch.no_grad():
            model[0].bias += rank
        for _ in range(3):
            loss = mean_square(model(torch.ones(3, 4)), torch.ones(3, 2))
            if way == "no_sync":
                with optimizer.no_sync():
                    loss.backward()
            else:
                for each, gradient in zip(
                    model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
                ):
                    each.grad = gradient
            optimizer.step()
            optimizer.zero_grad()

    refused(world, body, "parameter '0.bias' must be the same on all ranks")


def test_how_an_update_is_computed_is_no_setting(world):
    start = network()

    def body(rank):
        model, optimizer = wrapped(start)
        for group in optimizer.param_groups:
            group.update(foreach=bool(rank % 2), lr=1 if rank else 1.0)
        trains(model, optimizer, 3)

    world.run(body)


def test_ranks_that_join(world, compared_always):
    start = network()

    def body(rank):
        model, optimizer = wrapped(start)
        for epoch in range(3):
            trains(model, optimizer, 2 + (rank + epoch) % 2)
            rt.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    world.run(body)


def test_two_optimizers_one_after_the_other(world, compared_always):
    """Two networks, of which one trains through the other, as generative adversarial ones do."""
    start = [network(), network()]

    def body(rank):
        one, first = wrapped(start[0])
        two, second = wrapped(start[1])
        for step, (model, optimizer) in zip(range(8), itertools.cycle([(one, first), (two, second)]), strict=False):
            first.zero_grad(), second.zero_grad()
            x = torch.full((3, 4), float(step + rank))
            mean_square(model(x) + two(x), torch.ones(3, 2)).backward()
            optimizer.step()

    world.run(body)


def test_parameters_of_types_that_do_not_travel(world, compared_always):
    """Frozen ones are compared too, by their bytes."""
    start = network()

    def body(rank):
        model = copy.deepcopy(start)
        model.register_parameter("phase", torch.nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False))
        model.register_parameter("view", torch.nn.Parameter(torch.ones(4, 3).t(), requires_grad=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        trains(model, optimizer, 3)
        if rank == 0:
            model.phase[2] = 1 + 2j
        trains(model, optimizer, 3)

    refused(world, body, "parameter 'phase' must be the same on all ranks, but those of", "by up to 2.")


def test_parameters_of_different_shapes(world):
    """That no rank has a gradient of, so that nothing else tells of them."""

    def body(rank):
        parameters = [
            torch.nn.Parameter(torch.zeros(2)),
            torch.nn.Parameter(torch.zeros(2 + rank), requires_grad=False),
        ]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.1), [("a", parameters[0]), ("b", parameters[1])]
        )
        for _ in range(2):
            parameters[0].sum().backward()
            optimizer.step()

    refused(world, body, "parameter 'b' must be the same on all ranks, but those of")


def test_a_parameter_of_one_element_is_no_setting(world):
    with torch.random.fork_rng():
        torch.manual_seed(5)  # ranks that are processes draw alike
        start = torch.nn.Linear(1, 1)

    def body(rank):
        model = copy.deepcopy(start)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        with torch.no_grad():
            model.bias += rank
        for _ in range(2):
            mean_square(model(torch.ones(1, 1)), torch.ones(1, 1)).backward()
            optimizer.step()

    refused(world, body, "parameter 'bias' must be the same on all ranks")


UNCHANGED = """
import torch
import ringtrain.torch as hvd
from ringtrain.errors import MismatchError
from ringtrain.testing import World

def train(rank):
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

try:
    with World(2) as world:
        world.run(train)
    print("trained")
except MismatchError as told:
    print(str(told).partition(":")[0])
"""


@pytest.mark.parametrize("value, said", [("", "step 'optimizer.0'"), ("differ", "trained"), ("apart", "")])
def test_a_variable_lets_an_unchanged_script_train_apart(value, said):
    environment = {**os.environ, "RINGTRAIN_REPLICAS": value}
    done = subprocess.run([sys.executable, "-c", UNCHANGED], capture_output=True, text=True, env=environment)
    assert (done.returncode == 0) == bool(said) and done.stdout.startswith(said), done.stdout + done.stderr
    assert bool(said) or 'replicas must be "equal" or "differ", but is \'apart\'' in done.stderr, done.stderr


# ---- what is trained ----


@pytest.mark.parametrize("arguments", [mode for mode in MODES if "op" not in mode], ids=str)
@pytest.mark.parametrize("since", [0, 2])
def test_a_layer_that_is_frozen_on_one_rank_is_named(world, arguments, since):
    """It would count as zeros in the average, on all ranks alike, and so show nowhere else."""
    start = network()

    def body(rank):
        model = copy.deepcopy(start)
        if since == 0 and rank == world.size - 1:
            model[2].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **in_mode(arguments))
        trains(model, optimizer, since)
        model[2].requires_grad_(rank != world.size - 1)
        trains(model, optimizer, 2)  # one step late the error is, too

    others = named_ranks(list(range(world.size - 1)))
    named = f"but '2.weight', '2.bias' are trained on {others} and not on {last(world)}. Freeze"
    refused(world, body, "step 'optimizer.0': the parameters that are trained", named, 'a mode with replicas="differ"')


@pytest.mark.parametrize(
    "arguments, others",
    [
        ({}, []), ({"late": True}, []), ({"groups": 1}, []), ({"compression": hvd.Compression.int8}, []),
        ({}, [4]), ({"groups": 1}, [4]), ({"compression": hvd.Compression.int8}, [4]),  # a list as long
    ],
    ids=str,
)  # fmt: skip
def test_an_optimizer_that_was_given_other_parameters_on_one_rank(world, arguments, others):
    """Nobody else would send their gradients; and it is not said of shapes, which nobody has given."""
    start = network()

    def body(rank):
        model = copy.deepcopy(start)
        named = list(model.named_parameters())
        lacking = [5] if rank == world.size - 1 else others
        kept = [each for place, (_, each) in enumerate(named) if place not in lacking]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(kept, lr=0.1), named, **in_mode(arguments))
        trains(model, optimizer, 2)

    refused(world, body, "the parameters that are trained", "'4.bias' is trained on rank", f"and not on {last(world)}")


def test_all_that_an_optimizer_has_is_frozen_on_one_rank(world):
    """No backward pass reaches it there, so that rank comes to the round in its step."""
    start = network()

    def body(rank):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model[4].named_parameters())
        model[4].requires_grad_(rank == 0)
        trains(model, optimizer, 1)

    refused(world, body, "'weight', 'bias' are trained on rank 0 and not on rank")


def test_frozen_layers_that_all_ranks_have_alike_and_unused_ones_are_no_drift(world, compared_always):
    """Also where a pass is added to what was reduced, which opens all of a step again, or one rank has no batch."""
    start = network()

    def body(rank):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for step in range(6):
            model[2].requires_grad_(step % 3 != 0)
            optimizer.zero_grad()
            x = torch.full((3, 4), float(step + rank))
            uses = model if rank or step % 2 else torch.nn.Sequential(*model[:2], *model[4:])
            for _ in range(1 + (step > 3)):
                if rank == 0 or step != 1:
                    mean_square(uses(x), torch.ones(3, 2)).backward()
            optimizer.step()
        rt.join()
        return parameters(model)

    for other in (results := world.run(body))[1:]:
        assert all(map(torch.equal, results[0], other))


def test_with_replicas_that_may_differ_zeros_count_for_a_frozen_layer(world):
    start = network()

    def body(rank):
        model = copy.deepcopy(start)
        model[2].requires_grad_(rank == 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mode = hvd.Synchronous(replicas="differ")
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), mode=mode)
        optimizer.zero_grad()
        loss = mean_square(model(torch.ones(3, 4)), torch.ones(3, 2))
        own = torch.autograd.grad(loss, model[2].weight, retain_graph=True)[0] if rank == 0 else torch.zeros(())
        loss.backward()
        optimizer.synchronize()
        return own, model[2].weight.grad

    (own, found), *others = world.run(body)
    assert torch.allclose(found, own / world.size) and all(torch.equal(found, theirs) for _, theirs in others)


def test_a_frozen_layer_with_zeros_in_its_gradient_on_one_rank_is_no_drift(world):
    """Seed 530151 of drawn scripts: what a batch that was given up has used, set to zeros, which ranks have of other layers."""
    start = network()

    def body(rank):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        uses = torch.nn.Sequential(*model[:2], *model[4:]) if rank else model
        with optimizer.no_sync():
            mean_square(uses(torch.ones(3, 4)), torch.ones(3, 2)).backward()
        optimizer.zero_grad(set_to_none=False)
        model[2].requires_grad_(False)
        trains(model, optimizer, 2)
        optimizer.zero_grad(set_to_none=False)
        if rank == world.size - 1:
            model[0].requires_grad_(False)
        trains(model, optimizer, 1)

    refused(world, body, "but '0.weight', '0.bias' are trained on rank", f"and not on {last(world)}. Freeze")
