"""The page of ``ringtrain timeline report``: one file that needs no network, drawn by a script of ours within it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from ringtrain.launch.report.findings import CAUSES, COMPUTING, PARTS, Findings, rank_step, step_durations
from ringtrain.launch.report.steps import Steps, chosen_steps
from ringtrain.launch.report.verdicts import time_text, verdicts

MOST_PICTURES = 12
MOST_RANKS = 128  # in a picture
MOST_TENSORS = 25
MOST_LATE = 12
FINEST = 1 / 1500  # of a step: gaps that nobody sees are closed
# From behind to the front, where ranks have one lane for all.
KINDS = ("late ranks", "negotiate", "queue", "pack", "wire", "reduce", "unpack")
COLOURS = {
    COMPUTING[0]: "#b9c7dd",
    COMPUTING[1]: "#5b87c7",
    COMPUTING[2]: "#dfe5ee",
    "waiting": "#f3d9a4",
    "late ranks": "#e5533d",
    "negotiate": "#8b5cc7",
    "queue": "#b8b0a4",
    "pack": "#2f9e77",
    "wire": "#1f6f8b",
    "reduce": "#d97f12",
    "unpack": "#7cc47f",
    "other waiting": "#f3d9a4",
}


def page(steps: Steps, found: Findings, title: str) -> str:
    """The whole page as HTML."""
    folder = Path(__file__).parent
    drawn = json.dumps(_drawn(steps, found), separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title>
<style>
{(folder / "report.css").read_text()}</style></head>
<body>
<h1>{escape(title)}</h1>
<p class="quiet">{found.ranks} ranks, {found.steps} steps, {_bytes_text(found.bytes_of_a_step)} a step and rank</p>
{_tiles(found)}
<ul class="verdicts">{"".join(f"<li>{escape(each)}</li>" for each in verdicts(found))}</ul>
<h2>A step</h2>
<div class="controls"><label>step <select id="step"></select></label><button id="whole">whole step</button>
<span class="quiet">drag to see a part of it larger</span></div>
<div class="legend" id="legend-picture"></div>
<div id="picture"></div>
<h2>Where a mean step goes</h2>
<p class="quiet">Computing, and while the program waits, what held it up; of what happens at the same time, the first of
{", ".join(CAUSES)} counts.</p>
<div class="legend" id="legend-ranks"></div>
<div id="ranks"></div>
<h2>All steps</h2>
<div id="steps"></div>
<h2>Who is late</h2>
{_late(found)}
<h2>Tensors that cost most</h2>
{_tensors(found)}
<script type="application/json" id="data">{drawn}</script>
<script>
{(folder / "report.js").read_text()}</script>
</body></html>
"""


def _tiles(found: Findings) -> str:
    tiles = {
        "a step (median)": time_text(found.step),
        "of it computing": _percent(sum(found.parts[part] for part in COMPUTING) / (sum(found.parts.values()) or 1.0)),
        "of sums hidden": _percent(found.overlap),
        "of the link's floor" if found.link else "of the fastest step's rate": _percent(found.floor_share),
        "sums under way": time_text(found.under_way),
    }
    return "".join(
        ['<div class="tiles">', *(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in tiles.items()), "</div>"]
    )  # fmt: skip


def _late(found: Findings) -> str:
    if not found.late:
        return '<p class="quiet">One rank has nobody to wait for.</p>'
    heads = ("rank", "last in", "behind the others", "before its first gradient", "from there on", "where")
    rows = [
        (f"rank {each.place}", f"{each.last_in} steps", _signed(each.late),
         f"{_signed(each.before_first)} (x {each.before_ratio:.2f})",
         f"{_signed(each.in_backward)} (x {each.backward_ratio:.2f})", each.where if each.late > 0 else "")
        for each in found.late[:MOST_LATE]
    ]  # fmt: skip
    return _table(heads, rows) + _more(len(found.late), MOST_LATE, "ranks")


def _tensors(found: Findings) -> str:
    heads = ("tensor", "bytes", "under way", "waiting for the last rank", "was the last sum in")
    rows = [
        (each.name, _bytes_text(each.size_bytes), time_text(each.under_way), time_text(each.waiting),
         f"{_percent(each.ended_last)} of steps")
        for each in found.tensors[:MOST_TENSORS]
    ]  # fmt: skip
    note = '<p class="quiet">For each step and rank; tensors of one batch share its time by their bytes.</p>'
    return note + _table(heads, rows) + _more(len(found.tensors), MOST_TENSORS, "tensors")


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(
            f"<{tag}{' class=where' if heads[place] == 'where' else ''}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        ) + "</tr>"  # fmt: skip

    return f"<table>{line(heads, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _more(count: int, shown: int, what: str) -> str:
    return f'<p class="quiet">and {count - shown} more {what}</p>' if count > shown else ""


def _drawn(steps: Steps, found: Findings) -> dict[str, Any]:
    """What the script draws."""
    durations = step_durations(steps)
    return {
        "colours": COLOURS,
        "computing": COMPUTING,
        "kinds": KINDS,
        "parts": PARTS,
        "ranks": [
            {"rank": rank, "parts": [round(parts[part], 1) for part in PARTS]}
            for rank, parts in found.parts_of_ranks.items()
        ][:MOST_RANKS],
        "steps": np.round(np.nan_to_num(durations), 1).tolist(),
        "pictures": [_picture(steps, step, name) for step, name in _to_picture(durations)],
    }


def _to_picture(durations: np.ndarray) -> list[tuple[int, str]]:
    """Which steps are drawn, and what they are called: the middle one first, then the longest, then others."""
    first = min(1, len(durations) - 1)
    order = first + np.argsort(np.nan_to_num(durations[first:]), kind="stable")
    median, longest, fastest = (int(order[place]) for place in (len(order) // 2, -1, 0))
    named = {median: "a usual step", longest: "the longest", fastest: "the fastest"}
    others = [step for step in chosen_steps(len(durations), MOST_PICTURES - len(named)) if step not in named]
    return [
        (step, f"{step}: {time_text(durations[step])}{f', {named[step]}' if step in named else ''}")
        for step in [*named, *others]
    ]


def _picture(steps: Steps, step: int, name: str) -> dict[str, Any]:
    ranks = [(trace.rank, rank_step(steps, number, step)) for number, trace in enumerate(steps.traces[:MOST_RANKS])]
    there = [(rank, each) for rank, each in ranks if each is not None]
    begin, end = min(each.begun for _, each in there), max(each.ended for _, each in there)

    def flat(intervals: np.ndarray) -> list[float]:
        return np.round(_closed(intervals, (end - begin) * FINEST) - begin, 1).ravel().tolist()

    rows = [
        {
            "rank": rank,
            "borders": [round(at - begin, 1) for at in (each.begun, each.first, each.last, each.ended)],
            "waited": flat(each.waited),
            "kinds": [flat(each.kinds[kind]) for kind in KINDS],
        }
        for rank, each in there
    ]
    return {"name": name, "length": round(end - begin, 1), "rows": rows}


def _closed(intervals: np.ndarray, gap: float) -> np.ndarray:
    """The same without gaps that are shorter."""
    if len(intervals) < 2:
        return intervals
    apart = np.concatenate(([True], intervals[1:, 0] - intervals[:-1, 1] > gap))
    lasts = np.concatenate((np.flatnonzero(apart)[1:] - 1, [len(intervals) - 1]))
    return np.stack([intervals[apart, 0], intervals[lasts, 1]], axis=1)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _signed(microseconds: float) -> str:
    return f"{'-' if microseconds < 0 else ''}{time_text(abs(microseconds))}"


def _bytes_text(size_bytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} GB"
