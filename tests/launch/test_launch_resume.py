"""What a launcher leaves to the next one, and what an agent keeps; tests/faults/test_elastic_launcher.py kills launchers."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace

import needs
import pytest

from ringtrain.launch import cli, planning
from ringtrain.launch.agent.succession import Backlog, Succession, make_way, name_beside
from ringtrain.launch.authority import Rules
from ringtrain.launch.discovery import HostScript
from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.hosts import Host, HostsError
from ringtrain.launch.job_folder import JobFolder, Outline
from ringtrain.launch.networks import Chosen
from ringtrain.launch.plan import Plan
from ringtrain.launch.shells import Ssh

PLAN = Plan(
    ["python", "train.py"],
    6,
    [Host("a", 2, is_here=True), Host("b", 4)],
    settings={"RINGTRAIN_TRANSPORT": "tcp"},
    exported={"SECRET": "x"},
    ssh=Ssh(2222, "key"),
    interfaces=("eth0", "10.0.0.0/24"),
    ports=(20000, 20999),
    folder="/somewhere",
    elastic=Rules(2, 60.0, 10.0, 600.0, 0, 5.0, ("SIGTERM", "SIGUSR1"), 7.0),
    script=HostScript("cat hosts", 2),
    spare=(Host("c", 4),),
)
NETWORKS = Chosen(("10.0.0.0/24",), {"a": ("eth0",)}, {"a": ("10.0.0.1",)}, {"a": ()})
OUTLINE = Outline(
    plan=PLAN,
    environment={"NAME": "value\udcff"},
    directory="/",
    socket="socket",
    key="00ff",
    networks=NETWORKS,
    hosts=[(Host("a", 2, True), 0), (Host("b", 4), 2)],
)


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Jobs of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(
    "outline", [OUTLINE, replace(OUTLINE, networks=None, plan=replace(PLAN, script=None))], ids=["all", "one host"]
)
def test_an_outline_is_read_as_it_was_written(outline):
    assert Outline.read(outline.text()) == outline


def test_a_folder_is_for_its_user_alone_and_has_both_records():
    folder = JobFolder.make()
    assert folder.world == b""
    folder.write(OUTLINE)
    folder.world = b"\x06\xff"
    assert {oct(os.stat(f"{folder.path}/{name}").st_mode & 0o777) for name in os.listdir(folder.path)} == {"0o600"}
    assert os.stat(folder.path).st_mode & 0o077 == os.stat(os.path.dirname(folder.path)).st_mode & 0o077 == 0
    folder.close()
    found = JobFolder.find(folder.name)
    assert found.read() == OUTLINE and found.world == b"\x06\xff"
    found.remove()
    assert not os.path.exists(os.path.dirname(folder.path))


def test_a_folder_that_was_removed_is_made_again_with_all_that_it_had():
    """And is held as before."""
    folder = JobFolder.make()
    folder.write(OUTLINE)
    shutil.rmtree(os.path.dirname(folder.path))
    folder.touch()
    folder.world = b"\x06\xff"
    assert folder.read() == OUTLINE and folder.world == b"\x06\xff"
    assert os.stat(folder.path).st_mode & 0o077 == os.stat(os.path.dirname(folder.path)).st_mode & 0o077 == 0
    with pytest.raises(LaunchError, match="is led by one that runs"):
        JobFolder.find(folder.name)
    folder.remove()


def test_a_job_that_is_led_is_refused():
    folder = JobFolder.make()
    with pytest.raises(LaunchError, match="is led by one that runs"):
        JobFolder.find(folder.name)
    folder.close()
    JobFolder.find(folder.name).close()


def test_a_name_that_is_none_and_a_record_that_cannot_be_read():
    for name in ("00000000", "../../etc", ""):
        with pytest.raises(LaunchError, match="there is none of that name"):
            JobFolder.find(name)
    folder = JobFolder.make()
    with pytest.raises(LaunchError, match="must be readable, but: .*No such file"):
        folder.read()
    folder.write(OUTLINE)
    with open(f"{folder.path}/job", "r+") as file:
        text = file.read().replace('"version": "', '"version": "1')
        file.seek(0)
        file.write(text)
    with pytest.raises(LaunchError, match="another version"):
        folder.read()


def test_a_folder_that_others_may_write_is_refused():
    folder = JobFolder.make()
    folder.close()
    os.chmod(os.path.dirname(folder.path), 0o777)
    with pytest.raises(LaunchError, match="for this user alone"):
        JobFolder.find(folder.name)
    with pytest.raises(LaunchError, match="for this user alone"):
        JobFolder.make()


@pytest.mark.parametrize("more", [["true"], ["-np", "2"], ["--elastic"], ["--launcher-grace", "3"]], ids=" ".join)
def test_resume_stands_alone(more, capfd):
    assert cli.main(["--resume", "00000000", *more]) == 2
    assert "--resume: it must stand alone" in capfd.readouterr().err


def test_resume_of_no_job(capfd):
    assert cli.main(["--resume", "00000000"]) == 125
    assert "--resume 00000000: it must name a job of this user's" in capfd.readouterr().err


def test_the_newest_output_is_kept_and_the_rest_counted():
    backlog = Backlog(most=10)
    for number, data in enumerate((b"first", b"second", b"3rd")):
        backlog.add(number, 1, data)
    assert backlog.dropped == 5
    assert list(backlog.take()) == [(1, 1, b"second"), (2, 1, b"3rd")] and not list(backlog.take())
    backlog.add(0, 2, b"x" * 11)
    assert backlog.dropped == 11 and not list(backlog.take())


@needs.root
def test_another_user_takes_nothing_of_the_agents():
    """The name of its socket can be seen by all: many silent connections would use its descriptors up."""
    name = f"ringtrain-test-{os.getpid()}"
    succession = Succession(name, "secret")
    program = "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
    program += f"s.connect('\\0{name}-launcher'); sys.exit(s.recv(100) != b'')"
    with subprocess.Popen([sys.executable, "-c", program]) as stranger:
        before = len(os.listdir("/proc/self/fd"))
        assert succession.accept() is None
        assert len(os.listdir("/proc/self/fd")) == before
    succession.listener.close()
    assert stranger.returncode == 0


def test_who_does_not_know_the_key_gets_nothing():
    """And its descriptors are closed; whoever knows it hands three of them over."""
    name = f"ringtrain-test-{os.getpid()}"
    succession = Succession(name, "secret")
    for key, knows in (("guessed", False), ("", False), ("secret", True)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as claimant:
            claimant.connect(f"\0{name}-launcher")
            before = len(os.listdir("/proc/self/fd"))
            connection = succession.accept()
            socket.send_fds(claimant, [b'{"do": "take over", "window": 1, "key": "%s"}' % key.encode()], [0, 1, 2])
            heard = succession.hear(connection)
            assert (heard is not None) == knows
            if heard is None:
                assert claimant.recv(100) == b"it must know the job's key, but does not"
                assert len(os.listdir("/proc/self/fd")) == before
            else:
                assert len(heard[1]) == 3
                connection.close()
                for descriptor in heard[1]:
                    os.close(descriptor)
    succession.listener.close()
    with pytest.raises(OSError):
        make_way(name, "secret")


@needs.root
def test_the_key_is_for_this_user_alone():
    """The socket's name is known to all, and another user may have taken it."""
    name = f"ringtrainrun-test-{os.getpid()}"
    ready, told = os.pipe(), os.pipe()
    if not (child := os.fork()):
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("\0" + name_beside(name))
            listener.listen()
            os.write(ready[1], b"x")
            os.write(told[1], b"got " + listener.accept()[0].recv(4096))
        os._exit(0)
    os.read(ready[0], 1)
    with pytest.raises(PermissionError, match="its socket belongs to another user"):
        make_way(name, "the key")
    assert os.read(told[0], 4096) == b"got "
    os.waitpid(child, 0)
    for descriptor in (*ready, *told):
        os.close(descriptor)


def test_a_plan_of_the_command_line_outlives_its_launcher():
    given = cli.ringtrainrun.make_context("ringtrainrun", ["--elastic", "-np", "1:2", "-x", "A=b", "true"]).params
    plan = planning.make_plan(given, {})
    assert Outline.read(replace(OUTLINE, plan=plan).text()).plan == plan
    with pytest.raises(HostsError):
        planning.make_plan({**given, "command": ()}, {})
