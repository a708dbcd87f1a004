"""What a person should know first of the findings, in sentences. Pure."""

from __future__ import annotations

from ringtrain.launch.report.findings import COMPUTING, PARTS, Findings
from ringtrain.launch.report.lateness import REASONS

COUNTS = 0.02  # a share of a step below which nobody is called late


def verdicts(found: Findings) -> list[str]:
    """What a person should know first."""
    said = []
    if found.is_whole:
        said.append("No operation comes twice under one name, so the whole trace stands here as one step.")
    computing = sum(found.parts[part] for part in COMPUTING)
    total = sum(found.parts.values()) or 1.0
    said.append(f"Of a mean step {_percent(computing / total)} is computing, and {_percent(1 - computing / total)} waiting for "
                f"sums; {_percent(found.overlap)} of the time in which sums were under way was hidden behind computing.")  # fmt: skip
    held_up = {part: found.parts[part] for part in PARTS if part not in COMPUTING}
    largest = max(held_up, key=lambda part: held_up[part])
    if held_up[largest] > COUNTS * total:
        said.append(f"What held the program up most: {largest}, {_percent(held_up[largest] / total)} of a step.")
    said.append(_floor_in_words(found))
    if found.late:
        said.append(_late_in_words(found))
    if not found.knows_waits:
        said.append("The traces do not say when the program waited: it is taken to wait from its last submission on.")
    if found.clock > 0:
        said.append(f"The clocks of the hosts differ; ranks were moved by up to {time_text(found.clock)}.")
    if found.dropped:
        said.append(f"{found.dropped} spans had no room in the traces and are missing here (timeline_events).")
    return said


def _floor_in_words(found: Findings) -> str:
    if found.link:
        what = f"{found.link.hosts} hosts at {found.link.rate * 8e-9:.3g} Gbit/s need at least {time_text(found.floor)}"
    else:
        what = f"the fastest step needed {time_text(found.floor)}"
    return (f"Sums were under way for {time_text(found.under_way)} of a step; {what}, "
            f"which is {_percent(found.floor_share)} of it.")  # fmt: skip


def _late_in_words(found: Findings) -> str:
    latest = found.late[0]
    if latest.late * (latest.rare_steps / found.steps if latest.rare_steps else 1) < COUNTS * found.step:
        return (f"No rank stands out: rank {latest.place} was last in {latest.last_in} of {found.steps} steps, "
                f"{time_text(max(latest.late, 0.0))} behind the others.")  # fmt: skip
    often = (f"in {latest.rare_steps} of {found.steps} steps, by {time_text(latest.late)}" if latest.rare_steps else
             f"by {time_text(latest.late)} on average, and the last in {latest.last_in} of {found.steps} steps")  # fmt: skip
    at = {"evenly": "evenly, before its first gradient and after it"}.get(latest.where, latest.where)
    return (f"Rank {latest.place} is late {often}: {at} "
            f"({_more(latest.before_ratio)} before its first gradient, {_more(latest.backward_ratio)} from there on); "
            f"{REASONS[latest.where]}.")  # fmt: skip


def _more(ratio: float) -> str:
    return f"{ratio:.2f} times the others' time"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def time_text(microseconds: float) -> str:
    """``12.3 ms``."""
    for unit, size in (("µs", 1.0), ("ms", 1e3)):
        if microseconds < 999.5 * size:
            return f"{microseconds / size:.3g} {unit}"
    return f"{number_text(microseconds / 1e6)} s"


def number_text(number: float) -> str:
    """Three digits, or all of a whole number that has more: ``0.0123``, ``12.3``, ``1512``."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"
