"""``ringtrain bench plot``: what ``--json`` has written, as SVG: time and bandwidth over size, steps and overlap as bars.

``figures_of`` decides what is drawn, and is pure; matplotlib, an extra, only draws it. The same documents give the same bytes.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtrain.bench import documents
from ringtrain.bench.command import bytes_text

FLOORS = ("memcpy", "alone", "identity", "ddp-silent", "exchange")  # systems that send nothing, or do nothing besides
DASHES = ("--", ":", "-.")  # of one floor after the other
OURS = ("#1f5fbf", "#5b9bd5", "#12806a", "#66b38a", "#7a5bc7", "#b29ae0")
PEERS = ("#d97f12", "#c2410c", "#a16207", "#9d5c8f", "#7f7f7f")
FLOOR, SILENT = "#111111", "#8a8f98"


@dataclass
class Series:
    """One system over sizes: seconds by bytes."""

    name: str
    seconds: dict[int, float]
    is_floor: bool = False


@dataclass
class Curves:
    """Time and bandwidth over size."""

    title: str
    lines: list[Series]


@dataclass
class Bars:
    """Groups of bars, one of each system: seconds by group, and a text on each."""

    title: str
    groups: list[str]
    systems: dict[str, list[float | None]]
    texts: dict[str, list[str]] = field(default_factory=dict)


Figure = Curves | Bars


def main(files: Sequence[str], folder: str) -> int:
    """Draws all that is in the files into the folder and names what it has written; returns the exit code."""
    if importlib.util.find_spec("matplotlib") is None:
        print("ringtrain bench plot: it draws with matplotlib, which is not installed. Run: pip install 'ringtrain[plot]'",
              file=sys.stderr)  # fmt: skip
        return 2
    try:
        read = {file: documents.read(file) for file in files}
        os.makedirs(folder, exist_ok=True)
        for file, document in read.items():
            figures = figures_of(document)
            if not figures:
                print(f"{file}: nothing to draw of {document['benchmark']}", file=sys.stderr)
            for number, figure in enumerate(figures, 1):
                path = Path(folder) / f"{Path(file).stem}{f'-{number}' if len(figures) > 1 else ''}.svg"
                draw(figure, documents.machine_line(document), path)
                print(path)
    except (OSError, ValueError, KeyError) as problem:
        told = f"a result lacks {problem}" if isinstance(problem, KeyError) else problem
        print(f"ringtrain bench plot: {told}", file=sys.stderr)
        return 1
    return 0


# ---- what is drawn, pure ----


def figures_of(document: Mapping[str, Any]) -> list[Figure]:
    """What there is to draw of a document; empty if its results are no times."""
    name = document["benchmark"]
    if name == "launch":
        return [_launch(document)]
    results = [each for each in document["results"] if each.get("seconds_median") is not None]
    if not results:
        return []
    if name == "overlap":
        return [_overlap(results)]
    by_ranks = {
        count: [each for each in results if each.get("np") == count]
        for count in sorted({each.get("np") for each in results})
    }
    figures: list[Figure] = []
    for count, own in by_ranks.items():
        several_sizes = len({each["bytes"] for each in own if "bytes" in each}) > 1
        title = f"{own[0]['op'] if name == 'allreduce' else name}, {count} ranks"
        figures.append(_curves(title, own) if several_sizes else _bars(title, own))
    return figures


def _curves(title: str, results: Sequence[Mapping[str, Any]]) -> Curves:
    lines: dict[str, Series] = {}
    for each in results:
        line = lines.setdefault(each["system"], Series(each["system"], {}, each["system"] in FLOORS))
        line.seconds[each["bytes"]] = each["seconds_median"]
    # Of a link: the floor of those who send all bytes.
    floors = [(each["bytes"], each["floor_seconds"]) for each in results if "floor_seconds" in each]
    if floors:
        lines["floor"] = Series("floor of the link", {}, True)
        for size_bytes, seconds in floors:
            lines["floor"].seconds[size_bytes] = max(seconds, lines["floor"].seconds.get(size_bytes, 0.0))
    return Curves(title, list(lines.values()))


GROUPS = ("network", "task", "job", "passes", "mode", "free_cores", "fusion_threshold_bytes", "op")


def _bars(title: str, results: Sequence[Mapping[str, Any]]) -> Bars:
    """Systems beside each other, in groups of what tells results of one system apart."""
    key = next((key for key in GROUPS if len({each.get(key) for each in results}) > 1), "op")
    groups = list(dict.fromkeys(str(each.get(key)) for each in results))
    systems = list(dict.fromkeys(each["system"] for each in results))
    seconds: dict[str, list[float | None]] = {system: [None] * len(groups) for system in systems}
    for each in results:
        seconds[each["system"]][groups.index(str(each.get(key)))] = each["seconds_median"]
    texts = {
        system: [_ratio(value, _floor_of(seconds, place)) for place, value in enumerate(values)]
        for system, values in seconds.items()
    }
    return Bars(f"{title}: seconds of a step" if results[0]["op"] == "train" else title, groups, seconds, texts)


def _floor_of(seconds: Mapping[str, Sequence[float | None]], place: int) -> float | None:
    return next((seconds[name][place] for name in FLOORS if name in seconds), None)


def _ratio(value: float | None, floor: float | None) -> str:
    return f"{value / floor:.2f} x" if value and floor else ""


def _overlap(results: Sequence[Mapping[str, Any]]) -> Bars:
    groups = [f"{each['system']}, free cores: {each['free_cores']}" for each in results]
    systems: dict[str, list[float | None]] = {
        "computing alone": [each["computing_seconds_median"] for each in results],
        "sending alone": [each["sending_seconds_median"] for each in results],
        "both in one step": [each["seconds_median"] for each in results],
    }
    texts = {"both in one step": [f"+ {each['beyond_the_larger']:.0%}" for each in results]}
    return Bars(
        f"overlap of {bytes_text(results[0]['bytes'])} of gradients, {results[0]['np']} ranks; + of the smaller part",
        groups,
        systems,
        texts,
    )


def _launch(document: Mapping[str, Any]) -> Bars:
    systems: dict[str, list[float | None]] = {
        launcher: [each[f"{launcher}_seconds_median"] for each in document["results"]]
        for launcher in ("ringtrainrun", "torchrun")
    }
    return Bars(f"launch, {document['np']} ranks", [each["job"] for each in document["results"]], systems)


# ---- drawing ----


def draw(figure: Figure, foot: str, path: Path) -> None:
    """Writes one figure."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style = {"svg.hashsalt": "ringtrain", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9,
             "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10}  # fmt: skip
    with pyplot.rc_context(style):
        made = _draw_curves(pyplot, figure) if isinstance(figure, Curves) else _draw_bars(pyplot, figure)
        made.suptitle(figure.title, x=0.01, ha="left", fontweight="bold", fontsize=11)
        made.text(
            0.01, 0.01, textwrap.fill(foot, int(made.get_figwidth() * 17)), fontsize=7, color="#5c6675", va="bottom"
        )
        made.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(made)


def _draw_curves(pyplot: Any, figure: Curves) -> Any:
    made, (times, rates) = pyplot.subplots(1, 2, figsize=(9.5, 4.2))
    colours = colours_of([line.name for line in figure.lines])
    sizes = sorted({size for line in figure.lines for size in line.seconds})
    dashes = itertools.cycle(DASHES)
    for line in figure.lines:
        own = sorted(line.seconds)
        how = {"color": colours[line.name], "label": line.name, "marker": None if line.is_floor else "o", "markersize": 4,
               "linestyle": next(dashes) if line.is_floor else "-", "linewidth": 1.4}  # fmt: skip
        times.plot(own, [line.seconds[size] for size in own], **how)
        rates.plot(own, [size / line.seconds[size] / 1e9 for size in own], **how)
    for axes, what in ((times, "seconds (median)"), (rates, "GB/s, bytes of the tensor by time")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [bytes_text(size) for size in sizes], rotation=30 if len(sizes) > 5 else 0)
        axes.minorticks_off()
        axes.set_title(what, loc="left", color="#39424f")
        axes.grid(alpha=0.25)
    times.set_yscale("log")
    rates.set_yscale("log")
    times.legend(frameon=False, fontsize=8)
    made.subplots_adjust(left=0.07, right=0.985, top=0.84, bottom=0.2, wspace=0.18)
    return made


def _draw_bars(pyplot: Any, figure: Bars) -> Any:
    count = len(figure.systems)
    made, all_axes = pyplot.subplots(
        1, len(figure.groups), figsize=(max(6.5, min(3.0 * len(figure.groups), 13)), 4.0), squeeze=False
    )
    colours = colours_of(list(figure.systems))
    for place, (axes, group) in enumerate(zip(all_axes[0], figure.groups, strict=True)):
        for number, (system, values) in enumerate(figure.systems.items()):
            value = values[place]
            if value is None:
                continue
            bar = axes.bar(number, value * 1e3, 0.8, color=SILENT if system in FLOORS else colours[system])
            if text := figure.texts.get(system, [""] * len(figure.groups))[place]:
                axes.bar_label(bar, [text], fontsize=7, padding=2)
        axes.set_title(textwrap.fill(group, 24), loc="left", color="#39424f")
        axes.set_xticks(range(count), ["\n".join(textwrap.wrap(name, 12)) for name in figure.systems], rotation=0 if count < 5 else 45,
                        fontsize=7)  # fmt: skip
        axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.05)
    all_axes[0][0].set_ylabel("ms (median)")
    made.subplots_adjust(left=0.11 if len(figure.groups) < 3 else 0.07, right=0.985, top=0.82, bottom=0.22, wspace=0.25)
    return made


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Ours in blues and greens, floors black, peers in browns."""
    ours = [name for name in names if name.startswith("ringtrain")]
    peers = [name for name in names if name not in ours and name not in FLOORS and not name.startswith("floor")]
    return {
        **dict.fromkeys(names, FLOOR),
        **{name: OURS[number % len(OURS)] for number, name in enumerate(ours)},
        **{name: PEERS[number % len(PEERS)] for number, name in enumerate(peers)},
    }
