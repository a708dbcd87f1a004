"""Draws docs/scale.svg from what `bin/simulate --scale --json` and `--collectives --json` have written.

    python docs/plot_scale.py docs/benchmarks/scale-*.jsonl -o docs/scale.svg

Needs matplotlib. The name of each file, behind its last hyphen, is how ranks agreed; `collectives` has sums of hosts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

STYLES = {"steady": "-", "changed": "--"}
COLOURS = {"schedule": "tab:green", "drawn": "tab:olive", "negotiation": "tab:red"}
SUMS = "collectives"
WAYS = {"ring": "tab:red", "chosen": "tab:green", "tree": "tab:gray"}
SIZES = {1024: "-", 262144: "--"}  # bytes
PANELS = [
    ("microseconds", "microseconds until the last rank starts"),
    ("busiest_rank_messages", "messages of the busiest rank"),
    ("busiest_rank_bytes", "bytes of the busiest rank"),
]


def rows(path: Path, step: str) -> list[dict]:
    """The lines of a file for one kind of step."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["step"] == step]


def way_of(path: Path) -> str:
    """What the file's figures are of."""
    return path.stem.rpartition("-")[2]


def draw_sums(path: Path, panel: Axes) -> None:
    """The time of a sum over the number of hosts, by its way and size."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for size, style in SIZES.items():
        for way, colour in WAYS.items():
            found = [line for line in lines if line["way"] == way and line["bytes"] == size]
            panel.loglog(
                [line["hosts"] for line in found],
                [line["microseconds"] for line in found],
                style,
                color=colour,
                marker=".",
                label=f"{way}, {size >> 10} KiB",
            )
    panel.set_xlabel("hosts")
    panel.set_title("microseconds of a sum", fontsize=10)
    panel.grid(True, which="both", alpha=0.3)
    panel.legend(fontsize=8)


def draw(files: list[Path], output: Path) -> None:
    """Writes the picture: a panel for each quantity, over the number of ranks or hosts."""
    plt.switch_backend("svg")
    plt.rcParams["svg.hashsalt"] = "scale"  # the same picture of the same figures
    figure, panels = plt.subplots(1, len(PANELS) + 1, figsize=(17, 4), layout="constrained")
    for path in files:
        if way_of(path) == SUMS:
            draw_sums(path, panels[-1])
    for panel, (key, label) in zip(panels[:-1], PANELS, strict=True):
        for path in files:
            way = way_of(path)
            if way == SUMS:
                continue
            for step, line in STYLES.items():
                found = rows(path, step)
                panel.loglog(  # no point where nothing is sent
                    [row["ranks"] for row in found],
                    [row[key] for row in found],
                    line,
                    color=COLOURS[way],
                    marker=".",
                    label=f"{way}, {step} step",
                    nonpositive="mask",
                )
        panel.set_xlabel("ranks, 8 on a host")
        panel.set_title(label, fontsize=10)
        panel.grid(True, which="both", alpha=0.3)
    panels[0].axhline(1000, color="gray", linewidth=0.8, linestyle=":")
    panels[0].legend(fontsize=8)
    figure.savefig(output, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="figures, as bin/simulate --json prints them")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/scale.svg"), help="the picture")
    arguments = parser.parse_args()
    draw(arguments.files, arguments.output)


if __name__ == "__main__":
    main()
