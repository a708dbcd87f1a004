"""``horovodrun``, the command of ringtrain-horovod.

It is ``ringtrainrun`` with what scripts for Horovod count on: its answers to ``--version`` and ``--check-build``, elastic
jobs by their flags alone, and Horovod's names of a rank's place in its environment.
"""

import os
import sys
from collections.abc import Sequence

import click

from ringtrain._bootstrap import probes
from ringtrain.launch.agent.rank_command import OF_HOROVODRUN
from ringtrain.launch.cli import main, ringtrainrun
from ringtrain.launch.interpreter import version_of

VERSION = "0.28.1"  # the release of Horovod whose names ringtrain has
FRAMEWORKS = {"TensorFlow": "tensorflow", "PyTorch": "torch", "MXNet": "mxnet"}
MAKES_IT_ELASTIC = {"--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "--host-discovery-script"}


def run_commandline() -> None:
    """Runs ``horovodrun`` with this process's arguments, and ends the process with its exit code."""
    arguments = sys.argv[1:]
    own = own_arguments(arguments)
    if {"-v", "--version"} & set(own):
        print(VERSION)
        sys.exit(0)
    if {"-cb", "--check-build"} & set(own):
        print(check_build())
        sys.exit(0)
    os.environ.setdefault(OF_HOROVODRUN, "gloo")
    sys.exit(main(with_elastic(arguments, own)))


# ---- pure, but for what is installed ----


def own_arguments(arguments: Sequence[str]) -> Sequence[str]:
    """Those before the command; all of them if they cannot be read, which ``main`` says."""
    try:
        context = ringtrainrun.make_context("horovodrun", [*arguments], resilient_parsing=True)
    except click.ClickException:
        return arguments
    return arguments[: len(arguments) - len(context.params.get("command") or ())]


def with_elastic(arguments: Sequence[str], own: Sequence[str]) -> list[str]:
    """The arguments, with ``--elastic`` where Horovod's flags say so without it."""
    flags = {argument.partition("=")[0] for argument in own}
    is_elastic = bool(flags & MAKES_IT_ELASTIC) and "--elastic" not in flags
    return [*(["--elastic"] if is_elastic else []), *arguments]


def check_build() -> str:
    """What this environment has, in the layout of Horovod's answer, which scripts search for lines such as "[X] PyTorch"."""

    def lines(title: str, found: dict[str, bool]) -> str:
        return "\n".join(
            [f"{title}:", *(f"    [{'X' if is_there else ' '}] {name}" for name, is_there in found.items())]
        )

    operations = {
        "NCCL": bool(probes.nccl_built()), "DDL": probes.ddl_built(), "CCL": probes.ccl_built(), "MPI": probes.mpi_built(),
        "Gloo": probes.gloo_built(),
    }  # fmt: skip
    there = {name: version_of(module) != "not installed" for name, module in FRAMEWORKS.items()}
    parts = [
        f"Horovod v{VERSION}:",
        lines("Available Frameworks", there),
        lines("Available Controllers", {name: operations[name] for name in ("MPI", "Gloo")}),
        lines("Available Tensor Operations", operations),
    ]
    return "\n\n".join(parts)
