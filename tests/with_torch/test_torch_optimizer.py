"""A distributed optimizer stays the user's optimizer; what it adds, and what it refuses."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from modes import in_mode
from torch_models import (
    assert_all_close,
    assert_same_bits,
    batches,
    mean_square,
    network,
    parameters,
    sgd,
    share,
    state,
    train,
)

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain.testing import World


class Momentum(torch.optim.Optimizer):
    """An optimizer of a user, with arguments that its class needs and an attribute of its own."""

    def __init__(self, parameters, rate, *, friction):
        super().__init__(parameters, {"rate": rate, "friction": friction})
        self.note = "mine"

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    speed = self.state[parameter].setdefault("speed", torch.zeros_like(parameter))
                    speed.mul_(group["friction"]).add_(parameter.grad)
                    parameter.sub_(speed, alpha=group["rate"])


def user_optimizer(parameters):
    return Momentum(parameters, 0.1, friction=0.5)


# ---- it stays what it was ----


def test_it_is_the_same_object_of_the_users_class(world):
    def on_rank(rank):
        model = network()
        plain = user_optimizer(model.parameters())
        text = repr(plain)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        assert optimizer is plain and isinstance(optimizer, Momentum)
        assert type(optimizer).__name__ == "Momentum" and type(optimizer).__module__ == Momentum.__module__
        assert optimizer.defaults == {"rate": 0.1, "friction": 0.5} and optimizer.note == "mine"
        assert repr(optimizer) == text

    world.run(on_rank)


def test_state_and_defaults_from_before(world):
    """Steps taken before count, and a group added later gets the user's defaults."""
    data = batches(world.size, torch.float64)
    start = network(torch.float64)

    def on_rank(rank):
        model, expected = copy.deepcopy(start), copy.deepcopy(start)
        optimizer, expected_optimizer = user_optimizer(model.parameters()), user_optimizer(expected.parameters())
        for each in ((model, optimizer), (expected, expected_optimizer)):
            train(*each, data[:2])
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        train(model, optimizer, [share(batch, rank, world.size) for batch in data[2:]])
        train(expected, expected_optimizer, data[2:])
        assert_all_close(state(optimizer), state(expected_optimizer), rtol=1e-10, atol=1e-12)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        assert optimizer.param_groups[1]["friction"] == 0.5

    world.run(on_rank)


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize(
    "make", [user_optimizer, torch.optim.AdamW, torch.optim.LBFGS], ids=["user's", "AdamW", "LBFGS"]
)
def test_copies_are_plain_optimizers(world, make, make_copy):
    start = network()

    def on_rank(rank):
        model = copy.deepcopy(start)
        optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
        if make is not torch.optim.LBFGS:
            train(model, optimizer, batches(1)[:1])
        before = rt.counters()["operations"]
        copied = make_copy(optimizer)
        never_wrapped = make_copy(make(start.parameters()))  # a copy gets some defaults from torch itself
        assert type(copied) is type(never_wrapped) and copied.defaults == never_wrapped.defaults
        assert_same_bits(state(copied), state(optimizer))
        for parameter in copied.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        if make is not torch.optim.LBFGS:
            copied.step()
        assert rt.counters()["operations"] == before

    world.run(on_rank)


def test_step_hooks_run_once_and_see_reduced_gradients(world):
    size = world.size

    def on_rank(rank):
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(("before", parameter.grad.item())))
        optimizer.register_step_post_hook(lambda *_: seen.append(("after", parameter.item())))
        optimizer = hvd.DistributedOptimizer(optimizer, [("p", parameter)], op=hvd.Sum)
        (parameter * (rank + 1)).sum().backward()
        optimizer.step()
        total = float(sum(range(1, size + 1)))
        assert seen == [("before", total), ("after", -total)]

    world.run(on_rank)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_takes_its_arguments(world, set_to_none):
    def on_rank(rank):
        model = network()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.zero_grad(set_to_none=set_to_none)  # though the gradients travel
        assert all((p.grad is None) if set_to_none else not p.grad.any() for p in model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    world.run(on_rank)


def test_a_world_of_one_changes_nothing():
    start, data = network(), batches(1)
    expected = copy.deepcopy(start)
    train(expected, sgd(expected.parameters()), data)

    def on_rank(rank):
        model = copy.deepcopy(start)
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), backward_passes_per_step=2
        )
        for x, y in data:
            optimizer.zero_grad()
            mean_square(model(x), y).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        assert_same_bits(parameters(model), parameters(expected))
        assert rt.counters()["operations"] == 0
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())

    with World(1) as world:
        world.run(on_rank)


def test_wrapping_again_takes_the_new_settings(world):
    start, data = network(torch.float64), batches(world.size, torch.float64)
    expected = copy.deepcopy(start)
    expected_optimizer = sgd(expected.parameters())
    train(expected, expected_optimizer, data)

    def on_rank(rank):
        mine = [share(batch, rank, world.size) for batch in data]
        model = copy.deepcopy(start)
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=hvd.Sum)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        train(model, optimizer, mine)
        assert_all_close(parameters(model), parameters(expected), rtol=1e-10, atol=1e-12)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_a_dropped_optimizer_submits_nothing(world):
    """At once: the collector would come to one rank before the others."""

    def on_rank(rank):
        model = network()
        sgd(model.parameters())  # torch leaves the first one of a process to the collector
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        del optimizer
        hvd.barrier()
        before = rt.counters()["operations"]
        model(torch.ones(1, 4)).sum().backward()
        hvd.barrier()
        assert rt.counters()["operations"] == before + 1

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_what_is_dropped_is_freed(world):
    """An optimizer, its step in progress, and the parameters that its hooks are on."""

    def on_rank(rank):
        model = network()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        left = [weakref.ref(optimizer), weakref.ref(model[0].weight), weakref.ref(model[0].weight.grad)]
        del model, optimizer
        for turn in range(world.size):  # two threads cannot collect at once
            hvd.barrier()
            if turn == rank:
                gc.collect()
        assert [each() for each in left] == [None] * 3

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_names_are_the_users(world):
    """A mismatch names the parameter; what ranks disagree about fails on all, and the next step works."""

    def on_rank(rank):
        model = torch.nn.ModuleDict({"fc1": torch.nn.Linear(3 + (rank == 0), 1), "fc2": torch.nn.Linear(2, 1)})
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        with pytest.raises(rt.RingtrainError, match=r"allreduce 'optimizer.0.fc1.weight'") as caught:
            (model["fc1"].weight.sum() + model["fc2"].weight.sum()).backward()
        texts = hvd.allgather_object(str(caught.value))
        assert texts == [texts[0]] * world.size
        optimizer.zero_grad()
        model["fc2"](torch.ones(1, 2)).sum().backward()
        optimizer.step()

    world.run(on_rank)


# ---- what it adds ----


@pytest.mark.least_ranks(2)
def test_gradients_travel_during_backward(world):
    """The hook submits; nobody has called step() or synchronize() when the operations are done."""

    def on_rank(rank):
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)])
        before = rt.counters()["operations"]
        (parameter * rank).sum().backward()
        hvd.barrier()
        hvd.barrier()
        assert rt.counters()["operations"] >= before + 3
        optimizer.step()

    world.run(on_rank)


@pytest.mark.least_ranks(2)
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=["sum", "average"])
def test_synchronize_without_skip_warns_and_reduces_once(world, op):
    expected = sum(range(1, world.size + 1)) / (world.size if op == hvd.Average else 1)

    def on_rank(rank):
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)], op=op)
        (parameter * (rank + 1)).sum().backward()
        optimizer.synchronize()
        before = rt.counters()["operations"]
        optimizer.step()
        assert rt.counters()["operations"] == before
        assert parameter.item() == -expected
        (parameter * (rank + 1)).sum().backward()  # and the next step reduces again
        optimizer.step()
        assert rt.counters()["operations"] == before + 2

    with pytest.warns(UserWarning, match=r"optimizer.step\(\) called without optimizer.skip_synchronize\(\)"):
        world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_the_passes_of_a_step_can_be_changed(world):
    def on_rank(rank):
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("p", parameter)])
        optimizer.set_backward_passes_per_step(2)
        before = rt.counters()["operations"]
        (parameter * rank).sum().backward()
        assert rt.counters()["operations"] == before
        (parameter * rank).sum().backward()
        optimizer.step()
        torch.testing.assert_close(parameter.item(), -(world.size - 1.0))
        with pytest.raises(ValueError, match="at least 1, but is 0"):
            optimizer.set_backward_passes_per_step(0)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_a_group_added_between_backward_and_step(world):
    """What travels arrives first; the new parameters have the names that the optimizer was told."""

    def on_rank(rank):
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1), "b": torch.nn.Linear(1 + (rank == 0), 1)})
        optimizer = torch.optim.SGD(model["a"].parameters(), lr=1.0)
        named = model.named_parameters()
        optimizer = hvd.DistributedOptimizer(optimizer, named, op=hvd.Sum, mode=hvd.Synchronous(replicas="differ"))
        (model["a"].weight * rank).sum().backward()
        optimizer.add_param_group({"params": model["b"].parameters()})
        optimizer.step()
        assert model["a"].weight.grad.item() == sum(range(world.size))
        optimizer.zero_grad()
        with pytest.raises(rt.RingtrainError, match=r"allreduce 'optimizer.0.b.weight'"):
            model["b"].weight.sum().backward()

    world.run(on_rank)


# ---- what it refuses ----


@pytest.mark.least_ranks(2)
def test_a_step_that_an_epoch_left_half_done(world):
    """Two passes make a step, and an epoch has three: averages go on as one process does, sums are told what to do."""
    epochs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]

    def trained(rank, **arguments):
        model = network()
        optimizer = sgd(model.parameters())
        if arguments:
            optimizer = hvd.DistributedOptimizer(
                optimizer, model.named_parameters(), backward_passes_per_step=2, **in_mode(arguments)
            )
        for epoch in epochs:
            for number, x in enumerate(epoch):
                model(x[None]).sum().backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return parameters(model)

    def on_rank(rank):
        assert_all_close(trained(rank, op=hvd.Average), trained(rank))
        with pytest.raises(
            ValueError, match=r"behind the last batch of an epoch, call step\(\), which sends what there is"
        ):
            trained(rank, op=hvd.Sum)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_too_many_backward_passes(world):
    """An average of what is reduced is that again (``test_torch_gan``); a sum would count it once for each rank."""

    def on_rank(rank):
        model = network()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), op=hvd.Sum)
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(ValueError, match="expected 1 backward passes in a step but found another one"):
            model(torch.ones(1, 4)).sum().backward()
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_skip_synchronize_needs_reduced_gradients(world):
    """They are after the step's last backward pass; a step that is cut short needs synchronize()."""

    def on_rank(rank):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), backward_passes_per_step=2
        )
        for complete in (False, True):
            for _ in range(1 + complete):
                model(torch.ones(1, 4)).sum().backward()
            if not complete:
                with pytest.raises(ValueError, match="Call synchronize"), optimizer.skip_synchronize():
                    optimizer.step()
                optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()

    world.run(on_rank)


def _named(model):
    return list(model.named_parameters())


@pytest.mark.parametrize(
    "arguments, text",
    [
        (lambda m: {"named_parameters": m.parameters()}, r"must be \(name, parameter\) tuples"),
        (lambda m: {"named_parameters": _named(m)[1:]}, "must name every parameter"),
        (lambda m: {"named_parameters": [("same", p) for p in m.parameters()]}, "'same' comes twice"),
        (lambda m: {"groups": 0}, "at least 1, but is 0"),
        (lambda m: {"groups": "two"}, "an int or lists of parameters"),
        (lambda m: {"groups": [list(m.parameters())[:1]] * 2}, "group 1 holds one twice"),
        (lambda m: {"groups": [[torch.nn.Parameter(torch.zeros(1))]]}, "one that is not the optimizer's"),
        (lambda m: {"op": hvd.Max}, "op must be Average"),
        (lambda m: {"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average"),
        (lambda m: {"gradient_predivide_factor": 0.0}, "must be above 0"),
        (lambda m: {"backward_passes_per_step": 0}, "at least 1, but is 0"),
    ],
)
def test_wrong_arguments(world, arguments, text):
    def on_rank(rank):
        model = network()
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd(model.parameters()), **in_mode(arguments(model)))
        assert rt.counters()["operations"] == 0

    world.run(on_rank)


def test_only_optimizers(world):
    def on_rank(rank):
        with pytest.raises(ValueError, match="must be a torch.optim.Optimizer, but is a Linear"):
            hvd.DistributedOptimizer(torch.nn.Linear(1, 1))

    world.run(on_rank)


@pytest.mark.least_ranks(2)
@pytest.mark.parametrize("groups", [None, 1], ids=["alone", "in a group"])
@pytest.mark.parametrize("passes", [1, 2], ids=["by the hook", "by step"])
def test_a_gradient_that_one_rank_refuses_fails_everywhere(world, passes, groups):
    """It may be seen in backward() or only in step(); nobody waits for what will not come, and the next step works."""

    def on_rank(rank):
        odd = torch.nn.Parameter(torch.zeros(1, dtype=torch.complex32 if rank == 0 else torch.float32))
        parameters = [torch.nn.Parameter(torch.zeros(1)), odd, torch.nn.Parameter(torch.zeros(1))]
        named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0), named, groups=groups, backward_passes_per_step=passes
        )
        with pytest.raises(rt.RingtrainError, match=r"expected a dtype among .* but found complex32") as caught:
            (parameters[0] + odd.abs() + parameters[2]).sum().backward()
            optimizer.step()
        assert rank != 0 or isinstance(caught.value, ValueError)
        optimizer.zero_grad()
        assert hvd.allgather_object(str(caught.value)) == [str(caught.value)] * world.size
        (parameters[0] + parameters[2]).sum().backward()
        optimizer.step()
        assert parameters[2].grad.item() == 1.0

    world.run(on_rank)


def test_before_init():
    with pytest.raises(ValueError, match="init"):
        hvd.DistributedOptimizer(sgd([torch.nn.Parameter(torch.zeros(1))]))


def test_mean_square_is_a_mean():
    """The oracle rests on this: the mean over a batch is the mean of the means over its equal parts."""
    x, y = batches(4, torch.float64)[0]
    parts = [mean_square(*share((x[:, :2], y), rank, 4)) for rank in range(4)]
    torch.testing.assert_close(mean_square(x[:, :2], y), sum(parts) / 4)


# ---- as Horovod's scripts look at it ----


def test_attributes_that_scripts_read(world):
    def on_rank(rank):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()),
            model.named_parameters(),
            backward_passes_per_step=2,
            op=hvd.Sum,
            sparse_as_dense=True,
        )
        assert optimizer.backward_passes_per_step == 2
        assert (optimizer.op, optimizer.process_set) == (hvd.Sum, hvd.global_process_set)
        assert (optimizer.gradient_predivide_factor, optimizer.sparse_as_dense) == (1.0, True)
        assert optimizer._parameter_names == {parameter: name for name, parameter in model.named_parameters()}
        optimizer.set_backward_passes_per_step(3)
        assert optimizer.backward_passes_per_step == 3
        optimizer.backward_passes_per_step = 1
        model(torch.ones(1, 4)).sum().backward()  # one is enough now
        before = rt.counters()["operations"]
        optimizer.step()
        assert rt.counters()["operations"] == before
        with pytest.raises(ValueError, match="at least 1, but is 0"):
            optimizer.backward_passes_per_step = 0
        added = torch.nn.Parameter(torch.zeros(1))
        optimizer.add_param_group({"params": [added]})
        assert optimizer._parameter_names[added] == "noname.1.0"
        assert not hasattr(copy.deepcopy(optimizer), "op")

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_a_class_made_of_the_first_base_as_lightning_does(world):
    """Lightning's wrapper shares the optimizer's attributes and derives from the first base of its class."""
    start, data = network(torch.float64), batches(world.size, torch.float64)
    expected = copy.deepcopy(start)
    train(expected, sgd(expected.parameters()), data)

    class Wrapper:
        def __init__(self, optimizer):
            self.__dict__ = dict(vars(optimizer))
            self.__class__ = type("Wrapper", (Wrapper, type(optimizer).__bases__[0]), {})
            self.wrapped = optimizer

        def step(self, closure):
            self.wrapped.step(closure)

    def on_rank(rank):
        model = copy.deepcopy(start)
        wrapper = Wrapper(hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters()))
        assert isinstance(wrapper, torch.optim.SGD)
        with wrapper.wrapped.skip_synchronize():
            for batch in data:
                x, y = share(batch, rank, world.size)
                wrapper.zero_grad()
                mean_square(model(x), y).backward()
                wrapper.wrapped.synchronize()
                wrapper.step(lambda: None)
        assert_all_close(parameters(model), parameters(expected), rtol=1e-10, atol=1e-12)

    world.run(on_rank)
