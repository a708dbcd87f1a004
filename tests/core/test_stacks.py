"""Stacks of threads are taken while those run."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from eventually import eventually
from worlds import World

import ringtrain as rt
from ringtrain._binding._native import lib
from ringtrain._runtime import context, reports, stacks
from ringtrain.errors import InvalidArgumentError

WHILE_OTHERS_RUN = """
import gc, sys, threading, time
from ringtrain._runtime import stacks

class Letting:  # others run while garbage is collected
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0)

def down(depth):
    Letting()
    return depth and down(depth - 1)

def run():
    while True:
        down(30)

gc.set_threshold(5)
for _ in range(3):
    threading.Thread(target=run, daemon=True).start()
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    taken = TAKE
print("well")
"""


def test_it_says_where_a_thread_is():
    has_come, may_go = threading.Event(), threading.Event()

    def innermost():
        has_come.set()
        may_go.wait(60)

    def outermost():
        innermost()

    thread = threading.Thread(target=outermost)
    thread.start()
    has_come.wait(60)
    text = "".join(stacks.of_threads(20)[thread.ident].format())
    short = stacks.of_threads(2)[thread.ident]
    may_go.set()
    thread.join()
    assert __file__ in text and "may_go.wait(60)" in text  # with the lines of the source
    assert text.index("in outermost") < text.index("in innermost")
    assert len(short) == 2 and short[-1].name == "wait"
    assert threading.get_ident() in stacks.of_threads(20)


def test_a_thread_of_ours_is_shown_while_it_does_the_programs_work(capfd):
    """One of a pool that waits for work is where nobody looks for a fault."""
    has_come, may_go = threading.Event(), threading.Event()
    waits = "ringtrain.values_0"  # a variable, as stacks have the lines of the source

    def load():
        has_come.set()
        may_go.wait(60)

    def written():
        reports.write_stacks()
        return capfd.readouterr().err

    with ThreadPoolExecutor(1, "ringtrain.values") as idle, ThreadPoolExecutor(1, "ringtrain.load") as busy:
        idle.submit(int)
        busy.submit(load)
        has_come.wait(60)
        eventually(lambda: waits not in written(), "it waits for work again")
        said = written()
        may_go.set()
    assert "Thread 'MainThread'" in said and "Thread 'ringtrain.load_0'" in said and "in load" in said
    assert waits not in said


def test_nothing_crashes_beside_threads_that_run():
    program = WHILE_OTHERS_RUN.replace("TAKE", "stacks.of_threads(50)")
    done = subprocess.run(
        [sys.executable, "-c", program, "1"], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr[-2000:]


def test_what_several_operations_ask_for_at_once_is_answered_once():
    """A hung rank owes each operation of a step; its stacks are the same for all."""
    asked, ask = os.pipe()
    os.write(ask, b"slss")
    os.close(ask)
    answered = []

    def fails():
        answered.append("stacks")
        raise OSError("nobody reads")

    reports._answer(asked, {ord("s"): fails, ord("l"): lambda: answered.append("lines")})
    assert answered == ["stacks", "lines"]


@contextlib.contextmanager
def full_stderr():
    """File descriptor 2 is a pipe in which there is no room; the descriptor to read it by."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, bytes(65536))
    os.set_blocking(writes, True)
    former = os.dup(2)
    os.dup2(writes, 2)
    try:
        yield reads
    finally:
        os.dup2(former, 2)
        for each in (reads, writes, former):
            os.close(each)


@pytest.mark.on_threads("the ranks' stderr is the launcher's")
def test_a_rank_goes_on_while_nobody_reads_its_stderr(tmp_path):
    """As where the launcher has lost its network: a rank whose driver is blocked is taken for dead."""
    asked, ask = os.pipe()

    def on_rank(rank):
        if rank == 1:
            lib.rt_ask_through(context.current().native, ask)
            told = tmp_path / "flight.1.json"  # the same step of the driver shows the stacks
            eventually(
                lambda: told.exists() and "wait for allreduce" in told.read_text(), "rank 1 is told to show its stacks"
            )
        return rt.allreduce(np.ones(3), "late", op=rt.Sum).tolist()

    with World(2, flight_record=str(tmp_path), stall_warning_seconds=0.1) as world, full_stderr() as reads:
        assert world.run(on_rank) == [[2.0] * 3] * 2
        with open(reads, "rb", closefd=False) as stderr:
            said = stderr.readline().lstrip(b"\0")
        assert said.startswith(b"ringtrain: the other ranks wait for allreduce 'late', which rank 1 has not submitted.")
        assert [os.read(asked, 1) for _ in "ls"] == [b"l", b"s"]  # the log's lines, and then the stacks
    os.close(asked)
    os.close(ask)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_that_cannot_be_handled_is_refused(number, monkeypatch):
    monkeypatch.setattr(reports.signal, "getsignal", lambda _: signal.SIG_DFL)  # pytest has a handler of SIGSEGV
    with pytest.raises(
        InvalidArgumentError, match=f"stack_signal must be a signal that a program may handle, but is {number:d}"
    ):
        reports.answer_requests(number, lambda: None)
