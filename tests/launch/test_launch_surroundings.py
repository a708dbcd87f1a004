"""What a launcher meets on other people's machines: limits, names, users, signals, scripts."""

import ctypes
import json
import os
import re
import resource
import shlex
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import needs
import pytest
from environments import rank_environment, ringtrainrun

from ringtrain._rendezvous import at_rank_zero, by_address, server
from ringtrain._runtime import exits, inquiries
from ringtrain.launch import cli, discovery, planning, preflight, srun
from ringtrain.launch.agent import host_networks
from ringtrain.launch.agent.processes import LeftGroups
from ringtrain.launch.discovery import HostScript, ScriptError
from ringtrain.launch.host_errors import HostBusyError
from ringtrain.launch.hosts import HostsError, is_this_host
from ringtrain.launch.shells import Ssh
from ringtrain.launch.top import printable

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0


def await_true(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---- processes ----


# Steps that make a shell of root's namespaces such a container.
CONTAINERS = {
    "only processes in /proc": "mount -t proc -o subset=pid proc /proc || exit 77; cd /; exec",
    "no folder to write, no user, no home": """
        mount --bind /tmp /tmp; mount --bind /var/tmp /var/tmp
        for folder in / /tmp /var/tmp; do mount -o remount,ro,bind $folder; done
        cd /; exec unshare --user --map-user=54321 --map-group=54321 env -u HOME
    """.strip(),
}


@needs.root
@pytest.mark.parametrize("container", CONTAINERS)
def test_containers_that_lack_something(container):
    """An elastic job, which keeps a record of its own; and one that a function is run in, which has a folder for it."""
    program = "import ringtrain as rt; rt.init(); print('sum', rt.allreduce(1.0, 'x', op=rt.Sum))"
    run = "import os, ringtrain; print(ringtrain.run(os.getuid, num_proc=1))"
    lines = [
        ringtrainrun("tcp", 2, "--elastic", "python", "-c", program),
        [sys.executable, "-c", run],
    ]
    for line in lines:
        steps = f"{CONTAINERS[container]} {shlex.join(line)}"
        apart = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", steps]
        done = subprocess.run(apart, env=rank_environment(PYTHONPATH=str(ROOT), RINGTRAIN_TRANSPORT="tcp"),
                              capture_output=True, text=True, timeout=PATIENCE)  # fmt: skip
        if done.returncode == 77:
            pytest.skip(f"needs Linux 5.8, whose /proc may list processes alone: {done.stderr}")
        user = 54321 if "user" in container else 0
        said = [f"[{user}]"] if line is lines[1] else ["[0] sum 2.0", "[1] sum 2.0"]
        assert done.returncode == 0 and sorted(done.stdout.splitlines()) == said, done.stderr


@contextmanager
def file_server_that_hangs(folder):
    """Mounts a file system in user space that answers nothing; yields what is set once somebody asks it."""
    asked = threading.Event()
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir()
    server = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"hangs", os.fsencode(folder), b"fuse", 0, options):
        os.close(server)
        pytest.skip(f"needs a kernel that mounts file systems in user space: {os.strerror(ctypes.get_errno())}")

    def serve():
        with suppress(OSError):
            while True:
                _, kind, number = struct.unpack("IIQ", os.read(server, 1 << 17)[:16])
                if kind == 26:  # FUSE_INIT, in the form of version 7.22
                    head, limits = struct.pack("IiQ", 40, 0, number), struct.pack("HHI", 0, 0, 4096)
                    os.write(server, head + struct.pack("IIII", 7, 22, 0, 0) + limits)
                else:
                    asked.set()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield asked
    finally:
        libc.umount2(os.fsencode(folder), 1 | 2)  # MNT_FORCE, MNT_DETACH: whoever waits gets an error
        thread.join()
        os.close(server)


@needs.root
@needs.machine("" if os.path.exists("/dev/fuse") else "needs /dev/fuse: modprobe fuse")
def test_a_child_that_waits_in_the_kernel_is_named(tmp_path):
    """No signal ends it. The job ends without it, well as it did, and says where to look."""
    program = f"""
        import os, pathlib, time
        if os.fork() == 0:
            os.stat({str(tmp_path / "mounted" / "file")!r})
        elif not print("ready", flush=True):
            while not pathlib.Path({str(tmp_path / "asked")!r}).exists():
                time.sleep(0.01)
    """
    line = ringtrainrun("tcp", 1, sys.executable, "-c", textwrap.dedent(program))
    with file_server_that_hangs(tmp_path / "mounted") as asked:
        job = subprocess.Popen(line, env=rank_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert asked.wait(PATIENCE)
        (tmp_path / "asked").touch()
        said, complaints = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0 and said == "[0] ready\n", complaints
    assert re.search(r"not ended: process \d+ \(python.*\) of rank 0 \(host ", complaints), complaints


def test_a_group_in_which_nobody_is_left_is_let_go():
    """Its number may be that of a stranger's processes by then."""
    ended, living = (subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2))
    ended.kill()
    ended.wait()
    groups = LeftGroups()
    groups.numbers = {ended.pid: 0, living.pid: 1}
    groups.look()
    assert groups.numbers == {living.pid: 1} and groups.look_at < time.monotonic() + PATIENCE
    living.kill()
    living.wait()
    groups.look()
    assert groups.numbers == {} and groups.look_at == float("inf")


SAVES = textwrap.dedent("""
    import os, signal, sys, time
    def save(number, frame):
        time.sleep(0.5)
        print("saved", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    print("ready", flush=True)
    time.sleep(60)
""")


def test_a_signal_that_comes_twice_at_once_is_one(tmp_path):
    """`timeout` sends it to its child, and then to the group; a second one would kill ranks that save."""
    launcher = subprocess.Popen(
        ringtrainrun("tcp", 1, sys.executable, "-c", SAVES),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=rank_environment(),
    )  # fmt: skip
    assert launcher.stdout.readline() == "[0] ready\n"
    for _ in range(2):
        launcher.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    said, complaints = launcher.communicate(timeout=PATIENCE)
    assert said == "[0] saved\n" and launcher.returncode == 143, complaints


@needs.root
def test_the_first_process_of_a_container_ends_by_a_signal(tmp_path):
    """Before the job runs, too: nothing ends such a process by default."""
    mark = tmp_path / "asked"
    command = ["-m", "ringtrain.launch", "--elastic", "-np", "2:4", "--host-discovery-script", f"touch {mark}", "true"]
    outer = subprocess.Popen(
        ["unshare", "--pid", "--fork", sys.executable, *command], env=dict(os.environ, PYTHONPATH=str(ROOT)),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    await_true(mark.exists)
    (inner,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
    os.kill(int(inner), signal.SIGTERM)
    assert outer.wait(PATIENCE) == 128 + signal.SIGTERM


# ---- hosts ----


def test_more_targets_than_descriptors(monkeypatch):
    """Of hosts that do not say who they are; each is told as that."""
    monkeypatch.setattr(host_networks, "SECONDS_TO_CONNECT", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=2000) as listener:
        targets = [("127.0.0.1", listener.getsockname()[1], "00")] * (2 * host_networks.AT_ONCE + 10)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + host_networks.AT_ONCE + 20, before[1]))
        try:
            assert host_networks.connect_all(targets) == ["no answer"] * len(targets)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_hosts_that_take_no_more_logins_are_asked_again(monkeypatch):
    answers = [HostBusyError("MaxStartups"), HostBusyError("MaxStartups"), {"name": "node-b"}]
    opened = []

    def describe(*_):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(preflight, "_describe", describe)
    monkeypatch.setattr(preflight, "SECONDS_TO_TRY_AGAIN", 0.01)
    agent, plan = SimpleNamespace(open=lambda: opened.append(1)), SimpleNamespace(hosts_come_late=False)
    found = preflight._describe_when_it_is_there(agent, plan, None, {}, time.monotonic() + PATIENCE)
    assert found == {"name": "node-b"} and len(opened) == 2


@needs.package("openssh-client", "ssh")
def test_nothing_of_a_users_configuration_hangs_on_an_agents_ssh(tmp_path):
    settings = tmp_path / "config"
    master = "ControlMaster auto\n ControlPath ~/.ssh/master-%h"
    settings.write_text(f"Host *\n {master}\n RemoteCommand top\n LocalForward 8000 localhost:8000\n")
    line = ["ssh", "-G", "-F", str(settings), *Ssh().options, "node-b"]
    said = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert "controlmaster false" in said and "master-" not in said
    assert "remotecommand top" not in said and "clearallforwardings yes" in said


@needs.root
def test_an_address_that_one_may_bind_to_is_not_therefore_here():
    """With net.ipv4.ip_nonlocal_bind, as keepalived sets it, each address of the world may be bound to."""
    told = "from ringtrain.launch.hosts import is_this_host as is_; print(is_('10.9.9.77'), is_('127.0.0.1'), is_('10.9.9.1'))"
    steps = f"""
        ip link set lo up && ip address add 10.9.9.1/24 dev lo && sysctl -q -w net.ipv4.ip_nonlocal_bind=1
        {sys.executable} -c "{told}"
    """
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", steps], env=dict(os.environ, PYTHONPATH=str(ROOT)), capture_output=True, text=True
    )  # fmt: skip
    assert done.stdout.split() == ["False", "True", "True"], done.stderr
    assert is_this_host("localhost") and is_this_host(socket.gethostname())


def test_an_allocation_without_scontrol_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        HostsError, match="SLURM_JOB_NODELIST 'n\\[1-2\\]': scontrol must be there to list its hosts, but: No such"
    ):
        srun.find_hosts({"SLURM_JOB_NODELIST": "n[1-2]"})


def test_an_allocation_of_several_hosts_without_srun_is_refused(monkeypatch, tmp_path):
    """All ranks started on this host, and the exit code was 0. One host needs no srun, nor do hosts that are named."""
    allocation = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "PATH": str(tmp_path),
    }

    def hosts_of(*flags, **variables):
        given = cli.ringtrainrun.make_context("ringtrainrun", ["-np", "2", *flags, "true"]).params
        return [str(host) for host in planning.make_plan(given, {**allocation, **variables}).hosts]

    with pytest.raises(
        HostsError, match="'n\\[1-2\\]': srun must be on PATH to start ranks on the 2 hosts of this allocation"
    ):
        hosts_of()
    assert hosts_of(SLURM_JOB_NUM_NODES="1") == ["localhost:2"] and hosts_of("-H", "n1:2") == ["n1:2"]


NAME = by_address.Address("node-a", 29600)


def test_rank_0_of_a_name_that_is_a_loopback_here_waits_on_every_interface(monkeypatch):
    """Debian gives a host's own name to 127.0.1.1, where no other host can call."""
    monkeypatch.setattr(by_address, "_resolved", lambda address: [(socket.AF_INET, ("127.0.1.1", 29600))])
    assert by_address._place_to_listen(NAME) == (socket.AF_INET, ("0.0.0.0", 29600))
    assert by_address._place_to_listen(by_address.Address("localhost", 29600))[1] == ("127.0.1.1", 29600)


def test_each_address_of_a_name_is_called(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as closed:
        places = [closed.getsockname(), listener.getsockname()]
        closed.close()
        monkeypatch.setattr(by_address, "_resolved", lambda address: [(socket.AF_INET, place) for place in places])
        served = server.Server([listener], b"secret")
        stop = threading.Event()

        def serve():
            while not stop.is_set():
                served.wait(0.01)

        thread = threading.Thread(target=serve)
        thread.start()
        found = by_address.AtAddress(NAME, b"secret").find()
        with closing(at_rank_zero._called(found, time.monotonic() + PATIENCE)) as client:
            assert client.socket.getpeername() == places[1]
        stop.set()
        thread.join()
        served.close()


# ---- scripts, and other users ----


@pytest.mark.parametrize(
    "command, words",
    [("yes", "must print 1 MB at most"), ("sleep 600", "must end within")],
)
def test_a_discovery_script_without_an_end(command, words, monkeypatch):
    monkeypatch.setattr(discovery, "SECONDS_OF_A_RUN", 2.0)
    with pytest.raises(ScriptError, match=words):
        HostScript(command, 1).hosts()


def test_a_discovery_script_may_leave_something_running():
    """Which keeps its pipes open: it has said what it has said when it ends itself."""
    hosts = HostScript("(sleep 60 &) ; echo localhost:2", 1).hosts()
    assert [(host.name, host.slots) for host in hosts] == [("localhost", 2)]


def test_a_terminal_obeys_nothing_of_another_process():
    assert printable("2 ranks \x1b]0;owned\x07 é") == "2 ranks ?]0;owned? é"


@needs.root
def test_a_name_that_a_stranger_has_taken_is_no_job():
    name = f"ringtrain-top-0-{os.getpid()}-abcdef0123456789"
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        taken = socket.socket(socket.AF_UNIX)
        taken.bind(f"\0{name}")
        taken.listen(4)
        os.write(tell, b"1")
        time.sleep(PATIENCE)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"1" and name in Path("/proc/net/unix").read_text()
        assert name not in inquiries.those_who_answer().values()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# ---- what the other ranks print ----

RAISES = textwrap.dedent("""
    import numpy, ringtrain as rt
    rt.init()

    def train():
        rt.allreduce(numpy.ones(3), "a")

    if rt.rank() == 1:
        raise ValueError("no batch")
    train()
""")


@pytest.mark.parametrize("level", ["", "debug"])
def test_ranks_that_lose_another_show_the_frames_of_the_program(level, tmp_path):
    """How this package waited says nothing of the cause, which is on the other rank; who debugs it sees all."""
    program = tmp_path / "train.py"
    program.write_text(RAISES)
    done = subprocess.run(
        ringtrainrun("tcp", 2, sys.executable, str(program)),
        env=rank_environment(**({"RINGTRAIN_LOG_LEVEL": level} if level else {})),
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    said = [line.removeprefix("[0] ") for line in done.stderr.splitlines() if line.startswith("[0] ")]
    shown = [line.partition(", in ")[2] for line in said if line.startswith('  File "')]
    assert shown[:2] == ["<module>", "train"] and (len(shown) > 2) == (level == "debug"), done.stderr
    assert any("PeerLostError: rank 1 ended with an uncaught exception: ValueError: no batch" in line for line in said)


@pytest.mark.parametrize(
    "called, shown",
    [
        (["train.py", "/x/site-packages/trainer.py", "train.py", json.__file__, exits.__file__], [0, 1, 2]),
        (["<frozen runpy>", "/x/site-packages/trainer.py", exits.__file__], [0, 1]),
        ([exits.__file__, exits.__file__], [0, 1]),
    ],
)
def test_a_traceback_ends_with_the_programs_last_frame(called, shown):
    call, text = None, "def f(): raise ValueError"
    for file in reversed(called):
        names = {"call": call}
        exec(compile(text, file, "exec"), names)
        call, text = names["f"], "def f(): call()"
    with pytest.raises(ValueError) as met:
        call()
    made = exits.of_the_program(met.tb.tb_next)  # but for this frame
    assert [each.filename for each in traceback.extract_tb(made)] == [called[each] for each in shown]
