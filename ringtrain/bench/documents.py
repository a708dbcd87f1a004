"""What ``--json`` writes, of every benchmark alike, and what ``ringtrain bench plot`` reads.

A document is an object with

- ``schema``: 1.
- ``benchmark``: its name, such as ``allreduce``.
- ``machine``: what it ran on, when, by which command, and how busy others kept it (``machine.describe``).
- ``tables``: what was printed: ``headings`` and ``rows`` of texts of each; of benchmarks that print as they go, none.
- ``results``: what the tables were made of, an object each, as numbers in seconds and bytes.

Further members belong to single benchmarks.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1
OTHERS = "RINGTRAIN_BENCH_OTHERS"  # the share of the cores that other programs used before the ranks were started
SECONDS_TO_LOOK = 0.5
QUIET = 0.1  # of the cores: others that use more spoil figures

# What a command line has of files, and of hosts that the benchmark itself has made.
NOT_TOLD = re.compile(r" --(json|measured-rate|addresses)[ =]\S+")

_benchmark = _command = ""


def begin(benchmark: str, command: str) -> None:
    """From now on documents of this process are this benchmark's, which the command has started."""
    global _benchmark, _command
    _benchmark, _command = benchmark, command


def command() -> str:
    """As people type it, without arguments."""
    return _command


def make(
    machine: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    tables: Sequence[Mapping[str, Any]] = (),
    **further: Any,
) -> dict[str, Any]:
    """The document of the benchmark that has begun here."""
    return {
        "schema": SCHEMA, "benchmark": _benchmark, "machine": dict(machine), "tables": list(tables), "results": list(results),
        **further,
    }  # fmt: skip


def write(path: str | os.PathLike, document: Mapping[str, Any]) -> None:
    """Puts it in the place of what was there. Raises OSError, which names the file, too, where it is full."""
    try:
        Path(path).write_text(json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def read(path: str | os.PathLike) -> dict[str, Any]:
    """A document.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is none, or of another schema.
    """
    try:
        document = json.loads(Path(path).read_text())
    except ValueError:  # of its letters too
        document = None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema", "none") if isinstance(document, dict) else "none"
        raise ValueError(
            f"{path}: expected what ringtrain bench --json writes, of schema {SCHEMA}, but found {found}. "
            "Run the benchmark again with this release."
        )
    return document


def combine(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One of several jobs of one benchmark: all results and tables; what else there is comes from the first."""
    return {
        **documents[0],
        "tables": [table for document in documents for table in document["tables"]],
        "results": [result for document in documents for result in document["results"]],
    }


# ---- whether a machine is quiet ----


def look_at_others() -> float:
    """The share of the cores that programs use at the moment; takes half a second."""
    before = _busy_and_all()
    time.sleep(SECONDS_TO_LOOK)
    busy, every = (after - earlier for after, earlier in zip(_busy_and_all(), before, strict=True))
    return round(busy / every, 3) if every else 0.0


def _busy_and_all() -> tuple[int, int]:
    ticks = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
    idle = ticks[3] + ticks[4]  # of which some waits for a disk
    return sum(ticks) - idle, sum(ticks)


def machine_line(document: Mapping[str, Any]) -> str:
    """For the foot of a plot: what was measured where, and whether others disturbed it."""
    machine = document["machine"]
    command = NOT_TOLD.sub("", machine["command"])
    line = f"{command} · {machine['cores']} cores, {machine['processor']} · {machine['ringtrain'].split(',')[0]}"
    line += f" · {machine['date']}" if "date" in machine else ""
    others = machine.get("others")
    if others is None:
        return f"{line} · whether others used the machine is not known"
    return line if others <= QUIET else f"{line} · OTHER PROGRAMS USED {others:.0%} OF THE CORES"
