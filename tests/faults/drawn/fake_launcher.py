"""ringtrainrun with a vice, to show that the laws find it.

    python fake_launcher.py VICE arguments of ringtrainrun ...

It runs the real launcher, passes its words and its exit code on, and does one thing wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SLEEPS = "import time; time.sleep(600)"


def leave_a_process(_arguments: list[str]) -> None:
    """In a session of its own, and a child of nobody."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            os.execv(sys.executable, [sys.executable, "-S", "-c", SLEEPS])
        os._exit(0)


def tell_rank_0_otherwise(arguments: list[str]) -> None:
    """As if one of those that are told had got another text."""
    change_note(arguments, lambda note: note | {"text": json.dumps(["PeerLostError", "something is wrong"])})


def tell_late(arguments: list[str]) -> None:
    change_note(arguments, lambda note: note | {"at": note["at"] + 100})


def change_note(arguments: list[str], change: Callable[[dict], dict]) -> None:
    """Of what rank 0 heard; the folder is the program's first argument."""
    program = next(number for number, word in enumerate(arguments) if word.endswith("program.py"))
    path = Path(arguments[program + 1], "heard-0")
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def break_down(_arguments: list[str]) -> None:
    """Prints a traceback, but above all other words."""
    print("Traceback (most recent call last):", file=sys.stderr)


# What is done after the real launcher has ended, before its words are passed on; and what becomes of these and of the
# code.
AFTER: dict[str, Callable[[list[str]], None]] = {
    "slow": lambda _: time.sleep(60),
    "leaves a process": leave_a_process,
    "leaves shared memory": lambda _: Path("/dev/shm/left").touch(),
    "leaves a file": lambda _: Path(os.environ["TMPDIR"], "left").touch(),
    "tells another text": tell_rank_0_otherwise,
    "tells late": tell_late,
    "breaks down": break_down,
}
STDOUT: dict[str, Callable[[bytes], bytes]] = {"loses a line": lambda text: text.replace(b"[1] line 7 ", b"[1] ", 1)}
STDERR: dict[str, Callable[[bytes], bytes]] = {
    "goes on talking": lambda text: text + b"prterun noticed that something ended.\n",
    "blames another": lambda text: text.replace(b"rank 1 (host", b"rank 0 (host"),
    "says nothing": lambda text: b"",
    "blames in vain": lambda text: text + b"ringtrainrun: rank 0 (host here) failed with exit code 1.\n",
}
INSTEAD: dict[str, str] = {"starts nothing": "ringtrainrun: rank 1 (host here) was killed by signal 9, SIGKILL."}
CODES: dict[str, Callable[[int], int]] = {"returns 0": lambda code: 0, "returns 1": lambda code: 1}


def main(vice: str, *arguments: str) -> int:
    """Runs the real launcher and returns its code, or a wrong one."""
    if vice in INSTEAD:
        print(INSTEAD[vice], file=sys.stderr)
        return 137
    done = subprocess.run(
        [sys.executable, "-m", "ringtrain.launch", *arguments], stdin=subprocess.DEVNULL, capture_output=True
    )
    AFTER.get(vice, lambda _: None)(list(arguments))
    sys.stderr.flush()
    os.write(1, STDOUT.get(vice, bytes)(done.stdout))
    os.write(2, STDERR.get(vice, bytes)(done.stderr))
    return CODES.get(vice, int)(done.returncode)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
