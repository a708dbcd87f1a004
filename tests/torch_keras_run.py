"""What test_keras_torch_backend.py runs in a process with KERAS_BACKEND=torch; it prints "trained" if all is well."""

import keras
import keras_runs as runs
import numpy as np
import torch

import ringtrain as rt
import ringtrain.keras as hvd
import ringtrain.torch
from ringtrain.testing import World

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
        hvd.DistributedOptimizer(inner) if outside else inner, initial_scale=64.0)
    model.compile(optimizer if outside else hvd.DistributedOptimizer(optimizer), "mse")
    x = runs.share_of(rank, 2, runs.X).copy()
    if rank == 1:
        x[6:9] = np.inf
    model.fit(x, runs.share_of(rank, 2, runs.Y), batch_size=6, shuffle=False, verbose=0, callbacks=runs.start_callbacks())
    return runs.trained(model), float(model.optimizer.dynamic_scale)


for outside in (False, True):
    with World(2) as world:
        (one, scale), (other, same) = world.run(overflow, outside)
    runs.assert_same_bits([one, other])
    assert scale == same == 32.0 and all(np.isfinite(weight).all() for weight in one.weights)
print("trained")
