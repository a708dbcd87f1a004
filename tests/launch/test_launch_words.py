"""What MPI's own programs and libraries say: shown, unless it says nothing or only hides the cause of a failure."""

from __future__ import annotations

import functools
import io
from types import ModuleType, SimpleNamespace

import pytest

from ringtrain.launch import mpich, openmpi
from ringtrain.launch.environment import job_environment
from ringtrain.launch.hosts import Host
from ringtrain.launch.job import Job
from ringtrain.launch.known_ranks import Rank
from ringtrain.launch.mpi_installation import Installation
from ringtrain.launch.output import EngineStream
from ringtrain.launch.plan import Plan
from ringtrain.launch.terminal import Terminal

HARMLESS = b"[node-a:00273] plm:ssh: Warning: setpgid(276,276) failed in parent with errno=Permission denied(13)\n"
NEWS = b"[node-a:00273] plm:ssh: something else\n"


def shown(said: bytes, verbose: bool = False, *ranks: Rank) -> bytes:
    """What the launcher passes on of what the engine says."""
    screen = io.BytesIO()
    job = SimpleNamespace(
        ranks={rank.number: rank for rank in ranks},
        interrupted_by=0,
        ends=SimpleNamespace(lost_hosts=[]),
        plan=Plan(["true"], 1, [Host("node-a", 1)], verbose=verbose),
        terminal=Terminal(screen, screen),
    )
    stream = EngineStream(job.terminal, 2, functools.partial(Job.shows, job), hears=lambda line: None)
    stream.feed(said)
    stream.close()
    return screen.getvalue()


def test_the_engines_words_are_shown_but_for_harmless_ones() -> None:
    assert shown(HARMLESS + NEWS) == NEWS
    assert shown(HARMLESS + NEWS, verbose=True) == HARMLESS + NEWS


def test_after_a_failure_the_engine_only_hides_the_cause() -> None:
    failed = Rank(0, "node-a", outcome=1)
    assert shown(NEWS, False, failed) == b"" and shown(NEWS, True, failed) == NEWS


@pytest.mark.parametrize("verbose", [False, True])
def test_warnings_of_ucx_are_shown_on_request(verbose: bool) -> None:
    settings = mpich.environment(Plan(["true"], 1, [Host("node-a", 1)], verbose=verbose))
    assert (settings.get("UCX_LOG_LEVEL") == "error") == (not verbose)


@pytest.mark.parametrize("engine", [mpich, openmpi])
def test_ucx_takes_no_signal_over_unless_the_user_says_so(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(["true"], 1, [Host("node-a", 1)])
    installation = Installation("", "", engine, "")
    assert job_environment({}, plan, installation)["UCX_DEBUG_SIGNO"] == ""
    assert job_environment({"UCX_DEBUG_SIGNO": "SIGUSR2"}, plan, installation)["UCX_DEBUG_SIGNO"] == "SIGUSR2"
