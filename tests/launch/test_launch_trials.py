"""Hosts that an elastic job tries, one at a time, by a thread: whatever goes wrong there, the next one is tried."""

import threading
from types import SimpleNamespace

import pytest

from ringtrain.launch import cli, planning, trials
from ringtrain.launch.discovery import Supply
from ringtrain.launch.elastic_hosts import ElasticHosts
from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.hosts import Host
from ringtrain.launch.networks import Chosen
from ringtrain.launch.trials import Trials

HOST, NETWORKS = Host("b", 2), Chosen(("10.0.0.0/24",), {})


def raising(problem):
    def fail(*_, **__):
        raise problem

    return fail


NOTHING_SERVES = raising(AssertionError("nothing serves"))


class Tried:
    """A host that is tried. check: as `check_hosts`. have_serve: as that of `HostSetup`.

    Attributes:
        left: agents that were hung up on.
    """

    def __init__(self, monkeypatch, check, have_serve=NOTHING_SERVES):
        given = cli.ringtrainrun.make_context("ringtrainrun", ["--elastic", "-np", "1:3", "true"]).params
        plan, self.left = planning.make_plan(given, {}), []
        monkeypatch.setattr(trials, "check_hosts", check)
        monkeypatch.setattr(trials, "hang_up_on", self.left.extend)
        setup = SimpleNamespace(plan=plan, installation=None, environment={}, have_serve=have_serve)
        woken = threading.Event()
        self.trials = Trials(setup, Supply([HOST], 10.0, 600.0), ElasticHosts(), woken.set)
        self.trials.begin(HOST, NETWORKS)
        assert not self.trials.is_free
        assert woken.wait(30.0), "the launcher is told what has come of the host"
        (self.trial,) = self.trials.take(None, lambda: False)


@pytest.mark.parametrize(
    "problem, says",
    [
        (LaunchError("host 'b': it must have ringtrain."), "host 'b': it must have ringtrain."),
        (OSError(24, "Too many open files"), "[Errno 24] Too many open files"),
        (
            ZeroDivisionError("a fault of ours"),
            "host 'b': it could not be tried: ZeroDivisionError('a fault of ours').",
        ),
    ],
    ids=["known", "of the system", "unknown"],
)
def test_a_trial_that_raises_is_told_and_the_next_host_is_tried(problem, says, monkeypatch):
    tried = Tried(monkeypatch, raising(problem))
    assert tried.trial == (HOST, None, None, says)
    assert tried.trials.is_free and tried.trials.next_host(0.0) == HOST


def test_an_agent_that_does_not_come_to_serve_is_hung_up_on(monkeypatch):
    agent = SimpleNamespace(host=HOST)
    tried = Tried(monkeypatch, lambda *_, **__: ([agent], NETWORKS, {}), raising(KeyError("serve")))
    assert tried.trial.agent is None and tried.trial.problem == "host 'b': it could not be tried: KeyError('serve')."
    assert tried.left == [agent] and tried.trials.is_free
