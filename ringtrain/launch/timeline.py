"""`ringtrain timeline report`: the traces of all ranks as one page that says where the steps' time goes."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ringtrain.launch.report import timelines
from ringtrain.launch.report.findings import Interconnect, find
from ringtrain.launch.report.page import page
from ringtrain.launch.report.steps import steps_of
from ringtrain.launch.report.trace_arrays import read
from ringtrain.launch.report.verdicts import verdicts


@click.group()
def timeline() -> None:
    """Reads the traces of a job whose ranks had a timeline."""


@timeline.command()
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="the page to write"
)
@click.option("--link-gbit", type=click.FloatRange(min=0, min_open=True),
              help="what each host's links carry each way, in Gbit/s, such as ringtrain doctor measures: "
              "the floor of a step then follows from its bytes; else the fastest step is the floor")  # fmt: skip
@click.option("--hosts", type=click.IntRange(min=2), help="number of hosts, for --link-gbit (one for each rank)")
def report(traces: tuple[Path, ...], output: Path, link_gbit: float | None, hosts: int | None) -> None:
    """Writes one page about the steps in TRACE...: each with its TRACE.1, TRACE.2, ...

    It shows steps as pictures with all ranks on one clock, what they wait for, how much of it is hidden behind computing, the
    tensors that cost most, and who is late and where. It is one file, which needs no network.
    """
    if hosts and not link_gbit:
        raise click.UsageError("--hosts is for --link-gbit, which is missing.")
    try:
        files = list(dict.fromkeys(file for trace in traces for file in timelines.with_companions(trace)))
        steps = steps_of(read(files))
        link = Interconnect(link_gbit * 1e9 / 8, hosts or len(steps.traces)) if link_gbit else None
        found = find(steps, link)
        text = page(steps, found, f"Timeline of {', '.join(trace.name for trace in traces)}")
        _write(output, text)
    except (OSError, ValueError) as problem:
        raise click.ClickException(str(problem)) from None
    click.echo("\n".join(verdicts(found)))
    click.echo(f"{output}: {found.steps} steps of {found.ranks} ranks")


def _write(output: Path, text: str) -> None:
    """Puts a page in the place of what was there. Raises OSError, which names the file."""
    growing = output.with_name(f"{output.name}.growing")
    try:
        growing.write_text(text, encoding="utf-8")
        os.replace(growing, output)
    except OSError as error:
        growing.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(output)) from None
