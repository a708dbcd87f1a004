"""Plans from a seed: each fault comes once before any comes twice, and each pair of values of two dimensions soon; pure.

Each plan of the sequence is the one with the most pairs that no earlier one had, among some that are drawn. Where
drawing finds few, a pair that is still missing is taken, and the rest drawn around it. Pairs that can be in no plan are
left out: see `possible_pairs`.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from drawn.plan import DIMENSIONS, ENGINES, FAULTS, LAYOUTS, PLAINEST, Plan, why_impossible

DRAWS = 30  # of which the best is taken
LONGEST_DELAY = 60  # hundredths of a second
WEIGHTS = {"fault": [fault.weight for fault in FAULTS.values()],
           "layout": [layout.weight for layout in LAYOUTS.values()], "engine": list(ENGINES.values())}  # fmt: skip
Pair = tuple[tuple[str, str], tuple[str, str]]


def plans(seed: int, without: frozenset[str] = frozenset()) -> Iterator[Plan]:
    """The endless sequence of plans of a seed.

    Args:
        without: values that this machine cannot do; plans with them are left out.
    """
    source = random.Random(seed)
    had: set[Pair] = set()  # by an earlier plan
    ahead = [fault for fault in FAULTS if fault not in without]  # those of which there was no plan yet
    source.shuffle(ahead)
    while True:
        # What can be in a plan takes seconds to find out, and the first plans need not know.
        missing = [] if ahead else sorted(possible_pairs(without) - had)
        fixed = {"fault": ahead.pop()} if ahead else dict(source.choice(missing)) if missing else {}
        candidates = list(filter(None, (draw(source, fixed, without) for _ in range(DRAWS))))
        if not candidates:  # a fault that needs what this machine has not
            continue
        best = max(candidates, key=lambda plan: len(pairs_of(plan) - had))
        had |= pairs_of(best)
        yield best


def draw(source: random.Random, fixed: dict[str, str], without: frozenset[str]) -> Plan | None:
    """A possible plan that has the fixed values; None if none was found in a few hundred draws."""
    for _ in range(400):
        values = {name: source.choices(values, WEIGHTS.get(name))[0] for name, values in DIMENSIONS.items()} | fixed
        size = LAYOUTS[values["layout"]].size
        plan = Plan(**values, victim=source.randrange(size), delay=source.randrange(LONGEST_DELAY))
        if not without & set(values.values()) and not why_impossible(plan):
            return plan
    return None


def pairs_of(plan: Plan) -> set[Pair]:
    """The pairs of values of two dimensions that a plan has."""
    return set(itertools.combinations([(name, getattr(plan, name)) for name in DIMENSIONS], 2))


@functools.cache
def possible_pairs(without: frozenset[str] = frozenset()) -> frozenset[Pair]:
    """All pairs of which there is a plan."""
    values = {name: [value for value in listed if value not in without] for name, listed in DIMENSIONS.items()}
    found: set[Pair] = set()
    for first, second in itertools.combinations(values, 2):
        for one, other in itertools.product(values[first], values[second]):
            if ((first, one), (second, other)) not in found:
                plan = plan_with(values, {first: one, second: other})
                found |= set() if plan is None else pairs_of(plan)
    return frozenset(found)


def plan_with(values: dict[str, list[str]], fixed: dict[str, str]) -> Plan | None:
    """A plan with the fixed values, None if there is none: tries the plainest others first."""
    free = [name for name in values if name not in fixed]
    # Rules are of two or three dimensions, so that at most three others have to leave their plainest value.
    for count in range(4):
        for changed in itertools.combinations(free, count):
            for chosen in itertools.product(*(values[name][1:] for name in changed)):
                plan = replace(PLAINEST, **fixed, **dict(zip(changed, chosen, strict=True)))
                if not why_impossible(plan):
                    return plan
    return None


def smaller(plan: Plan) -> Iterator[Plan]:
    """Possible plans that are plainer than this one in one dimension, or in when and whom it hits."""
    for name, value in plan.values():
        for plainer in [getattr(PLAINEST, name)] if name != "fault" and value != getattr(PLAINEST, name) else []:
            changed = replace(plan, **{name: plainer})
            if not why_impossible(changed):
                yield changed
