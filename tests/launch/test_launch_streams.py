"""Each command ends in a line, or in silence, where nobody takes what it writes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

RINGTRAIN, RINGTRAINRUN = "ringtrain.launch.commands", "ringtrain.launch"
COMMANDS = [
    (RINGTRAIN, "--help"),
    (RINGTRAIN, "--version"),
    (RINGTRAIN, "check-build"),
    (RINGTRAIN, "doctor", "--help"),
    (RINGTRAIN, "bench", "--help"),
    (RINGTRAIN, "merge-timelines", "merged", "trace"),
    (RINGTRAINRUN, "--help"),
    (RINGTRAINRUN, "--version"),
    (RINGTRAINRUN, "--check-build"),
]


def ended(command: tuple[str, ...], stdout: object, folder: Path) -> tuple[int, str]:
    """Exit code and stderr."""
    (folder / "trace").write_text("[\n]\n")
    line = [sys.executable, "-m", *command]
    done = subprocess.run(line, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=600, cwd=folder)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk_is_told_in_a_line(command: tuple[str, ...], tmp_path: Path) -> None:
    name, code = ("ringtrain", 1) if command[0] == RINGTRAIN else ("ringtrainrun", 125)
    with open("/dev/full", "w") as full:
        told = ended(command, full, tmp_path)
    assert told == (
        code,
        f"{name}: stdout: it must take what is written, but: No space left on device. Make room there.\n",
    )


@pytest.mark.parametrize(
    "command, code, words",
    [
        (
            (RINGTRAIN, "bench", "allreduce", "-np", "0"),
            2,
            "ringtrain bench allreduce: error: argument -np: expected a whole",
        ),
        ((RINGTRAIN, "doctor", "-H", "nosuchhost.invalid:2"), 125, "host 'nosuchhost.invalid'"),
    ],
    ids=["bench", "doctor"],
)
def test_a_command_that_starts_a_job_fails_as_that_does(
    command: tuple[str, ...], code: int, words: str, tmp_path: Path
) -> None:
    returned, told = ended(command, subprocess.DEVNULL, tmp_path)
    assert returned == code and words in told and "Traceback" not in told and "ringtrainrun [" not in told


OF_ANOTHER_FILE = """
import os, sys
from ringtrain.launch.streams import with_its_output
def command():
    print("x" * 10)
    raise OSError({number}, os.strerror({number}))
sys.exit(with_its_output("ringtrain", command))
"""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE, errno.EIO])
def test_what_another_file_does_not_take_is_not_told_as_stdouts(number: int) -> None:
    """As one that is written when it is open, whose error has no name; or a socket."""
    line = [sys.executable, "-c", OF_ANOTHER_FILE.format(number=number)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (1, "x" * 10 + "\n") and "stdout:" not in done.stderr, done
    assert os.strerror(number) in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("flags", [[], ["-u"]], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("size", [10, 1 << 20], ids=["short", "long"])
def test_what_stdout_does_not_take_is_told_as_stdouts(flags: list[str], size: int) -> None:
    """Within the command, and where it is only written at the end."""
    program = OF_ANOTHER_FILE.format(number=0).replace("10", str(size)).replace("raise", "return 0 #")
    with open("/dev/full", "w") as full:
        line = [sys.executable, *flags, "-c", program]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600)
    assert done.returncode == 1 and done.stderr.startswith(
        "ringtrain: stdout: it must take what is written, but: No space"
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_reader_that_has_gone_is_no_fault(command: tuple[str, ...], tmp_path: Path) -> None:
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    with reader.stdin as pipe:
        assert ended(command, pipe, tmp_path) == (141, "")
