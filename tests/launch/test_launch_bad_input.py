"""Whatever ringtrainrun is given and wherever it is started: it works, or says in a line what is wrong, quickly, and with its code.

No traceback of ours for any input: command lines and files by a table and by hypothesis, surroundings by real
processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import needs
import pytest
from environments import rank_environment
from hypothesis import given, settings
from hypothesis import strategies as st
from test_launch import HERE, LIKE_HERE

from ringtrain.errors import InvalidArgumentError
from ringtrain.launch import cli, commands, openmpi, planning
from ringtrain.launch.hosts import HostsError
from ringtrain.launch.preflight import problems_of
from ringtrain.launch.settings import SETTINGS, WITHOUT_EFFECT, ConfigError

SECONDS = 60.0  # of a refusal, on a busy machine; it takes one or two
EXAMPLES, MANY = 150, 10000
LONG = pytest.mark.parametrize(
    "examples", [EXAMPLES, pytest.param(MANY, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)


# ---- command lines ----


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--start-timeout", "nan"], "'nan' is not a finite number"),
        (["--start-timeout", "inf"], "inf is not in the range"),
        (["--start-timeout", "1e300"], "is not in the range"),
        (["--start-timeout", "-nan"], "'-nan' is not a finite number"),
        (["--fusion-threshold-mb", "nan"], "'nan' is not a finite number"),
        (["--fusion-threshold-mb", "inf"], "inf is not in the range"),
        (["--stall-check-warning-time-seconds", "nan"], "'nan' is not a finite number"),
        (["--stall-check-shutdown-time-seconds", "1e400"], "inf is not in the range"),
        (
            ["--mpi-args", "it's"],
            """--mpi-args 'it's': it must be arguments as a shell takes them, but: no closing quotation.""",
        ),
        (
            ["--binding-args=a \\"],
            "--binding-args 'a \\': it must be arguments as a shell takes them, but: no escaped character.",
        ),
        (["-x", "=1"], "-x '=1': it must begin with a variable's name"),
        (["-x", "A B=3"], "-x 'A B=3': the variable's name must be without spaces, but is 'A B'"),
        (["-x", "RINGTRAIN_LOG_LEVEL=foo"], "RINGTRAIN_LOG_LEVEL: expected one of debug,"),
        (["-x", "RINGTRAIN_HOST_LAYOUT=1+5"], "expected ranks per host that sum to 1 but found '1+5'"),
        (["--fusion-threshold-mb", "lots"], "'lots' is not a valid number: it must be one of at least 0, and"),
        (["--cache-capacity", "two"], "'two' is not a valid integer: it must be one of at least 0."),
        (["-x", ""], "-x '': it must begin with a variable's name"),
        (["-H", "a" * 300], "a host's name must have at most 253 characters, and 64 between dots, but has 300"),
        (["-H", "a." * 200 + "a"], "at most 253 characters"),
        (["-H", f"{'a' * 65}.b:2"], "64 between dots"),
        (["-H", "..:2"], "found no host name"),
        (["--hostfile", "/dev/zero"], "it is longer than"),
        (["--config-file", "/dev/zero"], "it is longer than"),
        (["--output-filename", ""], "--output-filename: it must name a folder, but is empty."),
        (["-n", "9" * 5000], "is not a valid integer"),
        (["--port-range", "9" * 5000 + "-1"], "expected FIRST-LAST"),
        (["-p", "nan"], "is not a valid integer"),
        (["--network-interfaces", "10.0.0.0/" + "9" * 5000], "expected an interface or a network"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_cannot_be_meant_is_refused_in_a_line(arguments: list[str], words: str, capsys) -> None:
    line = [*arguments, "true"] if arguments[0] == "-n" else ["-np", "1", *arguments, "true"]
    assert cli.main(line) == 2
    told = capsys.readouterr().err
    assert words in " ".join(told.split()) and "Traceback" not in told
    assert len([each for each in told.splitlines() if each.startswith("Error: ")]) == 1


def test_a_command_that_is_none_is_told_behind_those_that_there_are(capsys) -> None:
    assert commands.main(["docter"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("usage: ringtrain COMMAND") and told.endswith("ringtrain: there is no command 'docter'.\n")


FLAGS = [
    "-np",
    "-n",
    "-H",
    "-hostfile",
    "-x",
    "-p",
    "-i",
    "--network-interfaces",
    "--network-interface",
    "--port-range",
    "--start-timeout",
    "--output-filename",
    "--config-file",
    "--mpi-args",
    "--binding-args",
    "--verbose",
    "--share-gpus",
    "--mpi",
    "--prefix-timestamp",
    "--blacklist-cooldown-range",
    "--host-discovery-script",
    "--no-such",
    "--",
    *(flag.split("/")[0] for setting in SETTINGS for flag in setting.flags),
    *(flag.split("/")[0] for flag in WITHOUT_EFFECT),
]
VALUES = [
    "",
    "0",
    "1",
    "2",
    "-1",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1_0",
    "9" * 5000,
    "localhost:2",
    "localhost",
    "a" * 300,
    "it's",
    "\\",
    "=",
    "=1",
    "A=",
    "PATH",
    "/",
    "/dev/null",
    "/no/such",
    "/etc/passwd",
    ".",
    "~",
    "\udcff",
    "é",
    "10.0.0.0/8",
    "1-2",
    "20000-20100",
    "true",
    "ls -l",
    "\n",
]
WORDS = st.one_of(
    st.sampled_from(FLAGS), st.sampled_from(VALUES), st.text(st.characters(exclude_characters="\0"), max_size=4)
)


@LONG
def test_any_command_line_is_understood_or_refused(examples: int) -> None:
    """All the deciding, up to the moment in which something would be started."""

    @settings(max_examples=examples, derandomize=examples == EXAMPLES, deadline=None)
    @given(words=st.lists(WORDS, max_size=8))
    def check(words: list[str]) -> None:
        try:
            given_ = cli.ringtrainrun.make_context("ringtrainrun", ["-np", "2", *words]).params
            plan = planning.make_plan(given_, {"PATH": os.environ["PATH"]})
            assert plan.ranks >= 1 and all(
                isinstance(line, str) for line in [*planning.idle_flags(given_), *planning.warnings(given_)]
            )
        except (cli.click.UsageError, HostsError, ConfigError, InvalidArgumentError) as refusal:
            assert str(refusal).strip() or isinstance(refusal, cli.click.UsageError)

    check()


def test_a_fault_of_ours_is_a_line_and_a_file(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The last resort, for what nobody has thought of."""

    def fail(*_: object) -> None:
        raise KeyError("nobody\nexpected this")

    monkeypatch.setattr(cli, "make_plan", fail)
    assert cli.main(["-np", "1", "true"]) == 125
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and told.startswith(
        "ringtrainrun: a fault of ringtrainrun itself, and not of the command: KeyError: "
    )
    path = Path(told.split("'")[-2])
    assert "Traceback" in path.read_text() and path.stat().st_mode & 0o777 == 0o600
    path.unlink()


def test_a_fault_of_ours_during_the_job_ends_its_ranks(tmp_path: Path) -> None:
    program = """
import sys
from ringtrain.launch import cli, job
def fail(*_):
    raise ZeroDivisionError("planted")
job.Job._take = fail
sys.exit(cli.main(sys.argv[1:]))
"""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, "-np", "2", "sleep", "321.5"],
        capture_output=True,
        text=True,
        timeout=600,
        env=rank_environment(),
    )
    assert done.returncode == 125 and "ZeroDivisionError: planted. Please report it" in done.stderr, done.stderr
    Path(done.stderr.split("'")[-2]).unlink()
    while subprocess.run(["pgrep", "-f", "^sleep 321.5"], capture_output=True).returncode == 0:
        assert time.monotonic() < started + 30
        time.sleep(0.1)


# ---- files that others can write ----


@pytest.mark.parametrize("mode, words", [(0o600, ""), (0o644, ""), (0o666, "everybody can"), (0o602, "everybody can")])
@pytest.mark.parametrize(
    "flag, text", [("-hostfile", "localhost slots=1\n"), ("--config-file", "params: {cache_capacity: 5}\n")]
)
def test_a_file_that_others_can_write_is_told(flag: str, text: str, mode: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    path.chmod(mode)
    told = planning.warnings(
        cli.ringtrainrun.make_context("ringtrainrun", ["-np", "1", flag, str(path), "true"]).params
    )
    assert len(told) == bool(words) and words in "".join(told)
    assert all(
        f"{flag} '{path}': only you must be able to write it" in line and f"chmod go-w {path}" in line for line in told
    )


@needs.root
@pytest.mark.parametrize(
    "user, group, mode, words",
    [(4321, 0, 0o600, "user 4321 can"), (0, 4321, 0o664, "group 4321 can"), (0, 0, 0o664, ""), (0, 4321, 0o644, "")],
)
def test_whose_file_it_is_matters(user: int, group: int, mode: int, words: str, tmp_path: Path) -> None:
    (path := tmp_path / "hosts").touch(mode)
    path.chmod(mode)
    os.chown(path, user, group)
    assert (planning.writers_of(str(path)) + " can" if words else planning.writers_of(str(path))) == words


def test_the_warning_is_said_and_the_job_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("localhost slots=1\n")
    path.chmod(0o666)
    done = launch("-np", "1", "-hostfile", str(path), "true")
    assert done.returncode == 0 and f"-hostfile '{path}': only you must be able to write it" in done.stderr


def test_a_file_may_be_a_pipe(tmp_path: Path) -> None:
    """As bash's <(...) is: it can be read once."""
    line = f"{sys.executable} -m ringtrain.launch -np 1 --config-file <(echo 'params: {{cycle_time_ms: 1}}') --dry-run true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=SECONDS, env=rank_environment())
    assert done.returncode == 0 and "params.cycle_time_ms in /dev/fd/" in done.stderr, done.stderr


# ---- surroundings ----


def launch(*arguments: str, prefix: tuple[str, ...] = (), **options) -> subprocess.CompletedProcess:
    options = {"timeout": 60, "env": rank_environment(), **options}
    return subprocess.run(
        [*prefix, sys.executable, "-m", "ringtrain.launch", *arguments], capture_output=True, text=True, **options
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            ["--output-filename", "/dev/null"],
            "output folder '/dev/null': it must be a folder that can be made and written, but: File exists.",
        ),
        (
            ["--output-filename", "/dev/null/logs"],
            "output folder '/dev/null/logs': it must be a folder that can be made and written, but: Not a",
        ),
        (
            ["--output-filename", "/proc/logs"],
            "output folder '/proc/logs': it must be a folder that can be made and written, but: ",
        ),
    ],
)
def test_an_unusable_folder_is_refused(arguments: list[str], words: str) -> None:
    done = launch("-np", "1", *arguments, "true")
    assert done.returncode == 125 and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("ranks", ["99999999", pytest.param("9" * 18, marks=pytest.mark.long)])
def test_more_ranks_than_a_host_can_have_are_refused_at_once(ranks: str) -> None:
    done = launch("-np", ranks, "true")
    assert (
        done.returncode == 125
        and f"it must have room for its {ranks} ranks, but its memory and process limit allow only" in done.stderr
    )
    assert problems_of("b", 3, {**LIKE_HERE, "most_ranks": 2}, HERE) and not problems_of(
        "b", 2, {**LIKE_HERE, "most_ranks": 2}, HERE
    )


def test_a_working_directory_that_is_gone_is_said(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = launch(
        "-np", "1", "true", prefix=("sh", "-c", f'cd {tmp_path}/gone && rmdir {tmp_path}/gone && exec "$@"', "sh")
    )
    assert (
        done.returncode == 125
        and "ringtrainrun: working directory: it must exist, but: No such file or directory." in done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.openmpi
def test_a_job_within_a_job_is_refused() -> None:
    done = launch("-np", "2", sys.executable, "-m", "ringtrain.launch", "-np", "1", "true")
    assert done.returncode == 125
    assert done.stderr.count("RINGTRAIN_LAUNCHER: ringtrainrun must be started outside of a job, but rank ") >= 1
    assert "Traceback" not in done.stderr


SURROUNDINGS = {
    "variables of an earlier job": (
        "env",
        "RINGTRAIN_RANK=7",
        "RINGTRAIN_SIZE=x",
        "RINGTRAIN_LOCAL_SIZE=abc",
        "RINGTRAIN_LOCAL_RANK=",
        "RINGTRAIN_LAUNCHER=foo",
        "RINGTRAIN_FUNCTION=/x",
        "RINGTRAIN_SLOTS=q",
        "RINGTRAIN_NO_SUCH=1",
    ),
    "no environment at all": ("env", "-i"),
    "no HOME": ("env", "-u", "HOME"),
    "no PATH": ("env", "-u", "PATH"),
    "no stdin": ("sh", "-c", 'exec "$@" <&-', "sh"),
    "TMPDIR that is not there": ("env", "TMPDIR=/no/such"),
    "bytes that are no text": ("env", b"ODD=\xff\xfe"),
}


@pytest.mark.openmpi
@pytest.mark.parametrize(
    "what",
    [what if number < 2 else pytest.param(what, marks=pytest.mark.long) for number, what in enumerate(SURROUNDINGS)],
)
def test_odd_surroundings_do_no_harm(what: str) -> None:
    done = launch("-np", "2", "/bin/sh", "-c", "echo $RINGTRAIN_RANK of $RINGTRAIN_SIZE", prefix=SURROUNDINGS[what])
    assert sorted(done.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"] and done.returncode == 0, done.stderr


@pytest.mark.openmpi
@pytest.mark.parametrize(
    "closed", [*(pytest.param(each, marks=pytest.mark.long) for each in (">&-", "2>&-")), "<&- >&- 2>&-"]
)
def test_standard_streams_may_be_closed(closed: str, tmp_path: Path) -> None:
    """No file or pipe of ours must take their numbers."""
    done = launch(
        "-np",
        "2",
        "sh",
        "-c",
        f"echo out; echo err >&2; touch {tmp_path}/$RINGTRAIN_RANK",
        prefix=("sh", "-c", f'exec "$@" {closed}', "sh"),
    )
    assert done.returncode == 0 and (tmp_path / "0").exists() and (tmp_path / "1").exists()
    assert ("[0] out" in done.stdout) == (">&-" not in closed.split()) and ("[0] err" in done.stderr) == (
        "2>&-" not in closed
    )


def test_help_may_be_left_early() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stream:
        done = subprocess.run(
            [sys.executable, "-m", "ringtrain.launch", "--help"], stdout=stream, stderr=subprocess.PIPE, timeout=600
        )
    assert b"Traceback" not in done.stderr


def test_login_shells_that_are_not_sh_are_told_to_open_mpi() -> None:
    assert openmpi.for_login_shells(["bash", "zsh", "dash", ""]) == {}
    assert openmpi.for_login_shells(["bash", "tcsh"])["PRTE_MCA_plm_ssh_assume_same_shell"] == "0"
