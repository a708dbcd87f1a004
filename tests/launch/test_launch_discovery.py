"""Hosts that an elastic job finds while it runs: the script, and which host is tried when; tests/faults/test_elastic.py has whole jobs."""

import pytest

from ringtrain.launch import cli, discovery
from ringtrain.launch.discovery import HostScript, ScriptError, Supply
from ringtrain.launch.hosts import Host

A, B, C = Host("a", 2), Host("b", 4), Host("c", 1)


def names(hosts):
    return [(host.name, host.slots) for host in hosts]


def test_a_script_names_hosts_with_and_without_slots():
    assert names(HostScript("printf 'node-a\\nnode-b:4\\n'", 2).hosts()) == [("node-a", 2), ("node-b", 4)]


@pytest.mark.parametrize(
    "command, words",
    [
        ("echo gone >&2; exit 3", "end with code 0, but has ended with 3 (gone)"),
        ("true", "it names no host"),
        ("echo node-a:many", "slots must be a number"),
        ("echo ..:2", "but found no host name. Write for example node-a:4."),
        ("sleep 60", "end within 0.2 s, but has not"),
        ("/no/such/program", "end with code 0, but has ended with 127"),
    ],
)
def test_a_script_that_fails_says_how(command, words, monkeypatch):
    monkeypatch.setattr(discovery, "SECONDS_OF_A_RUN", 0.2 if "sleep" in command else 10.0)
    with pytest.raises(ScriptError) as met:
        HostScript(command, 1).hosts()
    assert words in str(met.value) and f"--host-discovery-script '{command}'" in str(met.value)
    assert not str(met.value).endswith("..") and "-H" not in str(met.value)


def test_the_start_waits_for_enough_slots_though_not_for_ever(monkeypatch):
    monkeypatch.setattr(discovery, "SECONDS_BETWEEN_RUNS", 0.01)
    said: list[str] = []
    with pytest.raises(ScriptError, match="must name 3 slots at least, but names 2.*waited for during 0 s"):
        HostScript("echo node-a:2", 1).wait_for(3, 0.0, said.append)
    with pytest.raises(ScriptError, match="has ended with 1.*waited for"):
        HostScript("false", 1).wait_for(1, 0.2, said.append)
    assert len(said) == 2 and "has ended with 1. That is waited for, 0.2 s at most (--elastic-timeout)." in said[1]


@pytest.mark.parametrize("command, seconds", [("./misspelt.sh", "600"), ("exit 3", "1")])
def test_a_script_that_fails_at_the_start_ends_it_in_a_line(command, seconds, capfd):
    """One that no shell can run is not waited for; and no usage is printed: the flags are right."""
    flags = ["--elastic", "-np", "1:2", "--elastic-timeout", seconds, "--host-discovery-script", command]
    assert cli.main([*flags, "true"]) == 125
    said = capfd.readouterr().err
    last = said.splitlines()[-1]
    assert last.startswith(f"ringtrainrun: --host-discovery-script '{command}': it must end with code 0, but has ended")
    assert last.endswith("Check its spelling and its permissions." if "misspelt" in command else "(--elastic-timeout).")
    assert "Usage" not in said


def test_hosts_are_tried_as_they_are_named_within_the_room_there_is():
    supply = Supply([A], 10.0, 600.0)
    assert supply.to_try(0.0, {"a": A}, 4) is None
    supply.named([A, B])
    assert supply.to_try(0.0, {"a": A}, 3) == Host("b", 3)
    assert supply.to_try(0.0, {"a": A}, 0) is None
    supply.named([B])
    assert supply.to_leave({"a": A, "b": B}) == ["a"]


def test_a_host_that_fails_is_tried_again_after_pauses_that_double():
    supply = Supply([A, B], 10.0, 600.0)
    now, present = 100.0, {"a": A}
    for length in (10.0, 20.0, 40.0):
        supply.failed(now, "b")
        assert supply.next_try(present, 4) == now + length
        assert supply.to_try(now + length - 0.1, present, 4) is None
        now += length
        assert supply.to_try(now, present, 4) == B
    supply.named([A])
    assert supply.next_try(present, 4) == float("inf")
    supply.named([A, B])  # anew, but not at once: a script may name it now and then
    supply.failed(now, "b")
    supply.named([A])
    supply.named([A, B])
    assert supply.to_try(now + 9.9, present, 4) is None and supply.to_try(now + 10.0, present, 4) == B
    supply.failed(now, "b")
    assert supply.next_try(present, 4) == now + 10.0


def test_a_host_that_is_to_be_taken_away_is_not_tried_until_it_is_named_anew():
    supply = Supply([A, B], 10.0, 600.0)
    supply.leaves("b")
    supply.failed(50.0, "b")  # its agent has ended
    assert supply.to_try(1e9, {"a": A}, 4) is None
    supply.named([A])
    supply.named([A, B])
    assert supply.to_try(60.0, {"a": A}, 4) == B
