"""What the command line makes of an elastic job; tests/faults/test_elastic.py runs them."""

import pytest

from ringtrain.launch import cli, planning
from ringtrain.launch.authority import Rules
from ringtrain.launch.hosts import HostsError


def plan_of(*arguments, **environment):
    given = cli.ringtrainrun.make_context("ringtrainrun", [*arguments, "true"]).params
    return given, planning.make_plan(given, environment)


@pytest.mark.parametrize(
    "arguments, rules, ranks",
    [
        (["-np", "2:4"], Rules(2, 600.0, 10.0, 600.0, 0), 4),
        (["-np", "4"], Rules(4, 600.0, 10.0, 600.0, 0), 4),
        (["-H", "localhost:3"], Rules(3, 600.0, 10.0, 600.0, 0), 3),
        (["-np", "4", "--min-np", "2", "--max-num-proc", "5"], Rules(2, 600.0, 10.0, 600.0, 0), 5),
        (["-np", "1:2", "--elastic-timeout", "60", "--reset-limit", "3"], Rules(1, 60.0, 10.0, 600.0, 3), 2),
        (["-np", "1:2", "--blacklist-cooldown-range", "2.5", "60"], Rules(1, 600.0, 2.5, 60.0, 0), 2),
        (
            ["-np", "1:2", "--notice-signal", "usr1", "--notice-grace", "5"],
            Rules(1, 600.0, 10.0, 600.0, 0, 5.0, ("SIGTERM", "SIGUSR1")),
            2,
        ),
        (["-np", "1:2", "--launcher-grace", "5"], Rules(1, 600.0, 10.0, 600.0, 0, launcher_grace=5.0), 2),
        (["-np", "2:4", "--batch", "constant"], Rules(2, 600.0, 10.0, 600.0, 0, planned=4), 4),
        (["-np", "2:4", "--max-np", "6", "--batch", "constant"], Rules(2, 600.0, 10.0, 600.0, 0, planned=6), 6),
        (["-np", "2:4", "--batch", "rank"], Rules(2, 600.0, 10.0, 600.0, 0), 4),
        (["-np", "2:8", "--host-discovery-script", "echo localhost:2"], Rules(2, 600.0, 10.0, 600.0, 0), 8),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_rules(arguments, rules, ranks):
    given, plan = plan_of("--elastic", *arguments)
    slots = ranks if plan.script is None else 2  # of which others may come
    assert (plan.elastic, plan.ranks, sum(host.slots for host in plan.hosts)) == (rules, ranks, slots)
    assert plan.settings["RINGTRAIN_TRANSPORT"] == "tcp" and planning.idle_flags(given) == []


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["-np", "2:4"], "-np 2:4: a range of ranks needs --elastic"),
        (["--elastic", "-np", "2:4", "--transport", "mpi"], "--elastic: the transport must be tcp"),
        (["--elastic", "-np", "2", "--elastic-timeout", "soon"], "--elastic-timeout 'soon': it must be a number"),
        (["--elastic", "-np", "2", "--reset-limit", "-1"], "--reset-limit '-1': it must be a number"),
        (["--elastic", "-np", "2", "--min-np", "3"], "--elastic: the range of ranks must begin"),
        (["--elastic", "-np", "2", "--min-np", "some"], "--min-np 'some': it must be a whole number"),
        (["--elastic", "-np", "2", "--function-folder", "x"], "--elastic: it must be given with a command"),
        (["--elastic", "-np", "2:4", "-H", "localhost:3"], "-np 4 needs 4 slots, but there are 3"),
        (["-np", "2", "--notice-grace", "3"], "--notice-grace: it needs --elastic"),
        (["-np", "2", "--launcher-grace", "3"], "--launcher-grace: it needs --elastic"),
        (["-np", "2", "--batch", "constant"], "--batch: it needs --elastic"),
        (
            ["--elastic", "-np", "2", "--notice-signal", "KILL"],
            "--notice-signal 'KILL': it must be one of SIGTERM, SIGUSR1",
        ),
        (["-np", "2", "--host-discovery-script", "x"], "without --elastic the hosts must be known at the start"),
        (["--elastic", "-np", "2", "--host-discovery-script", "x", "-H", "a"], "it must name the hosts alone"),
        (["--elastic", "--host-discovery-script", "x"], "-np MIN:MAX must say how many"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be(arguments, words):
    with pytest.raises(HostsError) as met:
        plan_of(*arguments)
    assert words in str(met.value)


def test_a_layout_of_hosts_and_an_mpi_are_refused():
    for variables in {"RINGTRAIN_HOST_LAYOUT": "1+1"}, {"RINGTRAIN_TRANSPORT": "mpi"}:
        with pytest.raises(HostsError, match="--elastic"):
            plan_of("--elastic", "-np", "2", **variables)


def test_without_the_flag_nothing_has_changed():
    given, plan = plan_of("-np", "2", "--min-np", "1", "--reset-limit", "x")
    assert plan.elastic is None and plan.ranks == 2 and "RINGTRAIN_TRANSPORT" not in plan.settings
    assert planning.idle_flags(given) == [
        "--min-np, --reset-limit without --elastic: accepted, but without effect here."
    ]


@pytest.mark.parametrize("text", ["0", "4:2", "1:", ":2", "x", "1:2:3", "-1"])
def test_what_is_no_number_of_ranks(text):
    with pytest.raises(Exception, match="Invalid value|range|integer|MIN:MAX|valid") as met:
        plan_of("--elastic", "-np", text)
    assert type(met.value).__name__ == "BadParameter"
