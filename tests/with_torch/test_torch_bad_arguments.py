"""The operations for torch tensors with arguments that one rank alone gets wrong; tests/core/test_bad_arguments.py has the core's.

A row of BAD is what rank 1 of two passes as the tensor, or does before; rank 0 does it rightly. Both fail with the same
words.
"""

import pytest
import torch
from modes import in_mode
from refusals import said_alike
from test_bad_arguments import MOST_SECONDS, Raises, outcome
from torch._subclasses.fake_tensor import FakeTensorMode
from worlds import World

import ringtrain as rt
import ringtrain.torch as hvd

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.on_threads("a world of two"),
]


def ones():
    return torch.ones(2, 3)


def freed():
    tensor = ones()
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_view():
    """Its address is not 0: that of its storage is."""
    tensor = torch.ones(4, 3)
    view = tensor[2:]
    tensor.untyped_storage().resize_(0)
    return view


def shortened():
    tensor = ones()
    tensor.untyped_storage().resize_(8)
    return tensor


def fake():
    with FakeTensorMode():
        return ones()


def wrapped():
    kept = []
    torch.func.vmap(lambda row: kept.append(row) or row)(torch.ones(2, 2, 3))
    return kept[0]


class Breaks(hvd.Compression.none):
    @staticmethod
    def compress(tensor):
        raise KeyError("scale")


NO_TENSORS = [
    ("nothing", lambda: None), ("a list", lambda: [1.0]),
    ("complex", lambda: torch.ones(2, 3, dtype=torch.complex32)), ("freed", freed), ("a freed view", freed_view),
    ("shortened", shortened), ("meta", lambda: torch.ones(2, 3, device="meta")), ("fake", fake), ("wrapped", wrapped),
    ("quantised", lambda: torch.quantize_per_tensor(ones(), 0.1, 0, torch.qint8)), ("another shape", lambda: torch.ones(3)),
]  # fmt: skip
IN_PLACE = [("zeros of autograd", lambda: torch._efficientzerotensor((2, 3)))]
OPERATIONS = {
    "allreduce": lambda tensor, **more: hvd.allreduce(tensor, **more),
    "allreduce_async": lambda tensor, **more: hvd.synchronize(hvd.allreduce_async(tensor, **more)),
    "allreduce_": lambda tensor, **more: hvd.allreduce_(tensor, **more),
    "allreduce_async_": lambda tensor, **more: hvd.synchronize(hvd.allreduce_async_(tensor, **more)),
    "grouped_allreduce": lambda tensor, **more: hvd.grouped_allreduce([ones(), tensor], **more),
    "grouped_allreduce_async": lambda tensor, **more: hvd.synchronize(hvd.grouped_allreduce_async([ones(), tensor], **more)),
    "grouped_allreduce_": lambda tensor, **more: hvd.grouped_allreduce_([ones(), tensor], **more),
    "allgather": lambda tensor, **more: hvd.allgather(tensor, **more),
    "grouped_allgather": lambda tensor, **more: hvd.grouped_allgather([ones(), tensor], **more),
    "broadcast": lambda tensor, **more: hvd.broadcast(tensor, 0, **more),
    "broadcast_": lambda tensor, **more: hvd.broadcast_(tensor, 0, **more),
    "broadcast_async_": lambda tensor, **more: hvd.synchronize(hvd.broadcast_async_(tensor, 0, **more)),
    "alltoall": lambda tensor, **more: hvd.alltoall(tensor, **more),
    "reducescatter": lambda tensor, **more: hvd.reducescatter(tensor, **more),
    "grouped_reducescatter": lambda tensor, **more: hvd.grouped_reducescatter([ones(), tensor], **more),
    "broadcast_parameters": lambda tensor, **more: hvd.broadcast_parameters({"a": ones(), "b": tensor, "c": ones()}, 0),
}  # fmt: skip


@pytest.fixture(scope="module")
def pair():
    with World(2, stall_abort_seconds=2 * MOST_SECONDS) as world:
        yield world


def both_fail_alike(pair, wrong, right, row):
    texts = pair.run(lambda rank: outcome(wrong if rank == 1 else right))
    assert texts[0] is not None and texts[0] == texts[1], (row, texts)
    assert pair.run(lambda rank: outcome(right)) == [None, None], row


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_tensor_for_the_core(pair, operation):
    call = OPERATIONS[operation]
    for what, make in NO_TENSORS + (IN_PLACE if operation.endswith("_") else []):
        tensor = make()  # some take long to make for the first time
        for named in ({"name": "x"}, {}):
            both_fail_alike(pair, lambda tensor=tensor, named=named: call(tensor, **named), lambda named=named: call(ones(), **named),
                            (operation, what, named))  # fmt: skip


@pytest.mark.parametrize("operation", sorted(OPERATIONS.keys() - {"broadcast_parameters"}))
def test_other_arguments(pair, operation):
    call = OPERATIONS[operation]
    wrong = [{"process_set": None}, {"process_set": rt.ProcessSet([0])}]
    if "reduce" in operation:
        wrong += [{"op": 99}, {"prescale_factor": "no"}, {"weight": -1}]
    if operation.removeprefix("grouped_") == "allreduce":
        wrong += [{"op": hvd.Sum, "average": True}]
    if operation.removeprefix("grouped_") in ("allreduce", "reducescatter"):
        wrong += [{"compression": Breaks}]
    for changed in wrong:
        both_fail_alike(
            pair, lambda changed=changed: call(ones(), **changed), lambda: call(ones()), (operation, changed)
        )


def test_zeros_of_autograd_are_zeros(pair):
    """They have no memory, but values."""
    zeros = torch._efficientzerotensor((2, 3))
    for result in pair.run(lambda rank: hvd.allreduce(zeros if rank == 1 else ones(), op=hvd.Sum)):
        assert torch.equal(result, ones())


def test_state_that_one_rank_cannot_send(pair):
    """One tensor of several, and an optimizer's state that does not pickle: nothing stays in flight."""
    both_fail_alike(pair, lambda: hvd.broadcast_parameters({"a": 3, "b": ones()}, 0),
                    lambda: hvd.broadcast_parameters({"a": ones(), "b": ones()}, 0), "a number")  # fmt: skip

    def state(optimizer):
        return lambda: hvd.broadcast_optimizer_state(optimizer, 1)

    good, bad = (torch.optim.SGD([torch.nn.Parameter(ones())], lr=0.1) for _ in range(2))
    bad.param_groups[0]["hook"] = lambda: None
    both_fail_alike(pair, state(bad), state(good), "a lambda")


def test_buffers_that_one_rank_cannot_send(pair):
    """Something else than a model, and a model that has other buffers."""
    model = torch.nn.BatchNorm1d(3)
    for what, wrong in {"nothing": None, "others": torch.nn.Sequential(torch.nn.BatchNorm1d(3))}.items():
        both_fail_alike(
            pair, lambda wrong=wrong: hvd.broadcast_buffers(wrong), lambda: hvd.broadcast_buffers(model), what
        )


def test_an_input_that_one_rank_cannot_normalise(pair):
    layers = pair.run(lambda rank: hvd.SyncBatchNorm(3))

    def pass_through(rank, *shape):
        return outcome(lambda: layers[rank](torch.randn(*shape)))

    said = pair.run(lambda rank: pass_through(rank, *([3] if rank else [2, 3])))
    assert said[0] is not None and "expected an input of shape (N, C, ...) but found (3,)" in said[0]
    assert said[0] == said[1]
    assert pair.run(lambda rank: pass_through(rank, 2, 3)) == [None, None]


def test_sparse_arguments(pair):
    for changed in ({"op": hvd.Max}, {"process_set": None}, {"prescale_factor": Raises()}, {"weight": "3"}):
        both_fail_alike(pair, lambda changed=changed: hvd.allreduce(ones().to_sparse(), name="s", **changed),
                        lambda: hvd.allreduce(ones().to_sparse(), name="s"), changed)  # fmt: skip


# ---- arguments that mean something elsewhere ----

ALL = ("allreduce", "allreduce_async", "allreduce_", "grouped_allreduce", "reducescatter")
OLDER = ("allreduce", "allreduce_async", "allreduce_", "grouped_allreduce")  # which have Horovod's `average`
ELSEWHERE = [  # what is given, to which operations, the error
    ({"op": torch.distributed.ReduceOp.SUM}, ALL, "op must be one of Average"),
    ({"op": torch.distributed.ReduceOp.PRODUCT}, ALL, "op must be one of Average"),
    ({"op": True}, ALL, "op must be one of Average"),
    ({"op": 1.0}, ALL, "op must be one of Average"),
    ({"op": [1]}, ALL, "op must be one of Average"),
    ({"average": "loss"}, OLDER, "average (deprecated) must be True or False, but is 'loss'"),
    ({"compression": "fp16"}, ("allreduce", "grouped_allreduce"), "compression must be one of Compression.none"),
]


@pytest.mark.parametrize("arguments, operations, words", ELSEWHERE)
def test_what_means_something_elsewhere_is_refused(pair, arguments, operations, words):
    """torch.distributed's constants are equal to integers, which stand for other reductions here."""
    for operation in operations:
        call = OPERATIONS[operation]
        said = pair.run(lambda rank, call=call: outcome(lambda: call(ones(), name="x", **arguments)))
        assert said[0] is not None and words in said[0] and said_alike(said), (operation, said)
    if "average" not in arguments:
        with pytest.raises(ValueError, match=words.split(" one of")[0]):
            hvd.DistributedOptimizer(torch.optim.SGD([ones().requires_grad_()], lr=1.0), **in_mode(arguments))


WRAPPED = [
    ({"gradient_predivide_factor": "x"}, "gradient_predivide_factor must be a number, but is 'x'"),
    ({"gradient_predivide_factor": float("inf")}, "gradient_predivide_factor must be above 0 and finite, but is inf"),
    ({"process_set": 3}, "process_set must be a ringtrain.ProcessSet, but is a int"),
    ({"backward_passes_per_step": 1.5}, "backward_passes_per_step must be an integer, but is 1.5"),
    ({"mode": hvd.ShardedStep(3)}, "ShardedStep: model must be a torch.nn.Module, or None, but is a int"),
]


@pytest.mark.parametrize("arguments, words", WRAPPED)
def test_what_an_optimizer_cannot_be_given_is_told(pair, arguments, words):
    def wrapped(rank):
        return outcome(
            lambda: hvd.DistributedOptimizer(torch.optim.SGD([ones().requires_grad_()], lr=1.0), **arguments)
        )

    assert all(words in said for said in pair.run(wrapped))


def test_a_sampler_is_at_places_that_there_are(pair):
    def on_rank(rank):
        sampler = hvd.DistributedSampler(range(8))
        return [outcome(lambda n=n: sampler.state_dict(samples=n)) for n in (-1, 5, 1.0)] + [
            outcome(lambda: sampler.load_state_dict({"epoch": 0}))
        ]

    for said in pair.run(on_rank):
        assert all("state_dict: samples must be" in each for each in said[:3])
        assert "lacks read, seed, count" in said[3]


def test_a_flag_is_no_root(pair):
    for operation in (hvd.broadcast, hvd.broadcast_):
        said = pair.run(lambda rank, call=operation: outcome(lambda: call(ones(), root_rank=True, name="x")))
        assert said[0] is not None and "root_rank must be an integer, but is True" in said[0] and said_alike(said)
