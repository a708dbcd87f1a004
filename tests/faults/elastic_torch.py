"""A rank of an elastic job of test_elastic_programs.py: KIND says how it learns, FAULTS who dies where."""

import json
import os
import time

import elastic_faults
import torch
from elastic_faults import slot
from elastic_kinds import BATCH, EPOCHS, Data, Learner

import ringtrain.torch as hvd
from ringtrain.torch.gradients import Group
from ringtrain.torch.modes.adasum import AdasumMode


def strike(place):
    """What is to strike this rank in the open window."""
    elastic_faults.strike(learner.window, place)


def close(rank):
    """Tells who has brought what to the window, and updates."""
    brought = "applied", learner.window, rank, slot, json.dumps(learner.gathered)
    if not learner.kind.sends_in_step:
        print(*brought, flush=True)
    print("made", learner.window, time.time(), flush=True)
    time.sleep(float(os.environ.get("PAUSE", "0")))
    skipped = learner.kind.skipped
    learner.update()
    if learner.kind.sends_in_step:
        print(*brought, flush=True)
    state.window = learner.window
    if learner.kind.skipped > skipped:
        print("skipped", learner.window - 1, flush=True)


_hold = Group.hold


def hold_or_fail(group):
    """Waits for the results of a group, and may lose them then."""
    problem = _hold(group)
    if learner.has_begun:
        strike("holding")
    return problem


_combined = AdasumMode._combined


def combined_or_fail(mode, keeps_inputs):
    """The same of what Adasum has made."""
    combined = _combined(mode, keeps_inputs)
    strike("holding")
    return combined


Group.hold, AdasumMode._combined = hold_or_fail, combined_or_fail
torch.manual_seed(slot)  # the ranks begin with different parameters
learner = Learner(os.environ["KIND"], strike, set(json.loads(os.environ.get("POISONED", "[]"))))
if slot == 0:
    for number, parameter in enumerate(learner.kind.model.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
hvd.init()
learner.distribute()
data = Data(int(os.environ["SAMPLES"]))
sampler = hvd.elastic.ElasticSampler(data)
loader = torch.utils.data.DataLoader(data, BATCH, sampler=sampler)
state = hvd.elastic.State(**learner.values, sampler=sampler, window=0)
for _ in state.epochs(EPOCHS):
    learner.window = state.window  # a rank that joins has got it
    for batch in loader:
        if not learner.gathered:
            elastic_faults.await_joiners(learner.window)
        rank = hvd.rank()  # within the window others may die, but those that are left keep their order
        if learner.train_on(*batch):
            close(rank)
    if learner.gathered:  # too few for a whole window
        rank = hvd.rank()
        learner.cut_short(lambda rank=rank: close(rank))
print("end", learner.end(), flush=True)
