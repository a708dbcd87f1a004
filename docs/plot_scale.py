"""Draws docs/scale.svg from what `bin/simulate --scale --json` has written.

    python docs/plot_scale.py docs/benchmarks/scale-*.jsonl -o docs/scale.svg

Needs matplotlib. The name of each file, behind its last hyphen, is how ranks agreed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

STYLES = {"steady": "-", "changed": "--"}
COLOURS = {"schedule": "tab:green", "negotiation": "tab:red"}
PANELS = [
    ("microseconds", "microseconds until the last rank starts"),
    ("busiest_rank_messages", "messages of the busiest rank"),
    ("busiest_rank_bytes", "bytes of the busiest rank"),
]


def rows(path: Path, step: str) -> list[dict]:
    """The lines of a file for one kind of step."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["step"] == step]


def draw(files: list[Path], output: Path) -> None:
    """Writes the picture: a panel for each quantity, over the number of ranks."""
    plt.switch_backend("svg")
    plt.rcParams["svg.hashsalt"] = "scale"  # the same picture of the same figures
    figure, panels = plt.subplots(1, len(PANELS), figsize=(13, 4), layout="constrained")
    for panel, (key, label) in zip(panels, PANELS, strict=True):
        for path in files:
            way = path.stem.rpartition("-")[2]
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
    parser.add_argument("files", type=Path, nargs="+", help="figures, as bin/simulate --scale --json prints them")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/scale.svg"), help="the picture")
    arguments = parser.parse_args()
    draw(arguments.files, arguments.output)


if __name__ == "__main__":
    main()
