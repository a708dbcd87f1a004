"""`ringtrain doctor`: what hosts and links can do, what ringtrain makes of it, and what to change for how much gain.

`examine` measures on the ranks, `doctor_advice` judges, `doctor_report` says it; here is the command.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ringtrain.launch import progress
from ringtrain.launch.doctor_advice import advise, floor_seconds, modes
from ringtrain.launch.doctor_report import report
from ringtrain.launch.doctor_speed import measure, speed_report
from ringtrain.launch.examine import examine
from ringtrain.launch.function import RunError, run
from ringtrain.launch.hosts import HostsError, parse_hostfile, parse_hosts
from ringtrain.launch.settings import once


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "-H",
    "--hosts",
    multiple=True,
    callback=once,
    help="hosts and ranks on each, such as node-a:2,node-b:2 (default: 2 ranks here)",
)
@click.option("-hostfile", "--hostfile", multiple=True, callback=once, help="hosts and ranks on each, from a file")
@click.option(
    "--model-mb",
    type=click.FloatRange(min=0.001),
    default=100.0,
    show_default=True,
    help="bytes of all gradients of the model, in MB (float32: 4 for each parameter)",
)
@click.option(
    "--step-ms",
    type=click.FloatRange(min=0.001),
    help="what a batch takes on one host, which sends nothing, in ms: says which mode of sending pays",
)
@click.option("--ssh-port", type=int)
@click.option("--ssh-identity-file")
@click.option("--network-interfaces", help="as for ringtrainrun")
@click.option("--speed", is_flag=True, help="instead: how fast each rank computes the steps of a script, behind --")
@click.option("--json", "written", type=click.Path(dir_okay=False), help="also writes the findings to this file")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def doctor(
    hosts: str | None,
    hostfile: str | None,
    model_mb: float,
    step_ms: float | None,
    speed: bool,
    written: str | None,
    command: Sequence[str],
    **flags: Any,
) -> None:
    """Examines hosts and the links between them; mostly takes less than 20 seconds.

    With --speed -- python train.py it runs that script on them for a while, and says what shares by speed would bring.
    """
    try:
        listed = (
            parse_hostfile(Path(hostfile).read_text(), hostfile) if hostfile else parse_hosts(hosts) if hosts else []
        )
    except (HostsError, OSError) as error:
        raise click.UsageError(str(error)) from None
    if speed != bool(command):
        raise click.UsageError(
            "--speed must come with a command, ringtrain doctor --speed -- python train.py, and the other way round."
        )
    if speed:
        measured = measure(command, listed, flags)
        click.echo("\n".join(speed_report(measured)))
        return _write(written, measured._asdict())
    environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    try:
        found = run(
            examine,
            (int(model_mb * 1e6),),
            np=sum(host.slots for host in listed) or 2,
            env=environment | progress.for_ranks(),
            hosts=hosts,
            hostfile=hostfile,  # which may name sites
            share_gpus=True,
            **flags,
        )[0]
    except RunError as error:  # the launcher has said why
        sys.exit(error.code or 1)
    found["floor_seconds"] = floor_seconds(found)
    found["advice"] = [vars(advice) for advice in advise(found)]
    if step_ms is not None:
        found["computing_seconds"] = step_ms / 1e3
        found["modes"] = modes(found)
    click.echo("\n".join(report(found)))
    _write(written, found)


def _write(file: str | None, found: dict[str, Any]) -> None:
    if file is None:
        return
    try:
        Path(file).write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise click.ClickException(
            f"--json '{file}': it must be a file that can be written, but: {error.strerror}."
        ) from None
