"""An optimizer that outlives its world: after ``shutdown()`` and ``init()`` it goes on in the new one."""

import re
import subprocess
import sys
from pathlib import Path

import needs
import pytest
import torch
from modes import in_mode

import ringtrain.torch as hvd
from ringtrain._runtime.context import current
from ringtrain.errors import NotInitializedError, RingtrainError
from ringtrain.testing import World


def steps(model, optimizer, rank, count):
    for number in range(count):
        optimizer.zero_grad()
        (model(torch.ones(1, 2)) * (rank + number + 1.0)).sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained_alone(ranks, *counts):
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    for count in counts:
        for number in range(count):
            optimizer.zero_grad()
            sum((model(torch.ones(1, 2)) * (rank + number + 1.0)).sum() / ranks for rank in range(ranks)).backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def wrapped(**settings):
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
    plain = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    return model, hvd.DistributedOptimizer(plain, model.named_parameters(), **in_mode(settings))


@pytest.mark.parametrize("settings", [{}, {"groups": 1}, {"groups": 1, "gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("last", ["a whole step", "a pass", "a step and zero_grad()"])
def test_a_living_optimizer_goes_on_in_a_new_world(settings, last):
    """Whatever the old world left under way; a second optimizer, made in the new one, does not mix names up with it."""
    with World(2, stall_abort_seconds=20) as first:
        living = first.run(lambda rank: wrapped(**settings))

        def train(rank):
            steps(*living[rank], rank, 4)
            if last == "a pass":
                living[rank][1].zero_grad()
                living[rank][0](torch.ones(1, 2)).sum().backward()
            elif last == "a step and zero_grad()":
                living[rank][1].zero_grad()

        first.run(train)
    with World(2, stall_abort_seconds=20) as second:

        def go_on(rank):
            other = wrapped(**settings)
            found = steps(*living[rank], rank, 3)
            assert other[1]._mode.prefix == "optimizer.0" and living[rank][1]._mode.prefix == "optimizer.1"
            assert living[rank][1]._mode.context is current()
            return found, steps(*other, rank, 2)

        for found, of_other in second.run(go_on):
            assert all(map(torch.equal, found, trained_alone(2, 4, 3)))
            assert all(map(torch.equal, of_other, trained_alone(2, 2)))


def test_a_new_world_of_another_size():
    with World(3, stall_abort_seconds=20) as first:
        living = first.run(lambda rank: wrapped())
        first.run(lambda rank: steps(*living[rank], rank, 2))
    with World(2, stall_abort_seconds=20) as second:
        one, other = second.run(lambda rank: steps(*living[rank], rank, 1))
    assert all(map(torch.equal, one, other))


def test_hooks_find_the_new_world_first():
    """Backward passes, before anything else is asked of the optimizer: those of the old world do not count."""
    with World(2, stall_abort_seconds=20) as first:
        living = first.run(lambda rank: wrapped(backward_passes_per_step=2))
        first.run(lambda rank: living[rank][0](torch.ones(1, 2)).sum().backward())
    with World(2, stall_abort_seconds=20) as second:

        def go_on(rank):
            model = living[rank][0]
            for parameter in model.parameters():
                parameter.grad = None
            for _ in range(2):
                model(torch.ones(1, 2)).sum().mul(rank + 1.0).backward()
            return [parameter.grad.tolist() for parameter in model.parameters()]

        assert second.run(go_on) == [[[[3.0, 3.0], [3.0, 3.0]], [3.0, 3.0]]] * 2


def test_without_a_world_a_step_says_what_to_do():
    with World(2, stall_abort_seconds=20) as world:
        living = world.run(lambda rank: wrapped())
    model, optimizer = living[0]
    with pytest.raises(NotInitializedError, match="Call init"):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.load_state_dict(optimizer.state_dict())  # needs none


def test_a_parameter_is_left_to_an_optimizer_of_the_new_world():
    """The old one, still alive, would reduce it a second time."""
    with World(2, stall_abort_seconds=20) as first:
        living = first.run(lambda rank: wrapped())
        first.run(lambda rank: steps(*living[rank], rank, 1))
    with World(2, stall_abort_seconds=20) as second:

        def again(rank):
            model, old = living[rank]
            plain = torch.optim.SGD(model.parameters(), lr=0.125)
            new = hvd.DistributedOptimizer(plain, model.named_parameters())
            new.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            new.step()
            with pytest.raises(ValueError, match="which was made later over the same parameter"):
                old.step()
            hvd.barrier()

        second.run(again)


MODES = {
    "synchronous": {},
    "PowerSGD": {"compression": hvd.Compression.powersgd(rank=1, start_after=1, min_compression_rate=1)},
    "one step late": {"late": True},
    "Adasum": {"op": hvd.Adasum},
}


def session_of(optimizer):
    mode = optimizer._mode
    return mode.settings.session if hasattr(mode, "settings") else mode._session


def told_by(session):
    """Who hears of a new world, in their order."""
    return [reference().__self__ for reference in session._told if reference() is not None]


def in_a_world_with_a_new_rank(settings, arrange=lambda session: None):
    """What a rank that was the second optimizer of its world comes to, and one that makes its first: both have the number 0 now."""
    with World(2, stall_abort_seconds=20) as first:
        living = first.run(lambda rank: (wrapped(**settings), wrapped(**settings))[1])
        first.run(lambda rank: steps(*living[rank], rank, 3))
    with World(2, stall_abort_seconds=2) as second:

        def go_on(rank):
            if rank == 0:
                model, optimizer = living[0]
                arrange(session_of(optimizer))
            else:
                model, optimizer = wrapped(**settings)
            for parameter in model.parameters():
                torch.nn.init.ones_(parameter)
            optimizer.state.clear()
            return optimizer, steps(model, optimizer, rank, 3)

        return second.run(go_on)


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_a_rank_that_goes_on_and_a_new_one_have_the_same_names(settings):
    (living, one), (new, other) = in_a_world_with_a_new_rank(settings)
    assert living._mode.prefix == new._mode.prefix == "optimizer.0"
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_in_another_order_a_rank_that_goes_on_would_be_alone(settings):
    """Who makes names of the number hears of the world behind it; the test before would notice if not."""

    def reverse(session):
        session._told.reverse()

    with pytest.raises((RingtrainError, AssertionError)):
        (_, one), (_, other) = in_a_world_with_a_new_rank(settings, reverse)
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_they_hear_of_it_in_the_order_that_the_docs_say(settings):
    page = Path(__file__).parents[2] / "docs" / "internals" / "modes.md"
    section = page.read_text().partition("## Another world")[2].partition("\n## ")[0]
    order = [name for cell in re.findall(r"^\| (`.*?) \|", section, re.M) for name in re.findall(r"\w+", cell)]
    with World(2) as world:

        def told(rank):
            _, optimizer = wrapped(**settings)
            return [type(each).__name__ for each in told_by(session_of(optimizer))]

        names = world.run(told)[0]
    assert names[0] == order[0] == "Number" and len(names) > 1
    assert names == sorted(names, key=order.index)


def test_an_optimizer_with_adasum_makes_room_for_the_names_of_others():
    with World(2, stall_abort_seconds=20) as first:
        living = first.run(lambda rank: wrapped(op=hvd.Adasum))
        first.run(lambda rank: steps(*living[rank], rank, 2))
    with World(2, stall_abort_seconds=20) as second:

        def go_on(rank):
            other = wrapped(op=hvd.Adasum)
            found = steps(*living[rank], rank, 2)
            assert (other[1]._mode.prefix, living[rank][1]._mode.prefix) == ("optimizer.0", "optimizer.1")
            return found

        one, other = second.run(go_on)
    assert all(map(torch.equal, one, other))


def test_ranks_that_make_the_first_optimizer_of_a_class_at_once_hook_its_step_once():
    """Wrapped by each of them, as torch does it without a lock, a step would reduce gradients once for each."""
    with World(3) as world:
        for _ in range(60):
            kind = type("Descent", (torch.optim.SGD,), {"step": lambda self, closure=None: None})
            calls = []

            def make(rank, kind=kind, calls=calls):
                hvd.barrier()
                optimizer = kind([torch.nn.Parameter(torch.ones(1))], lr=0.1)
                optimizer.register_step_pre_hook(lambda *_: calls.append(rank))
                hvd.barrier()
                optimizer.step()

            world.run(make)
            assert sorted(calls) == [0, 1, 2]


# Where mkl_vml_serv_cpu_detect() of PyTorch's library keeps its answer: it begins with "mov answer(%rip), %eax".
PROCESSOR_OF_MKL = """
import ctypes, pathlib, sys, torch
library = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
code = ctypes.cast(library.mkl_vml_serv_cpu_detect, ctypes.c_void_p).value
assert ctypes.string_at(code, 2) == b"\\x8b\\x05", "another MKL, which may have no race"
answer = ctypes.c_int.from_address(code + 6 + ctypes.c_int.from_address(code + 2).value)
before = answer.value
import ringtrain.torch
print(before, answer.value, library.mkl_vml_serv_cpu_detect())
"""


@needs.machine("" if torch.backends.mkl.is_available() else "needs a PyTorch with MKL")
def test_ranks_that_compute_their_first_tanh_at_once_get_all_digits():
    """MKL notes a first answer, and then the right one: a thread that reads the first calls a function of low accuracy.

    It happened once in 6,000 processes whose two threads began with tanh at once. So importing the package calls one.
    """
    done = subprocess.run([sys.executable, "-c", PROCESSOR_OF_MKL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after, right = map(int, done.stdout.split())
    assert before == -1, "PyTorch settles it by itself: ringtrain.torch need not"
    assert after == right >= 0
