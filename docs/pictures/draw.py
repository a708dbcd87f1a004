"""Draws the pictures of flows: an SVG from each text in docs/pictures, for light and dark.

    python docs/pictures/draw.py

A line of a text is a row: who does it, and behind a colon its steps in order, with ">" between them. The last step of a row leads
to the first one of the next.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
LETTER, PADDING, GAP = 7.0, 12, 34  # of a step's text; beside it; between steps
HEIGHT, BETWEEN, MARGIN = 34, 26, 12
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .who { font-weight: 600; }
  rect { fill: #f6f8fa; stroke: #59636e; }
  .ground { fill: #ffffff; stroke: none; }
  path { fill: none; stroke: #59636e; stroke-width: 1.3; }
  #tip path { fill: #59636e; stroke: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    rect { fill: #21262d; stroke: #9198a1; }
    .ground { fill: #0d1117; }
    path { stroke: #9198a1; }
    #tip path { fill: #9198a1; }
  }
"""
TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 8 4 0 8z"/></marker>'
)
GROUND = '<rect class="ground" width="100%" height="100%"/>'  # a page may be dark where the system is light


def rows_of(text: str) -> list[tuple[str, list[str]]]:
    """Who, and the steps, of each line."""
    parts = [line.partition(":") for line in text.splitlines() if line.strip()]
    return [(who.strip(), [step.strip() for step in steps.split(">")]) for who, _, steps in parts]


def svg_of(text: str) -> str:
    """The picture."""
    rows = rows_of(text)
    left = MARGIN + max(len(who) for who, _ in rows) * LETTER * 1.1 + PADDING
    places = [list(_boxes(steps, left)) for _, steps in rows]
    width = max(x + wide for row in places for x, wide in row) + MARGIN
    height = 2 * MARGIN + len(rows) * (HEIGHT + BETWEEN) - BETWEEN
    drawn = []
    for number, ((who, steps), row) in enumerate(zip(rows, places, strict=True)):
        top = MARGIN + number * (HEIGHT + BETWEEN)
        middle = top + HEIGHT / 2
        drawn.append(f'<text class="who" x="{MARGIN}" y="{middle + 5:g}">{html.escape(who)}</text>')
        for step, (x, wide) in zip(steps, row, strict=True):
            drawn.append(f'<rect x="{x:g}" y="{top:g}" width="{wide:g}" height="{HEIGHT}" rx="5"/>')
            drawn.append(
                f'<text x="{x + wide / 2:g}" y="{middle + 5:g}" text-anchor="middle">{html.escape(step)}</text>'
            )
        for (x, wide), (after, _) in itertools.pairwise(row):
            drawn.append(_arrow(f"M{x + wide:g} {middle:g}H{after - 1:g}"))
        if number + 1 < len(rows):
            (x, wide), (first, its_width) = row[-1], places[number + 1][0]
            bend = top + HEIGHT + BETWEEN / 2
            end = top + HEIGHT + BETWEEN - 1
            drawn.append(_arrow(f"M{x + wide / 2:g} {top + HEIGHT:g}V{bend:g}H{first + its_width / 2:g}V{end:g}"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
    return "\n".join([head, f"<style>{STYLE}</style>", f"<defs>{TIP}</defs>", GROUND, *drawn, "</svg>", ""])


def _boxes(steps: list[str], left: float) -> Iterator[tuple[float, float]]:
    """Where the steps of a row begin, and how wide they are."""
    x = left
    for step in steps:
        wide = len(step) * LETTER + 2 * PADDING
        yield x, wide
        x += wide + GAP


def _arrow(way: str) -> str:
    return f'<path d="{way}" marker-end="url(#tip)"/>'


def main() -> None:
    """Writes all of them."""
    for text in sorted(FOLDER.glob("*.txt")):
        text.with_suffix(".svg").write_text(svg_of(text.read_text()))


if __name__ == "__main__":
    main()
