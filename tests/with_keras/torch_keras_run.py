"""What test_keras_torch_backend.py runs in a process with KERAS_BACKEND=torch; it prints "trained" if all is well."""

import pathlib
import sys

import elastic_checks
import keras
import keras_drift
import keras_runs as runs
import missing_gradients as table
import numpy as np
import test_keras_embedding as rows
import torch
from missing_gradients_in_keras import weights_after

import ringtrain as rt
import ringtrain.keras as hvd
import ringtrain.torch
from ringtrain.testing import World

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "fuzz"))
from training.with_keras import FUZZER

torch.set_num_threads(1)
assert keras.backend.backend() == "torch" and hvd.Compression is ringtrain.torch.Compression
average = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
for size, make, factor, settings in [
    (2, lambda: keras.optimizers.Adam(0.02, global_clipnorm=0.5), 1, {}),
    (3, lambda: keras.optimizers.SGD(0.05, momentum=0.9), 3, {"op": rt.Sum, "groups": 2}),
    (2, lambda: keras.optimizers.AdamW(0.02), 1, {**average, "compression": hvd.Compression.bf16}),
]:  # fmt: skip
    ranks = runs.distributed_runs(size, make, {"jit_compile": False}, **settings)
    runs.assert_same_bits(ranks)
    runs.assert_close(ranks[0], runs.oracle_run(make, factor), 2e-5, 5e-6)


def overflow(rank, outside):
    model = runs.dense_model(seed=rank)
    inner = keras.optimizers.SGD(0.05)
    optimizer = keras.optimizers.LossScaleOptimizer(
        hvd.DistributedOptimizer(inner) if outside else inner, initial_scale=64.0
    )
    model.compile(optimizer if outside else hvd.DistributedOptimizer(optimizer), "mse")
    x = runs.share_of(rank, 2, runs.X).copy()
    if rank == 1:
        x[6:9] = np.inf
    model.fit(
        x, runs.share_of(rank, 2, runs.Y), batch_size=6, shuffle=False, verbose=0, callbacks=runs.start_callbacks()
    )
    return runs.trained(model), float(model.optimizer.dynamic_scale)


def lacks_gradients(rank, passes, groups):
    weights = [keras.Variable(np.ones(1, "float32")) for _ in range(4)]
    settings = {"backward_passes_per_step": passes, "average_aggregated_gradients": True}
    if groups:
        settings["groups"] = [weights[:3]]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, weight_decay=0.5), **settings)
    own = [torch.tensor([2.0]), None, None, None]
    own[1 + rank] = torch.tensor([4.0])
    for _ in range(2 * passes):
        optimizer.apply(own, weights)
    return [weight.numpy().item() for weight in weights]


def computes(rank):
    assert hvd.allreduce(float(rank)).numpy() == 0.5 and hvd.allgather([rank]).numpy().tolist() == [0, 1]
    return hvd.broadcast(np.arange(2.0), 1).numpy().tolist()


def local_steps(rank):
    model = runs.dense_model(seed=rank)
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), mode=hvd.LocalSteps(every=3, outer=hvd.Outer(0.7, 0.9))),
        "mse",
    )
    return runs.fit(model, rank, 2, callbacks=runs.start_callbacks())


def local_steps_by_hand():
    common, m = runs.dense_model(seed=0).get_weights(), [0.0] * 4
    for part in range(2):
        changes = []
        for rank in range(2):
            model = runs.dense_model()
            model.set_weights(common)
            model.compile(keras.optimizers.SGD(0.05), "mse")
            x, y = (runs.share_of(rank, 2, data)[18 * part :][:18] for data in (runs.X, runs.Y))
            model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
            changes.append([before - after for before, after in zip(common, model.get_weights(), strict=True)])
        change = [(one + other) / 2 for one, other in zip(*changes, strict=True)]
        m = [0.9 * old + new for old, new in zip(m, change, strict=True)]
        common = [x - 0.7 * (new + 0.9 * old) for x, new, old in zip(common, change, m, strict=True)]
    return common


for passes in (1, 2):
    for groups in (None, 2):
        with World(table.RANKS) as world:
            found = world.run(lambda rank: weights_after(rank, table.CHANGING, passes, groups=groups))
        assert found == [table.expected(table.CHANGING, passes)] * table.RANKS, found
    for groups in (False, True):
        with World(2) as world:
            assert world.run(lacks_gradients, passes, groups) == [[-2.75, -2.75, -2.75, 1.0]] * 2
with World(2) as world:
    assert world.run(computes) == [[0.0, 1.0]] * 2
for outside in (False, True):
    with World(2) as world:
        (one, scale), (other, same) = world.run(overflow, outside)
    runs.assert_same_bits([one, other])
    assert scale == same == 32.0 and all(np.isfinite(weight).all() for weight in one.weights)
with World(2) as world:
    one, other = world.run(local_steps)
runs.assert_same_bits([one, other])
for mine, theirs in zip(one.weights, local_steps_by_hand(), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
runs.check_stops_within_an_epoch()


def late(rank, flushes):
    weights = keras.Variable(np.ones((2, 3), "float32"), name="w")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5), mode=hvd.OneStepLate())
    for step in range(3):
        optimizer.apply([torch.full((2, 3), float(rank + step))], [weights])
    if flushes:
        optimizer.flush()
    return keras.ops.convert_to_numpy(weights)


def factored(rank):
    weights = keras.Variable(np.zeros((24, 40), "float32"), name="w")
    how = hvd.Compression.powersgd(rank=2, start_after=1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=how)
    for step in range(8):
        optimizer.apply([torch.from_numpy(drawn(rank, step))], [weights])
    return keras.ops.convert_to_numpy(weights), optimizer.compression_state()["0.w/0"]["residual"]


def drawn(rank, step):
    return np.random.default_rng(10 * step + rank).standard_normal((24, 40)).astype(np.float32)


with World(2, "1+1") as world:
    for flushes, expected in (
        (False, 1 - 0.25 - 0.875),
        (True, 1 - 0.25 - 0.875 - 1.6875),
    ):  # momentum sums .5, 1.5, 2.5
        assert all((found == np.float32(expected)).all() for found in world.run(late, flushes))
    (one, kept), (other, _) = world.run(factored)
assert one.tobytes() == other.tobytes()
exact = sum(drawn(rank, step).astype(np.float64) for rank in range(2) for step in range(8)) / 2
gap, lost = np.linalg.norm(-one.astype(np.float64) + kept - exact), np.linalg.norm(-one.astype(np.float64) - exact)
assert gap < 1e-6 * np.linalg.norm(exact) < 1e-3 * lost, (gap, lost)
elastic_checks.check_all(keras, hvd)
keras_drift.check(keras, hvd)
keras_drift.check_steps_that_survive(keras, hvd)
rows.test_what_befalls_all_gradients_befalls_those_of_rows("accumulated and clipped", True)
rows.test_gradients_of_a_rank_that_are_not_finite_skip_the_step_on_all(True, 1)
FUZZER.hold(range(10))
print("trained")
