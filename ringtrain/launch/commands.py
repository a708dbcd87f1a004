"""The `ringtrain` command: `bench` is `python -m ringtrain.bench`, `doctor` examines hosts, `check-build` reports.

The benchmark is started by its name, as `python -m` does, so that the launcher does not know it.
"""

from __future__ import annotations

import runpy
import signal
import sys
from collections.abc import Mapping

import click

import ringtrain
from ringtrain._binding import options
from ringtrain.launch import cuda_aware
from ringtrain.launch.host_errors import LaunchError
from ringtrain.launch.interpreter import version_of
from ringtrain.launch.mpi_installation import find_installation
from ringtrain.launch.report import timelines
from ringtrain.launch.streams import with_its_output

USAGE = """\
usage: ringtrain COMMAND ...

  authority    numbers the worlds of an elastic job whose processes an engine starts (ringtrain authority --help)
  bench        compares allreduce, training steps and idle load with gloo, MPI and memcpy (ringtrain bench --help)
  doctor       examines hosts and the links between them, and says what to change (ringtrain doctor --help)
  flight FOLDER
               compares the last operations of all ranks, and says who is behind in what, or does otherwise (ringtrain flight --help)
  merge-timelines OUTPUT FILE ...
               merges the traces of all ranks into one: each FILE with its FILE.1, FILE.2, ...
  timeline report TRACE ... -o PAGE
               shows the steps in the traces of all ranks: what they wait for, and who is late (ringtrain timeline report --help)
  top          shows how a job goes that runs: steps, share of the floor, who is last, bytes (ringtrain top --help)
  check-build  prints the parts of this installation, and which MPI and frameworks it finds
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs `ringtrain` with these arguments (the process's own by default) and returns its exit code."""
    return with_its_output("ringtrain", lambda: _main(sys.argv[1:] if arguments is None else arguments))


def _main(arguments: list[str]) -> int:
    command, *rest = arguments or [""]
    if command == "bench":
        sys.argv[1:] = rest
        runpy.run_module("ringtrain.bench", run_name="__main__", alter_sys=True)  # ends in sys.exit
    if command == "authority":
        from ringtrain.launch.authority_command import authority

        return _by_click(authority, "ringtrain authority", rest)
    if command == "doctor":
        from ringtrain.launch.doctor import doctor  # which needs more than the other commands

        return _by_click(doctor, "ringtrain doctor", rest)
    if command == "flight":
        from ringtrain.launch.flight import flight

        return _by_click(flight, "ringtrain flight", rest)
    if command == "timeline":
        from ringtrain.launch.timeline import timeline

        return _by_click(timeline, "ringtrain timeline", rest)
    if command == "top":
        from ringtrain.launch.top import top

        return _by_click(top, "ringtrain top", rest)
    if command == "check-build":
        print("\n".join(check_build()))
        return 0
    if command == "merge-timelines":
        return merge_timelines(rest)
    if command in ("--version", "-v"):
        print(f"ringtrain {ringtrain.__version__}")
        return 0
    asked_for_help = command in ("--help", "-h")
    print(USAGE, end="", file=sys.stdout if asked_for_help else sys.stderr)
    if command and not asked_for_help:
        print(f"ringtrain: there is no command '{command}'.", file=sys.stderr)
    return 0 if asked_for_help else 2


def _by_click(command: click.Command, name: str, arguments: list[str]) -> int:
    try:
        return command.main(arguments, prog_name=name, standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT


def merge_timelines(arguments: list[str]) -> int:
    """``ringtrain merge-timelines``: prints what it merged, or why it cannot."""
    if len(arguments) < 2:
        print(USAGE, end="", file=sys.stderr)
        return 2
    output, *files = arguments
    try:
        merged = timelines.merge(files, output)
    except (OSError, ValueError) as error:
        print(f"ringtrain merge-timelines: {error}", file=sys.stderr)
        return 1
    print(f"{output}: {', '.join(map(str, merged))}")
    return 0


def check_build() -> list[str]:
    """Lines about the native library, the MPI and the frameworks of this environment."""
    try:
        installation = find_installation()
        mpi = f"{installation.version}\n    library {installation.library}\n    started by {installation.program}"
    except LaunchError as error:
        mpi = str(error).replace("\n", "\n    ")
    return [
        f"ringtrain {ringtrain.__version__}, Python {sys.version.split()[0]}",
        f"  library: {ringtrain.build_info()}",
        f"  MPI: {mpi}",
        *(
            f"  {name}: {version_of(name)}"
            for name in ("mpi4py", "numpy", "torch", "tensorflow", "keras", "tf_keras", "jax")
        ),
        *_gpu_lines(ringtrain.gpu_libraries()),
    ]


def _gpu_lines(libraries: Mapping[str, tuple[str, str]]) -> list[str]:
    lines = [f"  {name}: {f'{version} {path}' if version else path}" for name, (version, path) in libraries.items()]
    return [*lines, f"  CUDA-aware MPI: {cuda_aware.answer(options.environment())}"] if libraries["cuda"][0] else lines


if __name__ == "__main__":
    sys.exit(main())
