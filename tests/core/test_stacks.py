"""Stacks of threads are taken while those run."""

import os
import subprocess
import sys
import threading

from ringtrain import reports, stacks

WHILE_OTHERS_RUN = """
import gc, sys, threading, time
from ringtrain import stacks

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


def test_nothing_crashes_beside_threads_that_run():
    program = WHILE_OTHERS_RUN.replace("TAKE", "stacks.of_threads(50)")
    done = subprocess.run([sys.executable, "-c", program, "1"], capture_output=True, text=True, timeout=60, check=False)
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
