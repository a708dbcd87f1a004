"""Whether gradients travel while the backward pass goes on, or when it has ended. Each rank may choose for itself."""

import os
from collections.abc import Iterable

import torch

from ringtrain._runtime.process_sets import hosts_of
from ringtrain._training.session import Session


def overlap_pays(session: Session, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether something would be idle otherwise: a link between hosts, a GPU's copy engines, a core that no rank computes on.

    Where ranks of one host compute on all of its cores, the threads that add up gradients take the cores from those that
    make them: the same work, and switches between threads on top, for which the others wait.
    """
    context = session.context
    if hosts_of(context, session.process_set_id) > 1 or any(parameter.is_cuda for parameter in parameters):
        return True
    return context.local_size * torch.get_num_threads() < len(os.sched_getaffinity(0))
