"""Each pair that the table of modes excludes raises its sentence, on all ranks, before anything is sent: PyTorch's."""

import re

import pytest
import torch
from torch_models import network, sgd

import ringtrain as rt
import ringtrain.torch as hvd
from ringtrain._training.needs import NEEDS, TRAITS
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.testing import World


class Own(hvd.compression.Compressor):
    """A compression of the user's."""


MODES = {
    "gradient_as_bucket_view": hvd.Synchronous(gradient_as_bucket_view=True),
    "LocalSteps": hvd.LocalSteps(every=2),
    "within": hvd.LocalSteps(every=2, within="host"),
    "OneStepLate": hvd.OneStepLate(),
    "ShardedStep": hvd.ShardedStep(),
    "op=Adasum": None,
    "op=PerItem": None,
    "average_aggregated_gradients": None,
}


def wrap(column, parameters=None, make=sgd, **arguments):
    if column.startswith("op="):
        arguments["op"] = getattr(hvd, column.removeprefix("op="))
    elif column.startswith("average"):
        arguments[column] = True
    return hvd.DistributedOptimizer(
        make(network().parameters() if parameters is None else parameters), mode=MODES[column], **arguments
    )


def gives(**arguments):
    return lambda column: wrap(column, **arguments)


def weighs(mode=None, parameters=None, **arguments):
    def count(column):
        own = network().parameters() if parameters is None else parameters()
        hvd.DistributedOptimizer(sgd(own), mode=mode, **arguments).count_samples(3)

    return count


def has_rows(column):
    wrap(column, hvd.ShardedEmbedding(5, 2).parameters())


def has_copies(column):
    optimizer = sgd(network().parameters())
    optimizer._amp_stash = None
    hvd.DistributedOptimizer(optimizer, mode=MODES[column])


def steps_with_a_closure(column):
    wrap(column).step(lambda: 0.0)


def is_of_a_set(column):
    wrap(column, process_set=hvd.add_process_set([0, 1]))


def is_in_a_state(column):
    rt.elastic
    from ringtrain.torch.elastic.transparent import _checked_mode

    _checked_mode(wrap(column))


def is_given_to_lightning(column):
    from ringtrain.lightning.optimizers import checked

    checked("RingtrainStrategy", {"mode": MODES[column]})


def is_given_to_accelerate(column):
    from ringtrain.huggingface.accelerator import adopt

    adopt(object(), {"mode": MODES[column]})


def is_kept_in_a_torch_state(column):
    hvd.elastic.TorchState(optimizer=wrap(column))


PAIRS = {
    ("gradient_as_bucket_view", "own compression"): gives(compression=Own),
    ("gradient_as_bucket_view", "powersgd"): gives(compression=hvd.Compression.powersgd()),
    ("LocalSteps", "sum"): gives(op=hvd.Sum),
    ("LocalSteps", "adasum"): gives(op=hvd.Adasum),
    ("LocalSteps", "per item"): gives(op=hvd.PerItem),
    ("LocalSteps", "averaged passes"): gives(average_aggregated_gradients=True),
    ("LocalSteps", "own compression"): gives(compression=Own),
    ("LocalSteps", "powersgd"): gives(compression=hvd.Compression.powersgd()),
    ("LocalSteps", "sharded embedding"): has_rows,
    ("LocalSteps", "apex"): has_copies,
    ("LocalSteps", "elastic.State"): is_in_a_state,
    ("LocalSteps", "lightning"): is_given_to_lightning,
    ("LocalSteps", "accelerate"): is_given_to_accelerate,
    ("within", "process set"): is_of_a_set,
    ("within", "elastic"): is_kept_in_a_torch_state,
    ("OneStepLate", "adasum"): gives(op=hvd.Adasum),
    ("OneStepLate", "per item"): gives(op=hvd.PerItem),
    ("OneStepLate", "groups"): gives(groups=2),
    ("OneStepLate", "own compression"): gives(compression=Own),
    ("OneStepLate", "powersgd"): gives(compression=hvd.Compression.powersgd()),
    ("OneStepLate", "closure"): steps_with_a_closure,
    ("OneStepLate", "sharded embedding"): has_rows,
    ("OneStepLate", "elastic.State"): is_in_a_state,
    ("OneStepLate", "lightning"): is_given_to_lightning,
    ("OneStepLate", "accelerate"): is_given_to_accelerate,
    ("ShardedStep", "adasum"): gives(op=hvd.Adasum),
    ("ShardedStep", "groups"): gives(groups=2),
    ("ShardedStep", "own compression"): gives(compression=Own),
    ("ShardedStep", "int8"): gives(compression=hvd.Compression.int8),
    ("ShardedStep", "powersgd"): gives(compression=hvd.Compression.powersgd()),
    ("ShardedStep", "closure"): steps_with_a_closure,
    ("ShardedStep", "sharded embedding"): has_rows,
    ("ShardedStep", "elastic"): is_kept_in_a_torch_state,
    ("ShardedStep", "elastic.State"): is_in_a_state,
    ("ShardedStep", "lightning"): is_given_to_lightning,
    ("ShardedStep", "accelerate"): is_given_to_accelerate,
    ("ShardedStep", "not elementwise"): gives(make=torch.optim.LBFGS),
    ("ShardedStep", "differentiable"): gives(make=lambda p: torch.optim.SGD(p, differentiable=True)),
    ("ShardedStep", "device"): lambda column: wrap(column, [torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))]),
    ("op=Adasum", "averaged passes"): gives(average_aggregated_gradients=True),
    ("op=Adasum", "powersgd"): gives(compression=hvd.Compression.powersgd()),
    ("op=Adasum", "sharded embedding"): has_rows,
    ("op=PerItem", "averaged passes"): gives(average_aggregated_gradients=True),
    ("op=PerItem", "powersgd"): gives(compression=hvd.Compression.powersgd()),
    ("op=PerItem", "sharded embedding"): has_rows,
    ("average_aggregated_gradients", "sharded embedding"): has_rows,
    ("count_samples", "sum"): weighs(op=hvd.Sum),
    ("count_samples", "adasum"): weighs(op=hvd.Adasum),
    ("count_samples", "per item"): weighs(op=hvd.PerItem),
    ("count_samples", "powersgd"): weighs(compression=hvd.Compression.powersgd()),
    ("count_samples", "late"): weighs(hvd.OneStepLate()),
    ("count_samples", "sharded embedding"): weighs(parameters=lambda: hvd.ShardedEmbedding(5, 2).parameters()),
}  # fmt: skip


@pytest.fixture(scope="module")
def two():
    with World(2) as world:
        yield world


@pytest.mark.parametrize("pair", PAIRS, ids=" with ".join)
def test_a_pair_that_cannot_be_raises_its_sentence(two, pair):
    column, key = pair
    kind = InvalidArgumentError if TRAITS[key].is_argument else UnsupportedError
    trait, why = re.escape(TRAITS[key].words), re.escape(NEEDS[column][key])
    named = r" \(LBFGS\)" if key == "not elementwise" else ""
    found = rf"{re.escape(column)} cannot be used with {trait}{named}: {why}. Leave one of them out."

    def on_rank(rank):
        with pytest.raises(kind, match=found):
            PAIRS[pair](column)

    two.run(on_rank)


@pytest.mark.parametrize("mode", ["late", hvd.OneStepLate, 1], ids=str)
def test_what_is_no_mode_is_refused(two, mode):
    def on_rank(rank):
        with pytest.raises(InvalidArgumentError, match="DistributedOptimizer: mode must be one of Synchronous"):
            hvd.DistributedOptimizer(sgd(network().parameters()), mode=mode)

    two.run(on_rank)


def test_a_method_without_use_does_nothing_or_says_so(two):
    def on_rank(rank):
        for mode in (None, hvd.OneStepLate()):
            optimizer = hvd.DistributedOptimizer(sgd(network().parameters()), mode=mode)
            optimizer.flush(), optimizer.consolidate_state_dict()
            with pytest.raises(InvalidArgumentError, match=r"Call ringtrain.torch.join\(\) instead"):
                optimizer.join()

    two.run(on_rank)
