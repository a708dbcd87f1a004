"""The engine's program belongs to the MPI that mpi4py loads, also where another one was installed over it; and may stumble once."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from pathlib import Path

import pytest
from environments import rank_environment, ringtrainrun
from eventually import eventually

from ringtrain.launch import mpich, openmpi
from ringtrain.launch.engine import Program
from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.mpi_installation import find_program
from ringtrain.launch.output import EngineStream
from ringtrain.launch.terminal import Terminal

OPEN_MPI, HYDRA = "mpirun (Open MPI) 5.0.11", "HYDRA build details:"


def installed(folder: Path, **programs: str) -> str:
    """Programs that say this of themselves, and the path of a library beside them."""
    (folder / "bin").mkdir()
    for name, says in programs.items():
        program = folder / "bin" / name.replace("_", ".")
        program.write_text(f"#!/bin/sh\necho '{says}'\n")
        program.chmod(0o755)
    return str(folder / "lib" / "libmpi.so")


def test_a_program_of_another_mpi_is_refused_by_the_names_of_both(tmp_path: Path) -> None:
    library = installed(tmp_path, mpirun=HYDRA)
    with pytest.raises(
        LaunchError, match=r"mpirun': it must belong to Open MPI, whose .* but is MPICH's.*pip uninstall"
    ):
        find_program(library, openmpi)


def test_a_program_of_another_mpi_is_passed_over(tmp_path: Path) -> None:
    library = installed(tmp_path, mpiexec_hydra=OPEN_MPI, mpiexec=HYDRA)
    assert find_program(library, mpich) == f"{tmp_path}/bin/mpiexec"


@pytest.mark.parametrize("says", [OPEN_MPI, "PALS 1.2", ""])
def test_a_program_that_says_nothing_else_is_taken(says: str, tmp_path: Path) -> None:
    assert find_program(installed(tmp_path, mpirun=says), openmpi) == f"{tmp_path}/bin/mpirun"


STUMBLES = """\
#!/bin/sh
echo once more >> {count}
[ $(wc -l < {count}) -gt {times} ] && exec {program} "$@"
echo "The PMIx server's listener thread failed to start. We cannot" >&2
exit 213
"""
WITH_PROGRAM = """
import sys
from ringtrain.launch import cli, mpi_installation
mpi_installation.find_program = lambda library, engine: sys.argv[1]
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.openmpi
@pytest.mark.parametrize("times", [0, 1, 2])
def test_an_mpirun_that_stumbles_before_any_rank_ran_is_started_once_more(times: int, tmp_path: Path) -> None:
    python, _, _, *arguments = ringtrainrun("openmpi", 2, "echo", "ran")
    program = subprocess.run(
        [python, "-c", "from ringtrain.launch.mpi_installation import find_installation as f; print(f().program)"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    stumbles = tmp_path / "mpirun"
    stumbles.write_text(STUMBLES.format(count=tmp_path / "count", times=times, program=program))
    stumbles.chmod(0o755)
    done = subprocess.run(
        [python, "-c", WITH_PROGRAM, stumbles, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=rank_environment(),
    )
    assert done.returncode == (125 if times == 2 else 0), done.stderr
    assert done.stdout.count("ran") == (0 if times == 2 else 2)
    assert done.stderr.count("Open MPI ended before any rank ran, as it said; it is started once more.") == min(
        times, 1
    )


def test_what_a_program_leaves_in_tmpdir_is_removed(tmp_path: Path) -> None:
    """mpirun removes its folder itself, unless it is killed or loses a rank before MPI_Init."""
    mine, others = "ompi.$$", "ompi.1"
    script = f'mkdir -p "$TMPDIR/{mine}/0" "$TMPDIR/{others}"; touch "$TMPDIR/{mine}/0/file"; exec sleep 100'
    words = {
        number: EngineStream(Terminal(sys.stdout.buffer, sys.stderr.buffer), number, lambda _: False, lambda _: None)
        for number in (1, 2)
    }
    surroundings = {**os.environ, "TMPDIR": str(tmp_path)}
    program = Program("Open MPI", ["sh", "-c", script], surroundings, words, openmpi.folder_of)
    with selectors.DefaultSelector() as selector:
        program.start(selector)
        eventually(lambda: list(tmp_path.glob("*/0/file")), "the program has made its folder")
        program.kill()
        program.finish()
    assert [path.name for path in tmp_path.iterdir()] == [others]
