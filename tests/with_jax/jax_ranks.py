"""Run by the launcher on two ranks: large and small programs, then rank 1 is stopped while rank 0 has programs under way."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np

import ringtrain.jax as hvd

hvd.init()
rank = hvd.rank()
arrays = [jnp.full(50_000, number + rank, jnp.float32) for number in range(30)]


def step(arrays):
    return [hvd.allreduce(jnp.sin(array), op=hvd.Sum) for array in arrays]


compiled = jax.jit(step)
for _ in range(3):  # calls are under way together: none waits for the one before
    results = compiled(arrays)
for number, result in enumerate(results):
    np.testing.assert_allclose(result, np.sin(number) + np.sin(number + 1), atol=1e-5)
print("sums are right", flush=True)
assert hvd.allreduce_gradients({"w": arrays[3]})["w"][0] == 3.5

hvd.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    for _ in range(40):  # each takes the results of the one before, as steps of training do
        arrays = compiled(arrays)
    jax.block_until_ready(arrays)
except (jax.errors.JaxRuntimeError, ValueError) as problem:
    print(f"told: {problem}", flush=True)
    raise
