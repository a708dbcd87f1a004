"""What an agent tells the launcher, among what others write to the same connection, and how its own faults are told."""

import os
import selectors
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringtrain.launch import reach
from ringtrain.launch.agent import __main__ as program
from ringtrain.launch.agent import connections, listener
from ringtrain.launch.agent.children import Children
from ringtrain.launch.agent.events import call_ready
from ringtrain.launch.agent.link import LauncherGoneError, framed
from ringtrain.launch.host_errors import PACKAGE, HostError
from ringtrain.launch.hosts import Host
from ringtrain.launch.job import Job
from ringtrain.launch.reach import EDITION, MARK, Agent
from ringtrain.launch.shells import Ssh

SECONDS = 30.0
ORPHAN = """
import os, time
from ringtrain.launch.agent.rank_command import end_with
if os.fork() == 0:
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            time.sleep(0.001)
        print("is alone", flush=True)
        end_with(parent)
        print("goes on", flush=True)
    os._exit(0)
"""


@pytest.fixture
def agent_of(monkeypatch, tmp_path):
    """Starts an agent of a package whose `run` is of this text."""
    started = []

    def start(text):
        folder = tmp_path / "ringtrain" / "launch" / "agent"
        folder.mkdir(parents=True)
        monkeypatch.setattr(reach, "AGENT_PROGRAM", Path(shutil.copy(program.__file__, folder)))
        (folder / "main.py").write_text(text)
        started.append(Agent(Host("node-b", 1, is_here=True), Ssh()))
        return started[-1]

    yield start
    for agent in started:
        agent.give_up()
        agent.process.wait()


def heard(agent):
    """All that it tells until it ends."""
    deadline, facts = time.monotonic() + SECONDS, []
    while agent.is_open:
        assert time.monotonic() < deadline
        facts += agent.news()
        time.sleep(0.01)
    return facts + [*agent.news()]


def test_lines_of_others_are_no_facts(agent_of):
    """Of a login shell, of what its start-up files have left running, and at the end, before, between and behind lines."""
    words = [b'welcome\n{"rank": 0}\n', b"You have mail\n", b"\x1eringtrain", b"bye\n"]
    sent = [
        words[0],
        framed({"rank": 1, "bytes": 5}) + b"ab\ncd",
        words[1],
        framed({"rank": 2}),
        words[2],
        framed({}),
        words[3],
    ]
    agent = agent_of(f"import os\ndef run():\n    for each in {sent!r}: os.write(1, each)")
    assert heard(agent) == [({"rank": 1, "bytes": 5}, b"ab\ncd"), ({"rank": 2}, b"")] and not agent.fault


def test_a_line_within_another_is_the_end_of_a_host(agent_of):
    agent = agent_of(
        f"import os, time\ndef run():\n    os.write(1, {MARK + b'{mail' + bytes([10])!r})\n    time.sleep(60)"
    )
    assert heard(agent) == []
    assert agent.last_words() == "another program has written into what the agent there tells the launcher"


@pytest.mark.parametrize(
    "text, words",
    [
        ("def run(): raise OSError(24, 'Too many open files')", "OSError: [Errno 24] Too many open files (Python 3."),
        ("def run(): 1 +", "SyntaxError: invalid syntax (Python 3."),  # as of a Python that is too old
        ("def run(): raise FileNotFoundError(2, 'No such file or directory')", "FileNotFoundError"),
    ],
)
def test_a_fault_of_the_agent_is_told_as_that(text, words, agent_of):
    with pytest.raises(HostError) as told:
        agent_of(text).ask(time.monotonic() + SECONDS, {"do": "tell time"})
    assert "host 'node-b': it must run a command without a prompt, but the agent there failed (" in str(told.value)
    assert words in str(told.value) and "start-up" not in str(told.value)


def test_an_agent_answers(agent_of, monkeypatch):
    agent = Agent(Host("here", 1, is_here=True), Ssh())
    asked = agent.ask(time.monotonic() + SECONDS, {"do": "tell time"})
    assert abs(asked["clock"] - time.monotonic()) < SECONDS
    agent.close()
    assert agent.has_left(time.monotonic() + SECONDS) and os.WEXITSTATUS(agent.process.returncode) == 0


def test_a_fault_is_told_in_the_frames_that_the_launcher_reads():
    assert program.MARK == MARK


def test_an_agent_of_another_edition_is_refused(agent_of):
    """Its answers might mean something else; the words are those of any other difference between hosts."""
    told = framed({"edition": "0.9.9 (12345678)"}) + framed({"clock": 1.0})
    agent = agent_of(f"import os, sys\ndef run():\n    os.write(1, {told!r}); sys.stdin.read()")
    with pytest.raises(HostError) as refused:
        agent.ask(time.monotonic() + SECONDS, {"do": "tell time"})
    assert str(refused.value) == (
        f"host 'node-b': ringtrain must be the same as here, but is 0.9.9 (12345678) there and {EDITION} here. "
        "Install the same environment on every host, or share one."
    )


def test_a_host_without_the_package_is_told_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(reach, "AGENT_PROGRAM", tmp_path / "__main__.py")
    with pytest.raises(HostError) as told:
        Agent(Host("node-b", 1, is_here=True), Ssh()).ask(time.monotonic() + SECONDS, {"do": "tell time"})
    assert (
        f"host 'node-b': it must run a command without a prompt, but there is no ringtrain that it may read at {PACKAGE} there"
        in str(told.value)
    )
    assert "Install the same environment at the same path on each host, or share it." in str(told.value)


def test_nothing_is_sent_before_an_agent_has_come_to_its_program(agent_of, monkeypatch):
    """A start-up file of the shell there might read it."""
    agent = agent_of("import time\ndef run():\n    time.sleep(60)")
    agent.send({"do": "tell time"})
    written = []
    monkeypatch.setattr(os, "write", lambda number, data: written.append(data) or len(data))
    agent.send({"do": "tell time"})
    assert not written and len(agent._unsent) > 20
    agent._pending += framed({"edition": EDITION})
    assert [*agent.news()] == []
    agent.send({"do": "tell time"})
    assert len(written) == 1 and not agent._unsent


def test_of_one_that_is_lost_nothing_is_kept(agent_of):
    before = len(os.listdir("/proc/self/fd"))
    agent = agent_of("def run():\n    pass")
    assert heard(agent) == [] and len(os.listdir("/proc/self/fd")) == before + 3
    agent.let_go()
    assert len(os.listdir("/proc/self/fd")) == before and agent.process.returncode is not None


def test_an_agents_pipe_is_closed_while_no_thread_writes(agent_of, monkeypatch):
    """A descriptor with its number might be another file's by then."""
    held, agent = [], agent_of("def run():\n    pass")
    lock = agent._sending
    agent.stdin = SimpleNamespace(fileno=agent.stdin.fileno, close=lambda: held.append(lock.locked()))
    agent._has_started = True
    monkeypatch.setattr(os, "write", lambda _number, data: held.append(lock.locked()) or len(data))
    agent.send({"do": "beat", "at": 0.0})
    agent.close()
    assert held == [True, True]


def test_an_ssh_that_stays_does_not_keep_a_job(monkeypatch):
    """As one on which other sessions hang."""
    ssh = subprocess.Popen(["sleep", "20"], start_new_session=True)
    job = object.__new__(Job)
    job.agents = [SimpleNamespace(is_open=False, has_left=lambda deadline: False, process=ssh)]
    job.engine, job.ranks = SimpleNamespace(finish=lambda: None), {}
    job.output = SimpleNamespace(finish=lambda ranks, patience: None)
    job._drain()
    assert ssh.returncode == -9


def test_what_the_system_refuses_to_an_agent_is_told_once_and_tried_again(monkeypatch):
    """And ends neither the agent nor the ranks of its host."""
    told, steps = (
        [],
        iter([OSError(24, "Too many open files"), OSError(24, "Too many open files"), LauncherGoneError("gone")]),
    )

    class Stub(listener.RankListener):
        def __init__(self):
            self.launcher = SimpleNamespace(tell=told.append, lose=lambda: None)
            self.kill_at, self.refusals = None, set()

        def _step(self):
            raise next(steps)

        def end(self):
            raise EOFError  # by the last one alone

    monkeypatch.setattr(listener, "SECONDS_AFTER_A_REFUSAL", 0.0)
    with pytest.raises(EOFError):
        Stub().run()
    (words,) = told
    assert words["rank"] == -1 and "tries again: [Errno 24] Too many open files. Raise its limits" in words["words"]


def test_what_a_rank_says_is_taken_once_when_another_ends_in_the_same_round(monkeypatch):
    """Its end has all ranks heard out first; the selector has found one of them readable by then."""
    told = []

    agent = object.__new__(connections.RankConnections)
    agent._ranks, agent._selector = {}, selectors.DefaultSelector()
    agent._take = lambda facts, *_: told.append(facts)
    own, rank = socket.socketpair()
    ends, end = os.pipe()
    with agent._selector, own, rank:
        agent._ranks[own] = connections.ConnectedRank()
        agent._selector.register(ends, selectors.EVENT_READ, lambda: (os.read(ends, 1), agent.hear_all_out()))
        agent._selector.register(own, selectors.EVENT_READ, lambda: agent._hear(own))
        keys = agent._selector.get_map()
        ready = [(keys[ends], selectors.EVENT_READ), (keys[own.fileno()], selectors.EVENT_READ)]
        monkeypatch.setattr(agent._selector, "select", lambda _timeout: ready)
        rank.sendall(b'{"rank": 2, "uid": "u", "control": "05"}\n')
        os.close(end)
        call_ready(agent._selector, None)  # it waited for more
        os.close(ends)
    assert told == [{"rank": 2, "uid": "u", "control": "05"}]


def test_an_agent_that_can_open_no_pipe_starts_no_rank_and_says_so(monkeypatch):
    told = []
    request = {"socket": "job", "directory": "/", "environment": {}, "ignored": [], "notices": []}
    children = Children(SimpleNamespace(tell=told.append), None, request, None, None, None)
    children.is_parent = True

    def refuse():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pipe", refuse)
    children.start({"first": 4, "count": 2, "size": 8, "without": [], "line": ["true"], "only": [1]})
    assert told[0]["words"].startswith("ringtrainrun: cannot start rank 5: Too many open files.")
    assert told[1:] == [{"rank": 5, "cleared": 125}]


def test_a_keeper_closes_as_many_descriptors_as_there_are():
    """And not as many as there may be: where a container allows a thousand million, it did so for minutes."""
    program = """
import os
from ringtrain.launch.agent.keeper import leave_keeper
os.sysconf, os.closerange = lambda name: 1 << 30, lambda first, last: os._exit(99)
opened = [str(os.open(os.devnull, os.O_RDONLY)) for _ in range(5)]
keeper, kept = os.getpid(), opened
leave_keeper([])
while os.getppid() == keeper and len(kept) > 4:
    kept = os.listdir(f"/proc/{keeper}/fd")
os._exit(0 if {"0", "1", "2"} < {*kept} else 98)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=SECONDS).returncode == 0


def test_what_is_to_be_kept_open_stays_open():
    program = """
import os
from ringtrain.launch.agent.processes import close_all_but
opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
close_all_but({opened[1], opened[3]})
assert [number for number in opened if os.path.exists(f"/proc/self/fd/{number}")] == [opened[1], opened[3]]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_is_to_end_with_its_parent_ends_if_that_has_gone_before() -> None:
    line = [sys.executable, "-c", ORPHAN]
    assert subprocess.run(line, capture_output=True, text=True, timeout=SECONDS).stdout == "is alone\n"
