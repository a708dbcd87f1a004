"""A loop over NumPy arrays whose steps survive; test_elastic_frameworks.py runs it on the ranks of a job.

With fakes of a GPU they travel from there, each slot's from a device of its own.

Contributions depend on slot and step alone. With PLAN it takes the steps of a plan in a job of a fixed size instead: by
step, the slot whose contribution each rank makes.
"""

import hashlib
import json
import os

import elastic_faults
import numpy as np

import ringtrain as rt
import ringtrain.elastic

SLOTS, EPOCHS, STEPS = 8, 2, 12
slot = elastic_faults.slot
rt.init()
own = 1.0 if slot == 0 else 2.0
weights, momentum = np.full(257, own, np.float32), np.full(257, own, np.float32)


def over_gpu(allreduce):
    """Sends arrays of the slot's fake GPU, and returns what has come as NumPy's."""
    from fakes import driver
    from fakes.array import FakeDeviceArray

    def on_host(found):
        interface = found.__cuda_array_interface__
        values = np.empty(interface["shape"], interface["typestr"])
        driver.use_device(slot)
        driver.copy_to_host(values, interface["data"][0])
        return values

    def summed(arrays, name, op):
        return [on_host(found) for found in allreduce([FakeDeviceArray(array, slot) for array in arrays], name, op)]

    return summed


def apply(step, contributor, allreduce):
    """One step; returns the slots whose contributions are in it."""
    drawn = np.random.default_rng([step, contributor]).standard_normal(len(weights)).astype(np.float32)
    tag = np.eye(SLOTS, dtype=np.float32)[contributor]
    elastic_faults.strike(step, "begun")
    allreduce = over_gpu(allreduce) if "FAKE_DEVICES" in os.environ else allreduce
    sums, tags = allreduce([drawn + weights * np.float32(0.1), tag], "gradient", rt.Sum)
    elastic_faults.strike(step, "released")
    np.multiply(momentum, np.float32(0.5), out=momentum)
    np.add(momentum, sums / np.float32(tags.sum()), out=momentum)
    np.subtract(weights, momentum * np.float32(0.1), out=weights)
    return np.flatnonzero(tags).tolist()


def end(step):
    """Tells the result."""
    print("end", step, hashlib.sha256(weights.tobytes() + momentum.tobytes()).hexdigest(), flush=True)


if "PLAN" in os.environ:
    plan, saved = json.loads(open(os.environ["PLAN"]).read()), elastic_faults.folder / "saved.npz"
    first = 0
    if saved.exists():
        kept = np.load(saved)
        first, weights, momentum = int(kept["step"]), kept["weights"], kept["momentum"]
    else:
        weights[:], momentum[:] = rt.broadcast(weights, 0, "weights"), rt.broadcast(momentum, 0, "momentum")
    for step, contributors in enumerate(plan, first):
        apply(step, contributors[rt.rank()], rt.grouped_allreduce)
    if rt.rank() == 0:
        np.savez(saved, step=first + len(plan), weights=weights, momentum=momentum)
    end(first + len(plan))
else:
    state = rt.elastic.State(weights=weights, momentum=momentum, log=[])
    state.on_change(lambda old, new: print("change", old, new, flush=True))
    for epoch in state.epochs(EPOCHS):
        print("epoch", epoch, state.batch, rt.size(), flush=True)
        for _ in state.steps(STEPS):
            elastic_faults.await_joiners(state.step)
            step = state.step
            slots = apply(step, slot, state.grouped_allreduce)
            state.log = [*state.log, slots]
            print("applied", step, rt.rank(), slot, *slots, flush=True)
    assert state.weights is weights and len(state.log) == state.step == EPOCHS * STEPS
    end(state.step)
