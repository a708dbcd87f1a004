"""Jobs without an MPI: how the transport is chosen, who starts the ranks and ends them, and how these are introduced to each other."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from environments import python_with, rank_environment, ringtrainrun
from eventually import eventually

from ringtrain._bootstrap import descriptors
from ringtrain.bench.namespaces import HostNetwork
from ringtrain.launch import openmpi, starter
from ringtrain.launch.agent.host_networks import ipv4_addresses, ipv6_addresses
from ringtrain.launch.agent.processes import Status, command_line_of, descendants_of
from ringtrain.launch.environment import listening, of_host
from ringtrain.launch.hosts import Host
from ringtrain.launch.mpi_installation import Installation
from ringtrain.launch.networks import Chosen
from ringtrain.launch.plan import Plan
from ringtrain.launch.starter import without_mpi

PATIENCE = 60.0
ROOT = Path(__file__).parents[2]
HOST = os.uname().nodename
# Each rank asks to be introduced to the others, as init() does, and says what it was told.
MEET = """
import json, os, sys, time
from ringtrain._rendezvous.meeting import meet
rank, late = int(os.environ["RINGTRAIN_RANK"]), sys.argv[1:]
if str(rank) in late:
    time.sleep(60)
told = meet(rank, [], os.environ["RINGTRAIN_LISTEN"], 1.5)
print(json.dumps([told.rank, told.peers, told.epoch, told.secret.hex()]))
"""


def run(ranks: int, *command: str, flags: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*ringtrainrun("tcp", ranks, *flags), *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=rank_environment(**variables),
    )


@pytest.fixture
def no_mpi(tmp_path: Path) -> str:
    """A folder for PYTHONPATH that hides mpi4py."""
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError(\"No module named 'mpi4py'\")\n")
    return f"{tmp_path}:{ROOT}"


# ---- which transport ----


def launch(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python_with("openmpi"), "-m", "ringtrain.launch", "-np", "2", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=rank_environment(**variables),
    )


CASES = [  # what was wanted; hosts, RDMA on all, mpi4py, what is an MPI's; the transport, and why
    ("tcp", (2, True, True, "--mpi-args"), ("tcp", "")),
    ("mpi", (1, False, False, ""), ("mpi", "")),
    ("auto", (1, False, False, ""), ("tcp", "")),
    ("auto", (4, True, False, ""), ("tcp", "")),
    ("auto", (1, True, True, ""), ("tcp", "there is one host")),
    ("auto", (2, False, True, ""), ("tcp", "not all hosts have RDMA")),
    ("auto", (2, True, True, ""), ("mpi", "all hosts have RDMA")),
    ("auto", (1, False, True, "--mpi-args"), ("mpi", "--mpi-args asks for it")),
    ("auto", (1, False, False, "MPI4PY_LIBMPI"), ("mpi", "MPI4PY_LIBMPI asks for it")),
]


@pytest.mark.parametrize("wanted, facts, decided", CASES)
def test_which_transport_is_taken(wanted: str, facts: tuple, decided: tuple[str, str]) -> None:
    assert starter.decide(wanted, starter.Facts(*facts)) == decided


def test_a_host_without_rdma_turns_the_choice() -> None:
    """The launcher knows its own ports at first, and those of all hosts once it has asked them."""
    over_mpi = Installation("Open MPI v5", "/lib/libmpi.so", openmpi, "mpirun", "1")
    plan = Plan(["true"], 2, [Host("a", 1), Host("b", 1)])
    choice = starter.Starter(plan, over_mpi, {}, "x", starter.Facts(2, rdma=True, has_mpi4py=True))

    def confirmed(choice: starter.Starter, **ports: tuple[str, ...]) -> starter.Starter:
        return choice.confirmed(Chosen(("10.0.0.0/24",), {}, {}, rdma_ports=ports))

    assert confirmed(choice, a=("mlx5_0:1",), b=("mlx5_0:1",)) is choice is choice.confirmed(None)
    turned = confirmed(choice, a=("mlx5_0:1",), b=())
    assert not turned.installation.has_mpi and turned.installation.package == "1"
    assert turned.environment()["RINGTRAIN_TRANSPORT"] == "tcp"
    assert turned.line == (
        "transport tcp, because not all hosts have RDMA. --transport mpi takes the other one; scripts that use mpi4py "
        "themselves need it."
    )
    named = starter.Starter(plan, over_mpi, {}, "")
    assert confirmed(named, a=(), b=()) is named, "what was asked for stays"


def test_auto_is_tcp_on_one_host_and_it_is_said() -> None:
    done = launch("printenv", "RINGTRAIN_TRANSPORT", RINGTRAIN_TRANSPORT="auto")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] tcp", "[1] tcp"]), done.stderr
    assert done.stderr == (
        "ringtrainrun: transport tcp, because there is one host. --transport mpi takes the other one; scripts that "
        "use mpi4py themselves need it.\n"
    )


@pytest.mark.openmpi
def test_auto_is_mpi_where_something_is_an_mpis() -> None:
    done = launch("--mpi-args=--oversubscribe", "printenv", "OMPI_COMM_WORLD_SIZE", RINGTRAIN_TRANSPORT="auto")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 2", "[1] 2"]), done.stderr
    assert done.stderr.splitlines() == [
        "ringtrainrun: transport mpi, because --mpi-args asks for it. --transport tcp takes the other one."
    ]


@pytest.mark.tcp
@pytest.mark.parametrize(
    "script",
    [
        "from mpi4py import MPI; import ringtrain as rt; rt.init()",
        "import ringtrain as rt; rt.init(); from mpi4py import MPI",
    ],
)
def test_mpi4py_in_a_script_without_an_mpi_is_warned_of(script) -> None:
    done = run(2, "python", "-c", script)
    assert done.returncode == 0 and done.stderr.count("but its COMM_WORLD has this rank alone: TCP connects the 2") == 1


@pytest.mark.tcp
@pytest.mark.parametrize(
    "script",
    [
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; import ringtrain as rt; rt.init()",
        "import ringtrain as rt, ringtrain.bench.machine as machine; rt.init(); machine._mpi_version()",
        pytest.param(
            "from lightning_fabric.plugins.environments import MPIEnvironment as asks; asks.detect(); "
            "import ringtrain as rt; rt.init()",
            marks=pytest.mark.long,  # it imports torch
        ),
    ],
)
def test_mpi4py_in_a_script_that_does_not_send_by_it_is_no_matter(script) -> None:
    done = run(2, "python", "-c", script + "; import sys; assert 'mpi4py.MPI' in sys.modules")
    assert (done.returncode, "mpi4py is in use" in done.stderr) == (0, False), done.stderr


# What scripts for Horovod ask before and after init().
ASKS = """
import ringtrain.common.util as util, ringtrain._training.adapter.basics as hvd, ringtrain as rt
assert hvd.mpi_built() or hvd.gloo_built()
assert (hvd.mpi_built(), hvd.mpi_enabled(), hvd.gloo_enabled()) == (False, False, False)
rt.init()
assert (hvd.mpi_enabled(), hvd.gloo_enabled(), util.gloo_built(), rt.size()) == (False, True, True, 2)
"""


@pytest.mark.tcp
def test_scripts_that_ask_for_mpi_or_gloo_run_without_an_mpi() -> None:
    hidden = "import sys, importlib.util as i\nf = i.find_spec\ni.find_spec = lambda n, *a: None if n == 'mpi4py' else f(n, *a)\n"
    done = run(2, "python", "-c", hidden + ASKS)
    assert done.returncode == 0, done.stderr


def test_mpi_must_be_there_if_it_was_asked_for(no_mpi: str) -> None:
    done = launch("--transport", "mpi", "true", PYTHONPATH=no_mpi)
    assert done.returncode == 125 and "no MPI library: mpi4py must find one" in done.stderr
    assert "with --transport tcp" in done.stderr


@pytest.mark.parametrize("way", ["variable", "file", "exported"])
def test_the_transport_is_a_setting_like_others(way: str, no_mpi: str, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("library_options:\n  transport: tcp\n")
    flags = {"variable": [], "file": ["--config-file", str(tmp_path / "settings.yaml")],
             "exported": ["-x", "RINGTRAIN_TRANSPORT=tcp"]}[way]  # fmt: skip
    variables = {"RINGTRAIN_TRANSPORT": "tcp"} if way == "variable" else {}
    done = launch(*flags, "--dry-run", "true", PYTHONPATH=no_mpi, **variables)
    assert done.returncode == 0 and "no MPI: TCP connects the ranks" in done.stderr, done.stderr
    assert "rank.py" not in done.stderr, "the agent starts the command itself"
    assert "because no MPI library" not in done.stderr


@pytest.mark.parametrize(
    "flag, called",
    [
        ("--mpi-args=--tag-output", "--mpi-args '--tag-output'"),
        ("--binding-args=--bind-to core", "--binding-args '--bind-to core'"),
        ("--mpi", "--mpi (controller: mpi)"),
    ],
)
def test_what_is_of_an_mpirun_is_refused_where_there_is_none(flag: str, called: str) -> None:
    done = run(1, "true", flags=(flag,))
    assert done.returncode == 2 and f"{called}: it must be left out with transport tcp" in done.stderr


def test_a_transport_that_does_not_exist_is_refused() -> None:
    done = launch("true", RINGTRAIN_TRANSPORT="udp")
    assert done.returncode == 2 and "RINGTRAIN_TRANSPORT: expected one of auto|mpi|tcp but found 'udp'" in done.stderr


# ---- ranks, which are children of the agents ----

# Rank 0 leaves processes behind and ends; rank 1 has some of its own, and waits until the former are gone.
LEAVES = """
import os, subprocess, sys, time
from pathlib import Path

def leave(name, *how):
    shell = f"{' '.join(how)} sh -c 'echo $$ > {name}.new; mv {name}.new {name}; exec sleep 600' < /dev/null > /dev/null 2>&1 &"
    subprocess.run(["sh", "-c", shell])
    while not Path(name).exists():
        time.sleep(0.01)
    return int(Path(name).read_text())

def lives(process):
    return Path(f"/proc/{process}").exists() and " Z " not in Path(f"/proc/{process}/stat").read_text()

os.chdir(sys.argv[1])
rank = os.environ["RANK"]
in_group, in_session = leave(f"group-{rank}"), leave(f"session-{rank}", "setsid")
hidden = leave(f"hidden-{rank}", "env", "-i", "setsid")
if rank == "1":
    others = [Path(f"{name}-0") for name in ("group", "session")]
    while not all(map(Path.exists, others)) or any(lives(int(other.read_text())) for other in others):
        time.sleep(0.01)
    print("gone", lives(in_group), lives(in_session), lives(hidden), flush=True)
"""


def lives(process: int) -> bool:
    try:
        return Status(process).state != b"Z"
    except OSError:
        return False


@pytest.mark.tcp
def test_what_a_rank_leaves_behind_ends_with_it_and_that_of_others_stays(tmp_path: Path) -> None:
    """In its process group, in a session of its own, and with an empty environment there: that ends with the job."""
    done = run(2, sys.executable, "-S", "-c", LEAVES, str(tmp_path))
    assert done.returncode == 0 and "[1] gone True True True" in done.stdout, done.stdout + done.stderr
    left = [path.name for path in tmp_path.glob("*-?") if lives(int(path.read_text()))]
    assert len(list(tmp_path.glob("*-?"))) == 6 and not left


def below(launcher: int) -> list[int]:
    """Ids of the agent's processes below a launcher, the keeper's first."""
    found = [pid for pid in [launcher, *descendants_of(launcher)] if b"agent/__main__.py" in command_line_of(pid)]
    return sorted(found, key=lambda pid: Status(pid).parent in found)


@pytest.mark.tcp
@pytest.mark.parametrize("victims", [("agent",), ("keeper",), ("rank",), ("agent", "keeper")], ids=" and ".join)
def test_whoever_of_a_host_is_killed_nothing_is_left(victims: tuple[str, ...], tmp_path: Path) -> None:
    """Not even what hides from its group and its environment; but that of whom nobody is left that knows of it."""
    program = LEAVES.replace('if rank == "1":', 'print("ready", flush=True)\nwhile True: time.sleep(1)\nif 0:')
    launcher = subprocess.Popen(
        ringtrainrun("tcp", 2, sys.executable, "-S", "-c", program, str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=rank_environment(),
    )
    assert sorted(launcher.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    keeper, agent = below(launcher.pid)
    ranks = [pid for pid in children_of(agent) if command_line_of(pid).startswith(os.fsencode(sys.executable))]
    assert len(ranks) == 2
    for victim in victims:
        os.kill({"agent": agent, "keeper": keeper, "rank": ranks[0]}[victim], signal.SIGKILL)
    _, said = launcher.communicate(timeout=PATIENCE)
    code, words = (
        (137, r"rank [01] .* was killed by signal 9")
        if victims == ("rank",)
        else (1, "host localhost: the connection was lost")
    )
    assert launcher.returncode == code and re.search(words, said), said
    eventually(lambda: not any(map(lives, [keeper, agent, *ranks])), "all have ended")
    left = [int(path.read_text()) for path in tmp_path.glob("*-?")]
    if len(victims) == 1:
        eventually(lambda: not any(map(lives, left)), "all that they had started has ended")
    for process in filter(lives, left):
        os.kill(process, signal.SIGKILL)


def children_of(process: int) -> list[int]:
    return [pid for pid in descendants_of(process) if Status(pid).parent == process]


@pytest.mark.tcp
def test_there_is_no_process_beside_a_rank() -> None:
    """On a host with N ranks run the launcher, the agent and its keeper, and N programs."""
    program = "import os; print(open(f'/proc/{os.getppid()}/stat').read().split()[3], os.getppid(), flush=True)"
    done = run(3, sys.executable, "-c", program)
    assert done.returncode == 0 and len({line.split(None, 1)[1] for line in done.stdout.splitlines()}) == 1, done.stdout


@pytest.mark.tcp
def test_a_command_that_cannot_be_run_fails_with_the_reason(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("no program")
    program.chmod(0o755)
    done = run(2, str(program))
    assert done.returncode == 126 and f"ringtrainrun: cannot run '{program}': Exec format error." in done.stderr, (
        done.stderr
    )


@pytest.mark.tcp
def test_variables_of_another_engine_do_not_reach_the_ranks() -> None:
    """They would be taken for the rank's own: init() would look for that engine's world."""
    strays = {
        "OMPI_COMM_WORLD_SIZE": "8",
        "PMI_RANK": "3",
        "PMI_SIZE": "8",
        "RINGTRAIN_RANK": "7",
        "RINGTRAIN_LISTEN": "x",
    }
    done = run(1, "python", "-c", "import os; print(sorted(os.environ))", **strays)
    assert done.returncode == 0 and not any(name in done.stdout for name in ("OMPI_COMM", "PMI_")), done.stdout
    assert run(1, "printenv", "RINGTRAIN_RANK", "RINGTRAIN_LISTEN", **strays).stdout == "[0] 0\n[0] 127.0.0.1:0\n"


# ---- how ranks are introduced ----


@pytest.mark.tcp
def test_ranks_are_told_where_the_others_listen_and_one_secret() -> None:
    done = run(3, "python", "-c", MEET)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line.partition(" ")[2]) for line in sorted(done.stdout.splitlines())]
    assert [rank for rank, *_ in told] == [0, 1, 2]
    assert {json.dumps(rest) for _, *rest in told} == {json.dumps([["127.0.0.1:0"] * 3, 1, told[0][3]])}


@pytest.mark.tcp
def test_ranks_that_are_late_are_named_in_the_same_words_on_all() -> None:
    done = run(4, "python", "-c", MEET, "2", "3")
    words = "TimeoutError: init: expected all 4 ranks to call init() within 1.5 s, but ranks 2, 3 did not. Call init()"
    assert done.returncode == 1
    for rank in (0, 1):
        assert re.search(rf"^\[{rank}\] ringtrain.errors.{re.escape(words)}", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.tcp
def test_the_secret_is_in_no_environment_no_command_line_and_no_word_of_the_launcher() -> None:
    """Nor does a process that a rank starts inherit anything through which it could be asked for again unnoticed."""
    program = (
        MEET
        + """
import subprocess
for path in ("environ", "cmdline"):
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/{path}", "rb") as file:
                assert told.secret.hex().encode() not in file.read() or process == str(os.getpid()), (process, path)
        except OSError:
            pass
assert "secret" not in repr(told)
inherited = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False).stdout
assert "socket" not in inherited, inherited
"""
    )
    done = run(2, "python", "-c", program, flags=("--verbose",))
    assert done.returncode == 0, done.stderr
    secret = json.loads(done.stdout.splitlines()[0].partition(" ")[2])[3]
    assert len(secret) == 64 and secret not in done.stderr


@pytest.mark.tcp
def test_two_processes_of_one_rank_do_not_both_meet(tmp_path: Path) -> None:
    """Whichever comes first does; the other rank comes when one of them was refused."""
    program = """
import os, pathlib, sys, time
from ringtrain._rendezvous.meeting import meet
rank, refused = int(os.environ["RINGTRAIN_RANK"]), pathlib.Path(sys.argv[1], "refused")
child = os.fork() if rank == 0 else 0
while rank == 1 and not refused.exists():
    time.sleep(0.01)
try:
    print(meet(rank, [], "127.0.0.1:0", 60).peers, flush=True)
except Exception as error:
    print(type(error).__name__, error, flush=True)
    refused.touch()
if child:
    os.waitpid(child, 0)
"""
    done = run(2, "python", "-c", program, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "[0] UnsupportedError init: one process of rank 0 must call init() at a time, but two have." in done.stdout
    assert done.stdout.count("['127.0.0.1:0', '127.0.0.1:0']") == 2


@pytest.mark.tcp
def test_a_rank_that_waits_for_the_others_ends_with_the_job() -> None:
    program = MEET.replace("1.5", "300").replace("time.sleep(60)", "time.sleep(1); sys.exit(5)")
    done = run(2, "python", "-c", program, "1")
    assert done.returncode == 5
    assert f"rank 1 (host {HOST}) failed with exit code 5" in done.stderr.splitlines()[-1]


@pytest.mark.tcp
def test_a_rank_that_ends_well_before_init_is_named_by_the_launcher() -> None:
    """It has not failed, and those that did have waited for it."""
    program = "import os, sys\nif os.environ['RINGTRAIN_RANK'] == '1': sys.exit(0)\nimport ringtrain as rt; rt.init()"
    done = run(3, "python", "-c", program)
    assert done.returncode == 1 and done.stderr.count("but rank 1 ended before that, with exit code 0.") >= 2, (
        done.stderr
    )
    assert done.stderr.splitlines()[-1] == (
        f"ringtrainrun: rank 1 (host {HOST}) ended with exit code 0 before it called init(), where the other ranks waited "
        "for it; these then failed. Let the program call init() on every rank before it ends, or start only as many ranks "
        "as do."
    )


def test_ranks_listen_on_the_chosen_networks_and_ports_alone() -> None:
    assert listening(["10.0.0.1", "fd00:1::2"], (0, 0)) == "10.0.0.1:0,[fd00:1::2]:0"
    assert listening(["10.0.0.1"], (20000, 20999)) == "10.0.0.1:20000-20999"
    networks = Chosen(("10.0.0.0/24",), {"a": ("eth0",)}, {"a": ("10.0.0.1",)})
    assert of_host("a", networks, without_mpi("1"), {}) == {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}


@needs.hosts
@pytest.mark.tcp
def test_ranks_of_several_hosts_are_started_and_introduced(three_hosts: HostNetwork, tmp_path: Path) -> None:
    """No host has an MPI here; the addresses are those of the network that all share, within the range of ports."""
    (tmp_path / "mpi4py.py").write_text("raise ModuleNotFoundError('hidden')\n")
    program = MEET + "print('at', os.uname().nodename, os.environ['MASTER_ADDR'])"
    done = three_hosts["node-a"].run(
        *[python_with("openmpi"), "-m", "ringtrain.launch", "-np", "3", "-H", "node-b:2,node-c:1"],
        *["--port-range", "21000-21019", "python", "-c", program],
        env=rank_environment(PYTHONPATH=f"{tmp_path}:{ROOT}", RINGTRAIN_TRANSPORT="auto"),
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    told = [json.loads(line.partition(" ")[2]) for line in lines if "at node" not in line]
    [addresses] = {tuple(each[1]) for each in told}
    assert [each.partition(":")[2] for each in addresses] == ["21000-21019"] * 3
    at_b, also_at_b, at_c = (each.partition(":")[0] for each in addresses)
    assert at_b == also_at_b != at_c and all(each.startswith("10.77.0.") for each in (at_b, at_c)), addresses
    assert [line for line in lines if " at node" in line] == [
        f"[{rank}] at {host} {at_b}" for rank, host in enumerate(["node-b", "node-b", "node-c"])
    ]


@pytest.mark.tcp
@pytest.mark.parametrize(
    "name, code", [("nosuch0", 125), ("198.51.100.0/24", 125), ("lo", 0), ("127.0.0.0/8,nosuch0", 0)]
)
def test_interfaces_that_one_host_does_not_have_are_refused_as_on_several(name: str, code: int) -> None:
    done = run(2, "true", flags=("--network-interfaces", name))
    has = [f"{interface} ({address}/{prefix})" for interface, address, prefix in ipv4_addresses() + ipv6_addresses()]
    words = (
        "ringtrainrun: host 'localhost': it must have a network interface with an address that --network-interfaces allows, "
        f"and a free port, but has {', '.join(has) or 'no interface that is up'}. Name one"
    )
    assert done.returncode == code and (done.stderr.startswith(words) if code else done.stderr == "")


# ---- few descriptors ----

# A rank that has opened all that it may, but for so many, when it calls init().
GREEDY = """
import os, resource, sys
spare, hard = int(sys.argv[1]), int(sys.argv[2])
import numpy as np, ringtrain as rt, ringtrain.api
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
taken = []
try:
    while True: taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    for each in taken[:spare]: os.close(each)
rt.init()
print(rt.allreduce(np.ones(1), op=rt.Sum)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64)
"""


@pytest.mark.tcp
@pytest.mark.parametrize("limit, words", [
    (8, "ringtrainrun: limit of open files: it must be at least 19, since 3 are open and 16 more are needed, but is 8. "
        "Raise it with: ulimit -n 64\n"),
    (20, "ringtrainrun: host 'localhost': limit of open files '20': it must be at least 21 there, for 2 ranks, but is less. "
         "Raise it with: ulimit -n 64.\n"),
    (24, ""),
])  # fmt: skip
def test_a_launcher_that_may_open_few_files_says_what_it_needs(limit: int, words: str) -> None:
    program = "import numpy as np, ringtrain as rt; rt.init(); assert rt.allreduce(np.ones(1), op=rt.Sum)[0] == 2"
    done = subprocess.run(
        ["prlimit", f"--nofile={limit}", *ringtrainrun("tcp", 2, "python", "-c", program)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=rank_environment(),
    )
    assert (done.returncode, done.stderr) == (125 if words else 0, words)


ONE_DIES = """
import os, pathlib, signal, sys
import numpy as np, ringtrain as rt, ringtrain.elastic
rt.init()
struck = pathlib.Path(sys.argv[1], "struck")

@rt.elastic.run
def train(state):
    while state.step < 5 or rt.size() < 2:
        rt.allreduce(np.ones(1), "x")
        if rt.rank() == 1 and state.step == 3 and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state.step += 1
        state.commit()

train(rt.elastic.ObjectState(step=0))
"""


@pytest.mark.tcp
@pytest.mark.parametrize("limit, is_enough", [(24, False), (25, True)])
def test_an_elastic_job_needs_more_files_than_another_one(limit: int, is_enough: bool, tmp_path: Path) -> None:
    """Each rank has a pipe of words for each start; what does not do for that is refused, and what does is enough for a death."""
    flags = ("--elastic", "--blacklist-cooldown-range", "0.1", "0.1")
    done = subprocess.run(
        ["prlimit", f"--nofile={limit}", *ringtrainrun("tcp", "1:2", *flags, "python", "-c", ONE_DIES, str(tmp_path))],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=rank_environment(),
    )
    assert done.returncode == (0 if is_enough else 125), done.stderr
    assert ("limit of open files '24': it must be at least 25 there, for 2 ranks" in done.stderr) != is_enough, (
        done.stderr
    )
    assert (tmp_path / "struck").exists() == is_enough and "Too many open files" not in done.stderr, done.stderr


@pytest.mark.tcp
def test_a_rank_that_has_used_up_its_descriptors_is_told_at_init() -> None:
    done = run(2, "python", "-c", GREEDY, "4", "64")
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"UnsupportedError: init: limit of open files: it must be at least 70, since 60 are open and 10 more are needed, but is "
        r"64\. Raise it with: ulimit -n 128",
        done.stderr,
    ), done.stderr


@pytest.mark.tcp
def test_the_soft_limit_is_raised_where_the_hard_one_allows() -> None:
    done = run(2, "python", "-c", GREEDY, "0", "256")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] 2.0 True", "[1] 2.0 True"]), done.stderr


@pytest.mark.parametrize("wanted, soft, hard, limit", [
    (20, 64, 128, 64), (100, 64, 128, 100), (200, 64, 128, 128), (200, 64, -1, 200), (200, -1, -1, -1), (64, 64, 64, 64),
])  # fmt: skip
def test_how_far_a_limit_is_raised(wanted: int, soft: int, hard: int, limit: int) -> None:
    assert descriptors.limit_for(wanted, soft, hard) == limit


# ---- scripts that were written for torchrun ----

GLOO = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * dist.get_rank()
dist.all_reduce(total)
print(dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], total.item(), flush=True)
dist.destroy_process_group()
"""


# An MPI's engine carries the launcher's variables as it does all others: four processes of PyTorch for one more of them.
@pytest.mark.parametrize("mpi", [
    pytest.param("openmpi", marks=[pytest.mark.openmpi, pytest.mark.long]),
    pytest.param("mpich", marks=[pytest.mark.mpich, pytest.mark.long]),
    pytest.param("tcp", marks=pytest.mark.tcp),
])  # fmt: skip
def test_a_script_for_torchrun_runs_under_ringtrainrun(mpi: str) -> None:
    done = subprocess.run(
        ringtrainrun(mpi, 2, "python", "-c", GLOO),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=rank_environment(),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 2 0 2 1.0", "[1] 1 2 1 2 1.0"]


@pytest.mark.tcp
def test_what_the_user_has_set_for_torch_stays() -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    done = run(1, "printenv", *names, flags=("-x", "RANK=a", "-x", "MASTER_ADDR=b"), WORLD_SIZE="c", MASTER_PORT="d")
    assert done.stdout.split("\n")[:-1] == [f"[0] {value}" for value in ["a", "c", "0", "1", "b", "d"]]


@pytest.mark.parametrize("end", ["", pytest.param("hvd.shutdown()\n", marks=pytest.mark.long)], ids=["", "shutdown"])
def test_a_script_whose_optimizer_is_a_global_ends_without_a_word(end: str) -> None:
    """It outlives the modules of ringtrain, and the world with it."""
    script = (
        "import torch, ringtrain.torch as hvd\n"
        "hvd.init()\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "optimizer.step()\n"
    )
    done = run(2, "python", "-c", script + end, OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
