"""When gradients leave: where nothing would be idle otherwise, they wait for the end of the backward pass."""

import os
from types import SimpleNamespace

import pytest
import torch

from ringtrain.torch import exchange
from ringtrain.torch.exchange import overlap_pays


def session(hosts, local_size):
    context = SimpleNamespace(local_size=local_size, hosts=hosts)
    return SimpleNamespace(context=context, process_set_id=0)


@pytest.fixture(autouse=True)
def hosts_of_the_session(monkeypatch):
    monkeypatch.setattr(exchange, "hosts_of", lambda context, process_set: context.hosts)


@pytest.mark.parametrize(
    "hosts, ranks, threads, cores, pays",
    [
        (1, 2, 1, 2, False),
        (1, 4, 1, 2, False),
        (1, 2, 4, 8, False),
        (1, 2, 1, 8, True),
        (1, 2, 3, 8, True),
        (2, 2, 1, 2, True),
    ],
)
def test_cores_and_links_that_would_be_idle(monkeypatch, hosts, ranks, threads, cores, pays):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert overlap_pays(session(hosts, ranks), [torch.ones(1)]) is pays


def test_gradients_of_gpus_travel_meanwhile(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    on_gpu = SimpleNamespace(is_cuda=True)
    assert overlap_pays(session(1, 1), [torch.ones(1), on_gpu])
    assert not overlap_pays(session(1, 1), [torch.ones(1)])
