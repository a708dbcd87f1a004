"""`ringtrain flight`: what the flight records of all ranks say together."""

from __future__ import annotations

from pathlib import Path

import click

from ringtrain._runtime import flight_recorder
from ringtrain._runtime.rank_lists import ranks_text
from ringtrain.errors import InvalidArgumentError
from ringtrain.launch import flight_comparison


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rank", type=click.IntRange(min=0), multiple=True,
              help="print the operations of this rank instead; may be given several times")  # fmt: skip
def flight(folder: Path, rank: tuple[int, ...]) -> None:
    """Compares the last operations of all ranks in FOLDER, and says who is behind in what, or does otherwise.

    The ranks leave them there as flight.RANK.json if the job has RINGTRAIN_FLIGHT_RECORD=FOLDER set, when their world ends by
    an error, or when an operation has waited for too long. Without a shared folder copy the files of all hosts into one.
    """
    try:
        records, others = flight_comparison.newest_world(flight_recorder.read(folder))
    except (OSError, InvalidArgumentError) as problem:
        raise click.ClickException(str(problem)) from None
    if rank:
        _show_operations(records, rank)
        return
    print("\n".join(flight_comparison.compare(records)))
    if others:
        print(f"Left out, since of an earlier world: the records of {ranks_text(each.rank for each in others)}.")


def _show_operations(records: list[flight_recorder.FlightRecord], ranks: tuple[int, ...]) -> None:
    by_rank = {record.rank: record for record in records}
    if absent := [rank for rank in ranks if rank not in by_rank]:
        raise click.ClickException(
            f"{ranks_text(absent)} must have left a record, but has not. There are those of {ranks_text(by_rank)}."
        )
    print("\n".join(str(by_rank[rank]) for rank in ranks))
