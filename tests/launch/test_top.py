"""`ringtrain top`: what it shows follows from two answers of rank 0, and a real job answers."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from environments import rank_environment, ringtrainrun

from ringtrain._runtime import inquiries
from ringtrain.errors import InvalidArgumentError
from ringtrain.launch.report.verdicts import number_text, time_text
from ringtrain.launch.top import Moment, answer_of, describe, pace_of
from ringtrain.launch.top import top as top_command

NOW = 1_700_000_000.0
COUNTERS = {
    "operations": 0,
    "batches": 0,
    "wire_bytes_sent": 0,
    "shared_bytes": 0,
    "wait_nanoseconds": 0,
    "wire_nanoseconds": 0,
}


def flown(number: int, name: str, submitted: float, started: float, finished: float | None) -> dict:
    return {"number": number, "process_set": 0, "agreed": number, "operation": "allreduce", "name": name, "dtype": "float32",
            "shape": [1], "tensors": 1, "bytes": 4, "reduction": "sum", "root": None, "submitted": submitted,
            "announced": submitted, "started": started, "finished": finished,
            "status": "ok" if finished else "pending"}  # fmt: skip


def answer(
    at: float, remembered: list[dict], lateness: tuple[str, ...] = (), stall: list | None = None, **counters: int
) -> Moment:
    told = told_of(remembered, at, lateness=lateness, stall=stall, counters={**COUNTERS, **counters})
    return answer_of(json.dumps(told).encode(), at)


def told_of(remembered: list[dict], at: float, **told: object) -> dict:
    """What a process says at a time."""
    record = {"format": 2, "world": 7, "rank": 0, "size": 4, "host": "node-a", "process": 9,
              "hosts": {"node-a": [0, 1], "node-b": [2, 3]}, "written": NOW + at, "because": "",
              "process_sets": {"0": [0, 1, 2, 3]}, "operations": remembered}  # fmt: skip
    return {"rank": 0, "size": 4, "hosts": 2, "program": "python train.py", "lateness": (), "traffic": [], "stall": None,
            "counters": COUNTERS, "flight_record": json.dumps(record), **told}  # fmt: skip


def steps(count: int, length: float, under_way: float) -> list[dict]:
    """Two sums a step, each half as long under way, the second in the middle of the step's first half; the last is twice as fast."""
    made = []
    for step in range(count):
        each = under_way / (4 if step == count - 2 else 2)
        for number, name in enumerate("ab"):
            begin = NOW + step * length + number * length / 4
            made.append(flown(2 * step + number + 1, name, begin, begin + 1e-3, begin + 1e-3 + each))
    return made


def test_the_pace_of_steps():
    pace = pace_of(answer(0.0, steps(10, 0.5, 0.1)).record)
    assert pace.steps == 8 and pace.step == pytest.approx(0.5)  # the first may lack a part, the last is not over
    assert pace.under_way == pytest.approx(0.1, rel=1e-4) and pace.fastest == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize("operations", [[], steps(2, 0.5, 0.1), [flown(1, "a", NOW, NOW, None)]])
def test_too_few_steps_have_no_pace(operations):
    assert pace_of(answer(0.0, operations).record) is None


def test_what_is_shown():
    before = answer(10.0, steps(10, 0.5, 0.1), operations=100, wire_bytes_sent=10, wait_nanoseconds=0)
    lateness = ("3|7|350000000|90000000|layer.1",)
    now = answer(12.0, steps(10, 0.5, 0.1), lateness, operations=120, wire_bytes_sent=10 + (4 << 20), shared_bytes=2048,
                 wait_nanoseconds=500_000_000)  # fmt: skip
    assert describe(before, now, 9) == [
        "4 ranks on 2 hosts, process 9: python train.py",
        "steps      2 a second, 500 ms each (the last 8)",
        "floor      50%: sums under way for 100 ms of a step, 50 ms in the fastest",
        "last rank  rank 3 (host node-b), 7 times, for 350 ms in all; the longest in 'layer.1'",
        "bytes      2 MiB/s between hosts, 1 KiB/s within them; 10 operations a second",
        "waiting    25% of the time, on rank 0",
    ]


@pytest.mark.parametrize(
    "samples, words",
    [
        ([36, 73, 147], "36 : 73 : 147 of 256 samples, at 10, 20, 30 a second"),
        ([1] * 9, "from 1 to 1 of 9 samples, at 10 to 90 a second"),
    ],
)
def test_shares_that_follow_speed_are_shown(samples, words):
    shares = [[rank, each, 10.0 * (rank + 1)] for rank, each in enumerate(samples)]
    told = json.dumps({**told_of(steps(10, 0.5, 0.1), 10.0), "shares": shares}).encode()
    found = answer_of(told, 10.0)
    assert f"shares     {words}" in describe(found, answer_of(told, 12.0), 9)
    assert f"shares {words}" in str(found.stats).splitlines()


AFTER_A_HANG = [
    "4 ranks on 2 hosts, process 9: python train.py",
    "steps      none for 30.1 s; before that 2 a second, 500 ms each",
    "last rank  {}",
    "bytes      0 B/s between hosts, 0 B/s within them; 0 operations a second",
    "waiting    0% of the time, on rank 0",
    "nothing has ended since; the newest operation was submitted 30.1 s ago",
]


REPORTED = ("allreduce 'a'", "ranks 0-2", "rank 3")


@pytest.mark.parametrize(
    "awaits, stall, words",
    [
        (True, [*REPORTED, NOW + 30], "rank 3 (host node-b): missing in allreduce 'a', which ranks 0-2 submitted"),
        (
            True,
            [*REPORTED, NOW],  # before the newest operation ended
            "not known yet: rank 0 waits in allreduce 'b', for 30.1 s; who is missing is reported after stall_warning_seconds",
        ),
        (False, None, "rank 0 has submitted nothing for 30.1 s; others may wait for it"),
    ],
    ids=["reported", "not reported", "rank 0 is missing"],
)
def test_a_job_that_stands_still_says_since_when_and_for_whom(awaits, stall, words):
    """No steps of before are shown as if they went on, and it is not said that nobody is waited for."""
    own = steps(10, 0.5, 0.1)
    if awaits:
        own[-1] |= {"agreed": 0, "started": None, "finished": None, "status": "pending"}
    before, now = answer(0.0, own, operations=20), answer(34.75, own, stall=stall, operations=20)
    assert describe(before, now, 9) == [line.format(words) for line in AFTER_A_HANG]


def test_a_step_that_is_longer_than_the_look_is_no_hang():
    own = steps(10, 5.0, 0.1)
    shown = describe(answer(46.0, own, operations=20), answer(48.0, own, operations=20), 9)
    assert shown[1].startswith("steps      0.2 a second") and shown[3] == "last rank  none waited for"


def test_numbers_are_written_out():
    assert [number_text(each) for each in (0.01234, 12.34, 999.4, 999.6, 1512.0)] == [
        "0.0123",
        "12.3",
        "999",
        "1000",
        "1512",
    ]
    assert [time_text(each) for each in (999.7, 999_700.0, 1.51e9)] == ["1 ms", "1 s", "1510 s"]


def test_several_jobs_are_listed_with_their_programs(monkeypatch):
    monkeypatch.setattr(inquiries, "those_who_answer", lambda: {12: "a", 7: "b"})
    told = json.dumps(told_of([], 0.0, program="python  train.py\n\x1b[2J")).encode()
    monkeypatch.setattr(inquiries, "ask", lambda name, seconds: told if name == "a" else b"{}")
    done = CliRunner().invoke(top_command, ["--once"])
    assert done.exit_code == 1 and done.output.splitlines()[-2:] == [
        "7 (it does not answer)",
        "12 (4 ranks on 2 hosts: python train.py ?[2J)",
    ]


@pytest.mark.parametrize("arguments", [[], ["--once"]])
@pytest.mark.parametrize("refuses", [True, False], ids=["gone", "has no world"])
@pytest.mark.parametrize("answers", [0, 1])
def test_a_job_that_ends_before_it_has_answered_has_ended(monkeypatch, arguments, refuses, answers):
    """At the first look, and at the second one."""
    lives = iter([{7: "a"}, {7: "a"}])  # and while it ends, for a moment
    told = iter([json.dumps(told_of([], 0.0)).encode()] * answers)
    monkeypatch.setattr(inquiries, "those_who_answer", lambda: next(lives, {}))

    def ask(name: str, seconds: float) -> bytes:
        if (answer := next(told, None)) is None and refuses:
            raise ConnectionRefusedError(111, "Connection refused")
        return answer or b"{}"

    monkeypatch.setattr(inquiries, "ask", ask)
    done = CliRunner().invoke(top_command, [*arguments, "--interval", "0.1"])
    assert (done.exit_code, done.output) == (0, "The job has ended.\n")


@pytest.mark.parametrize("arguments", [[], ["--once"]])
def test_a_process_that_lives_on_without_a_world_is_told_from_one_that_ends(monkeypatch, arguments):
    monkeypatch.setattr(inquiries, "those_who_answer", lambda: {7: "a"})
    monkeypatch.setattr(inquiries, "ask", lambda name, seconds: b"{}")
    done = CliRunner().invoke(top_command, arguments)
    assert done.exit_code == 1 and "it has no world open in which it is rank 0." in done.output


@pytest.mark.parametrize("text", [b"", b"{}", b"hello", b'{"flight_record": 1}'])
def test_other_answers_are_refused(text):
    with pytest.raises((ValueError, KeyError, InvalidArgumentError)):
        answer_of(text, 0.0)


# ---- real jobs ----

PROGRAM = """
import os, sys, time
import numpy as np, ringtrain as rt
rt.init()
if rt.rank() == 0:
    print(f"rank 0 is process {os.getpid()}", flush=True)
while not rt.allreduce(float(os.path.exists(sys.argv[1])), "end", rt.Max):
    for handle in [rt.allreduce_async(np.ones(30_000, np.float32), f"layer.{i}") for i in range(3)]:
        rt.synchronize(handle)
    time.sleep(0.03 if rt.rank() == 1 else 0.01)
rt.shutdown()
time.sleep(1.5)  # it lives on without a world
"""


TOP = [sys.executable, "-m", "ringtrain.launch.commands", "top"]


def top(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*TOP, *arguments], capture_output=True, text=True, timeout=600)


@pytest.mark.tcp
def test_a_real_job_is_seen_from_another_process(tmp_path):
    over = tmp_path / "over"
    command = ringtrainrun("tcp", 2, sys.executable, "-c", PROGRAM, str(over))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=rank_environment()) as job:
        process = next(found[1] for line in job.stdout if (found := re.search(r"rank 0 is process (\d+)", line)))
        time.sleep(0.5)
        once = top("--once", "--interval", "0.5", "--job", process)
        assert once.returncode == 0, once
        head, *lines = once.stdout.splitlines()
        assert head.startswith(f"2 ranks on 1 host, process {process}: ") and re.match(
            r"steps +[\d.]+ a second", lines[0]
        ), once
        assert 0 < float(lines[0].split()[1]) < 35 and re.match(r"last rank +rank 1, \d+ times", lines[2]), once
        assert re.match(r"bytes +0 B/s between hosts, [\d.]+ [KM]iB/s within them", lines[3]), once
        with subprocess.Popen(
            [*TOP, "--interval", "0.3", "--job", process], stdout=subprocess.PIPE, text=True
        ) as follows:
            heads = (line for line in follows.stdout if line.startswith("2 ranks on 1 host"))
            assert next(heads) == next(heads)
            over.touch()
            assert follows.stdout.read().endswith("The job has ended.\n") and follows.wait() == 0
        assert job.wait() == 0
    assert int(process) not in inquiries.those_who_answer()


def test_a_process_that_is_no_rank_0_is_refused():
    done = top("--once", "--job", str(os.getpid()))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done
    assert re.search(r"--job \d+: it must be the process of a rank 0|there must be a job of yours", done.stderr), done


def test_another_users_socket_is_not_believed(monkeypatch):
    """Nor is another user answered."""
    name = f"ringtrain-top-{os.getuid()}-{os.getpid()}-0"
    monkeypatch.setattr(inquiries, "_user_of", lambda other_end: 4711)
    monkeypatch.setattr(os, "getuid", lambda: 4712)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        with pytest.raises(PermissionError, match="it belongs to another user"):
            inquiries.ask(name, 1.0)


def test_only_its_user_and_root_are_answered(monkeypatch):
    monkeypatch.setattr(inquiries, "_listening", set())
    inquiries.answer_with(lambda: b"state")
    inquiries.answer_with(lambda: b"of a second world")  # the first goes on
    name = inquiries.those_who_answer()[os.getpid()]
    assert inquiries.ask(name, 5.0) == b"state"
    own, user_of = os.getuid(), inquiries._user_of
    users = iter([own, own + 4711])  # whom the asker finds, and whom the other end finds
    monkeypatch.setattr(inquiries, "_user_of", lambda other_end: next(users, user_of(other_end)))
    assert inquiries.ask(name, 5.0) in (b"", b"state")  # in which order they look is open
    monkeypatch.setattr(inquiries, "_user_of", lambda other_end: own + 4711)
    assert own or inquiries.ask(name, 5.0) == b"", "nobody but root asks who would not be answered"


def test_where_the_kernel_lists_no_sockets_nobody_answers(monkeypatch):
    def unreadable(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(inquiries.Path, "read_text", unreadable)
    assert inquiries.those_who_answer() == {}
