"""State as modules and optimizers write it: what ``get_extra_state`` gives, and tensors that share memory or lie oddly."""

import io

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import ringtrain.torch as hvd
from ringtrain.errors import MismatchError
from ringtrain.testing import World

KINDS = {
    "none on the root": lambda rank: None if rank == 0 else {"scale": 1},
    "dict": lambda rank: {"scale": rank, "history": torch.full((2,), float(rank))},
    "tensor": lambda rank: torch.arange(3 + rank, dtype=torch.uint8),  # such as a pickle: of any length on each rank
    "bytes": lambda rank: io.BytesIO(b"of rank %d" % rank),
}


class Noting(torch.nn.Linear):
    """A layer that keeps more than tensors."""

    def __init__(self, kept):
        super().__init__(1, 1)
        self.kept = kept

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


@pytest.fixture
def two():
    with World(2) as world:
        yield world


def told(kept):
    """In words, so that they compare."""
    return kept.getvalue() if isinstance(kept, io.BytesIO) else str(kept)


WAYS = {
    "broadcast_parameters": lambda model: hvd.broadcast_parameters(model, root_rank=0),
    "resume_together": lambda model: hvd.resume_together(model, root_rank=0),
    "TorchState": lambda model: hvd.elastic.TorchState(model).sync(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_extra_state_of_any_kind_comes_from_the_root(two, kind, way):
    def on_rank(rank):
        model = torch.nn.Sequential(Noting(KINDS[kind](rank)), torch.nn.Linear(1, 1))
        torch.nn.init.constant_(model[0].weight, rank)
        WAYS[way](model)
        assert told(model[0].kept) == told(KINDS[kind](0)) and model[0].weight.item() == 0

    two.run(on_rank)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_cannot_give_extra_state_back(two, kind):
    """So it must be alike; where it is not, all ranks raise the same, instead of one going on with a state of its own."""

    def on_rank(rank):
        model = Noting(KINDS[kind](0))
        torch.nn.init.constant_(model.weight, rank)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        assert model.weight.item() == 0
        with pytest.raises(MismatchError) as raised:
            hvd.broadcast_parameters(Noting(KINDS[kind](rank)).state_dict(), root_rank=0)
        return str(raised.value)

    assert set(two.run(on_rank)) == {
        "broadcast_parameters '_extra_state': the state that a module adds must be that of rank 0, since a state_dict cannot "
        "give it back to the module, but differs on rank 1. Pass the model instead of its state_dict."
    }


def test_a_commit_is_not_changed_by_what_the_module_does_with_it():
    def on_rank(_rank):
        model = Noting({"steps": 1})
        state = hvd.elastic.TorchState(model)
        for _ in range(2):
            model.kept["steps"] = 5
            state.restore()
            assert model.kept == {"steps": 1}

    with World(1) as world:
        world.run(on_rank)


LAYOUTS = {
    "expanded": lambda value: torch.full((1, 3), value).expand(4, 3),
    "an expanded scalar": lambda value: torch.tensor(value).expand(5),
    "transposed": lambda value: torch.arange(6.0).reshape(2, 3).add(value).t(),
    "with gaps": lambda value: torch.arange(8.0).add(value)[::2],
    "conjugated when read": lambda value: torch.tensor([1 + 2j, 3 - 1j]).add(value).conj(),
    "negated when read": lambda value: torch.tensor([1 + 2j, 3 - 1j]).mul(value + 1).conj().imag,
    "made of others": lambda value: TwoTensor(torch.full((2,), value), torch.full((2,), value + 1)),
}


def same(one, other):
    if isinstance(other, TwoTensor):
        return same(one.a, other.a) and same(one.b, other.b)
    return one.tolist() == other.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_any_layout(two, layout):
    """Parameters in their place, and the state of an optimizer."""
    make = LAYOUTS[layout]

    def on_rank(rank):
        tensor = make(float(rank))
        strides = tensor.stride()
        hvd.broadcast_parameters({"x": tensor}, root_rank=1)
        assert same(tensor, make(1.0)) and tensor.stride() == strides
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        optimizer.state[weight]["seen"] = make(float(rank))
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert same(optimizer.state[weight]["seen"], make(1.0))

    two.run(on_rank)


def test_tied_tensors(two):
    def on_rank(rank):
        shared = torch.full((3,), float(rank))
        hvd.broadcast_parameters({"one": shared, "other": shared, "part": shared[:2]}, root_rank=1)
        assert shared.tolist() == [1.0] * 3

    two.run(on_rank)


SHARED = {
    "tied": lambda: dict.fromkeys("ab", torch.zeros(2)),
    "expanded": lambda: {"a": torch.zeros(2), "b": torch.zeros(1).expand(2)},
}


@pytest.mark.parametrize("how", SHARED)
def test_memory_that_the_root_does_not_share_is_refused(two, how):
    """Where only one of the root's values would be left."""

    def on_rank(rank):
        given = {"a": torch.zeros(2), "b": torch.tensor([1.0, 2.0])} if rank == 0 else SHARED[how]()
        if rank == 0:
            hvd.broadcast_parameters(given, root_rank=0)
            return
        with pytest.raises(
            MismatchError, match="broadcast_parameters.b: elements that share memory on rank 1 must have one"
        ):
            hvd.broadcast_parameters(given, root_rank=0)

    two.run(on_rank)


def test_a_tensor_that_an_optimizer_has_twice_stays_one(two):
    def on_rank(rank):
        one, other = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        optimizer = torch.optim.SGD([one, other], lr=0.5)
        if rank == 0:
            optimizer.state[one]["step"] = optimizer.state[other]["step"] = torch.tensor(3.0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer.state[one]["step"] += 1
        assert optimizer.state[other]["step"].item() == 4

    two.run(on_rank)
