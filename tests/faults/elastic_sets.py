"""A loop whose ranks have process sets of their own; test_elastic_sets.py runs it on the ranks of a job.

Before the loop all add the sets of slots 0 and 1, and of slots 0 and 2; a rule makes one of each two ranks. In each step
every set adds up the marks of its members, 2 ** slot: so each sum tells who is in it.
"""

import os

import elastic_faults
import numpy as np

FRAMEWORK = os.environ.get("FRAMEWORK", "numpy")
if FRAMEWORK == "torch":
    import torch

    import ringtrain.torch as hvd

    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
elif FRAMEWORK == "tensorflow":
    import tensorflow as tf

    import ringtrain.tensorflow as hvd
else:
    import ringtrain as hvd
    import ringtrain.elastic
from ringtrain.errors import WorldChangedError

STEPS = 16
slot = elastic_faults.slot
hvd.init()
first = hvd.add_process_set([0, 1])  # of a rank that joins it is what the others have made of theirs
second = hvd.add_process_set([0, 2])
if "MORE" in os.environ and (elastic_faults.folder / f"struck-{slot}-4-first").exists():
    third = hvd.add_process_set([0])
marks = {"torch": lambda mark: torch.tensor([mark]), "tensorflow": lambda mark: tf.constant([mark])}
mark = marks.get(FRAMEWORK, lambda mark: np.array([mark]))(1 << slot)


def halves(size):
    """Two sets, but in a world of one rank."""
    return [range(0, size, 2), range(1, size, 2)]


if FRAMEWORK == "torch":
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(4 * STEPS * 6))
    state = hvd.elastic.State(model=model, optimizer=optimizer, sampler=sampler, process_sets=halves)
else:
    state = hvd.elastic.State(weights=np.zeros(1), process_sets=halves)
even, odd = state.process_sets


def total(process_set, name):
    """Of the marks of its members; on other ranks 0."""
    elastic_faults.strike(state.step, name)
    if not process_set.included():
        return 0
    return int(hvd.allreduce(mark, op=hvd.Sum, name=name, process_set=process_set)[0])


if FRAMEWORK == "tensorflow":
    graphs = {}

    def total(process_set, name):
        elastic_faults.strike(state.step, name)
        if not process_set.included():
            return 0
        if name not in graphs:
            graphs[name] = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name=name, process_set=process_set))
        return int(graphs[name](mark)[0])


def survived(process_set, name):
    """The sum; or why there is none, in the same words on all ranks."""
    try:
        return str(state.survive(lambda: total(process_set, name)))
    except WorldChangedError as problem:
        return str(problem)


def add_again():
    """Has the first set go on with those that are left, if it is lost."""
    if first.lost and first.ranks:
        hvd.add_process_set(first)
        elastic_faults.strike(state.step, "again")


def metrics():
    """What this rank says in a step."""
    elastic_faults.await_joiners(state.step)
    step, words = state.step, []
    if step >= int(os.environ.get("AGAIN_AT", STEPS)):
        state.survive(add_again)
    for name, process_set in {"first": first, "second": second, "even": even, "odd": odd}.items():
        words.append(survived(process_set, name))
    print("said", step, slot, hvd.rank(), hvd.size(), "|".join(words), flush=True)


if FRAMEWORK == "torch":
    for _ in state.epochs(1):
        for _index in sampler:
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            if state.step < STEPS:
                metrics()
            else:
                break
else:
    for _ in state.steps(STEPS):
        state.weights = state.weights + state.allreduce(np.ones(1), "step")
        metrics()
print("end", hvd.size(), *(each.process_set_id for each in (first, second, even, odd)), flush=True)
