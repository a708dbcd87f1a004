"""What each rank of a drawn job runs.

    python program.py FOLDER PLAN          (the plan as `drawn.plan` writes it)

Ranks leave notes in the folder, which are whole from the first moment: `at-RANK` when the moment has come, `struck`
when a rank does the fault to itself, `heard-RANK` with the error that its program ends with. What comes from outside
comes after the notes, and leaves the note `go` if the ranks are to go on then.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing.shared_memory
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from drawn.plan import FAULTS, LAYOUTS, Plan, parse

SECONDS_TO_WAIT = 60.0
MANY_MB = 4 << 20  # elements of 4 bytes
LINES = 2000  # that each rank prints where output matters: 200 KB, more than a pipe holds
WORDS = "x" * 90
TURN_OF_THE_FAULT = 3
WHERE_OUTPUT_MATTERS = ("unread", "full-folder")
SLEEPS = "import time; time.sleep(600)"
IS_DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

folder, plan = Path("."), Plan()
rank, size = 0, 1
lines = 0  # said so far
has_struck = False
kept = []  # what must live as long as the process


def main() -> None:
    """Comes to the moment, does or awaits the fault, and ends."""
    note_what_is_heard()
    note("socket", os.environ.get("RINGTRAIN_LAUNCHER", ""))
    COMPANIES[plan.company]()
    say(10)
    if plan.output in WHERE_OUTPUT_MATTERS:
        # Beside the program: who waits for a reader cannot come to the moment.
        threading.Thread(target=chatter, daemon=True).start()
    MOMENTS[plan.moment]()
    say(10)
    print_line(f"said {lines} lines")
    if plan.company == "memory":
        kept[-1].unlink()


# ---- notes and words ----


def note(what: str, text: str = "") -> None:
    """Leaves a note of this rank, with the time of the machine's monotonic clock."""
    draft = folder / f".{what}-{rank}"
    draft.write_text(json.dumps({"at": time.monotonic(), "process": os.getpid(), "text": text}))
    os.replace(draft, folder / f"{what}-{rank}")


def has_come(name: str) -> bool:
    """Whether there is a note."""
    return (folder / name).exists()


def await_note(name: str) -> None:
    """Waits for a note, and not for ever."""
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while not has_come(name) and time.monotonic() < deadline:
        time.sleep(0.01)


def note_what_is_heard() -> None:
    """Notes the uncaught exception, before anybody else has to do with it."""
    earlier = sys.excepthook

    def hook(kind, problem, trace):
        note("heard", json.dumps([kind.__name__, str(problem)]))
        earlier(kind, problem, trace)

    sys.excepthook = hook


def say(count: int) -> None:
    """Prints numbered lines."""
    global lines
    for _ in range(count):
        print_line(f"line {lines} {WORDS}")
        lines += 1


def print_line(text: str) -> None:
    """Straight to stdout, so that a thread that waits for a reader holds no lock."""
    left = text.encode() + b"\n"
    while left:
        left = left[os.write(1, left) :]


def chatter() -> None:
    """Prints without a number, since it may be cut off."""
    for _ in range(LINES):
        print_line(f"chatter {WORDS}")


# ---- company ----


def leave_an_orphan() -> None:
    """A child of a child, in a session of its own; it keeps stdout and stderr."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-S", "-c", SLEEPS])
        os._exit(0)
    os.wait()


def share_memory() -> None:
    """As a data loader with workers does; Python's resource tracker sees to it when the program is killed."""
    kept.append(multiprocessing.get_context("spawn").Semaphore())
    kept.append(multiprocessing.shared_memory.SharedMemory(create=True, size=1 << 20))


COMPANIES: dict[str, Callable[[], object]] = {
    "alone": lambda: None,
    "deaf": lambda: kept.append(subprocess.Popen([sys.executable, "-S", "-c", IS_DEAF])),
    "orphan": leave_an_orphan,
    "memory": share_memory,
}


# ---- what a rank does to itself ----


def strike() -> None:
    """The fault, if it is one that this rank does to itself; only once."""
    global has_struck
    if rank in plan.victims and FAULTS[plan.fault].inside and not has_struck:
        has_struck = True
        note("struck")
        DEEDS[plan.fault]()


def ones(elements: int):
    """What this rank adds to a sum; it differs from its peers' where that is the fault."""
    import numpy as np

    differs = plan.fault if has_struck else ""
    return np.ones(elements + (differs == "shape"), np.float64 if differs == "dtype" else np.float32)


def sum_of_peers(elements: int) -> None:
    """One allreduce."""
    total = rt.allreduce(ones(elements), name="sum", op=rt.Sum)
    assert total[0] == total[-1] == size, total


def read_address_8() -> None:
    ctypes.string_at(8)


def call_terminate() -> None:
    ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()


def raise_value_error() -> None:
    raise ValueError("the drawn fault")


def run_out_of_memory() -> None:
    bytearray(1 << 62)


def raise_in_a_thread() -> None:
    thread = threading.Thread(target=raise_value_error)
    thread.start()
    thread.join()
    time.sleep(SECONDS_TO_WAIT)


def start_a_child_that_inits() -> None:
    """It may have a world of its own, or be refused; it is no rank of this one."""
    child = "import numpy as np, ringtrain as rt; rt.init(); rt.allreduce(np.ones(10), name='sum'); print('size', rt.size())"
    subprocess.run([sys.executable, "-c", child], timeout=SECONDS_TO_WAIT, stdout=subprocess.DEVNULL)


def raise_system_exit() -> None:
    raise SystemExit(7)


DEEDS: dict[str, Callable[[], object]] = {
    "segv": read_address_8,
    "abort": os.abort,
    "terminate": call_terminate,
    "exit": lambda: exit(9),  # that of module site
    "system-exit": raise_system_exit,
    "sys-exit": lambda: sys.exit(3),
    "leave": lambda: os._exit(5),
    "raise": raise_value_error,
    "memory": run_out_of_memory,
    "thread": raise_in_a_thread,
    "stall": lambda: time.sleep(SECONDS_TO_WAIT),
    "dtype": lambda: None,  # its tensors differ from now on
    "shape": lambda: None,
    "child": start_a_child_that_inits,
}


# ---- moments ----


def init() -> None:
    """Joins the world. Imported here, as what comes before it is a moment too."""
    global rt
    import ringtrain as rt

    rt.init()
    sum_of_peers(10)


def repeat(turn: Callable[[int], object]) -> None:
    """Does the same again and again: until the fault has come from outside, or a few times; `turn` gets their number."""
    note("at")
    if FAULTS[plan.fault].inside:
        for number in range(2 * TURN_OF_THE_FAULT):
            turn(number)
        return
    number = 0
    while not rt.broadcast_object(has_come("go"), root_rank=0, name="go"):
        turn(number)
        number += 1


def between() -> None:
    init()

    def turn(number: int) -> None:
        sum_of_peers(1000)
        time.sleep(0.005)
        if number == TURN_OF_THE_FAULT:
            strike()

    repeat(turn)


def before_init() -> None:
    note("at")
    strike() if FAULTS[plan.fault].inside else await_note("go")
    init()
    sum_of_peers(1000)


def within_init() -> None:
    """The last rank that is no victim comes when the fault has happened."""
    note("at")
    if rank == max(set(range(size)) - set(plan.victims)):
        await_note("go")
    init()
    sum_of_peers(1000)


def in_allreduce() -> None:
    init()

    def turn(number: int) -> None:
        handle = rt.allreduce_async(ones(MANY_MB), name="many MB", op=rt.Sum)
        if number == TURN_OF_THE_FAULT:
            strike()
        rt.synchronize(handle)

    repeat(turn)


def in_backward() -> None:
    """A fault from inside comes in the hook of a layer in the middle, while gradients of later ones travel."""
    import torch

    import ringtrain.torch as hvd

    init()
    torch.manual_seed(1)
    layers = [torch.nn.Linear(200, 200) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
    passes = 0

    def hook(_gradient: torch.Tensor) -> None:
        if passes == TURN_OF_THE_FAULT:
            strike()

    layers[1].weight.register_hook(hook)

    def turn(number: int) -> None:
        nonlocal passes
        passes = number
        optimizer.zero_grad()
        model(torch.ones(8, 200)).sum().backward()
        optimizer.step()

    repeat(turn)


def in_shutdown() -> None:
    """From outside while the victim, or rank 0, waits for the others in shutdown(); from inside right after it."""
    init()
    note("at")
    if not FAULTS[plan.fault].inside and rank not in (plan.victims or (0,)):
        await_note("go")
    rt.shutdown()
    strike()


def during_output() -> None:
    init()

    def turn(number: int) -> None:
        say(LINES // 8)
        if number == TURN_OF_THE_FAULT:
            strike()
        sum_of_peers(1000)

    repeat(turn)


MOMENTS: dict[str, Callable[[], None]] = {
    "between": between,
    "before": before_init,
    "init": within_init,
    "allreduce": in_allreduce,
    "backward": in_backward,
    "shutdown": in_shutdown,
    "output": during_output,
}

if __name__ == "__main__":
    folder, plan = Path(sys.argv[1]), parse(sys.argv[2])
    rank, size = int(os.environ["RINGTRAIN_RANK"]), LAYOUTS[plan.layout].size
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
