"""Training that goes on when ranks die and when others come, for NumPy and as the base of the adapters.

``State(weights=...)`` loses no step:

>>> import ringtrain as rt, ringtrain.elastic
>>> rt.init()
>>> state = rt.elastic.State(weights=weights)
>>> for step in state.steps(1000):
...     state.weights -= 0.1 * state.allreduce(gradient(state.weights, step), name="gradient")

With a ``BatchSampler`` each sample of an epoch is in one step, whoever comes and goes:

>>> sampler = rt.elastic.BatchSampler(len(x), batch_size=32)
>>> state = rt.elastic.State(weights=weights, sampler=sampler)
>>> for epoch in state.epochs(90):
...     for indices in sampler:
...         state.weights -= 0.1 * state.allreduce(gradient(state.weights, x[indices]), name="gradient")

``run`` and ``ObjectState`` have Horovod's names, and go back to a commit:

>>> @rt.elastic.run
... def train(state):
...     while state.step < 1000:
...         state.weights -= 0.1 * rt.allreduce(gradient(state.weights), name="gradient")
...         state.step += 1
...         state.commit()
>>> train(rt.elastic.ObjectState(weights=weights, step=0))

The job is started by ``ringtrainrun --elastic``. The same script runs in a job of a fixed size, and alone; there a failure
ends it. docs/elastic.md is the guide.
"""

from ringtrain.elastic.loop import run, run_fn
from ringtrain.elastic.sampler import BatchSampler
from ringtrain.elastic.state import ObjectState, State
from ringtrain.elastic.transparent import TransparentState
from ringtrain.errors import HorovodInternalError, HostsUpdatedInterrupt, WorldChangedError

__all__ = [
    "BatchSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "TransparentState",
    "WorldChangedError", "run", "run_fn",
]  # fmt: skip


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
