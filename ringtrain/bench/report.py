"""How benchmarks say what they found, on rank 0: times in readable units, aligned tables, and JSON."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringtrain._binding.options import environment
from ringtrain.bench import documents, ranks
from ringtrain.bench.machine import describe
from ringtrain.launch import progress

# How far this rank is, for whoever started it: rank 0 alone says so.
PROGRESS = progress.of_starter(environment() if ranks.rank() == 0 else {})
_tables: list[dict[str, Any]] = []  # that were printed


def seconds_text(seconds: float) -> str:
    """A time in the unit that keeps it readable."""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def say(text: str = "") -> None:
    """Prints on rank 0."""
    if ranks.rank() == 0:
        PROGRESS.clear()
        print(text, flush=True)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints columns on rank 0, the first to the left and the others to the right; ``write_json`` writes them too."""
    _tables.append({"headings": list(headings), "rows": [list(row) for row in rows]})
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    for row in [headings, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        say("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())


def result(system: str, op: str, seconds: np.ndarray, verified: bool, **further: Any) -> dict[str, Any]:
    """One result in the form that all benchmarks share: of one system, over all repetitions."""
    return {
        "system": system,
        "op": op,
        "np": ranks.size(),
        "seconds_median": float(np.median(seconds)),
        "seconds_min": float(seconds.min()),
        "repetitions": len(seconds),
        "verified": verified,
        **further,
    }


def verdict(result: dict[str, Any]) -> str:
    """The last cell of a row."""
    return "right" if result["verified"] else "WRONG"


def write_json(path: str | None, results: Sequence[dict[str, Any]], **further: Any) -> None:
    """Writes machine, tables, results and whatever else on rank 0; does nothing without a path."""
    if path is not None and ranks.rank() == 0:
        documents.write(path, documents.make(describe(), results, _tables, **further))
