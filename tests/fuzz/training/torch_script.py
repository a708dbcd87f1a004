"""A training script of PyTorch as data: drawn from a seed, legal, and written so that it can be read again; pure.

``with_torch`` runs it, on ranks and in one process. What a script may not do is in ``ILLEGAL``, with the reason that the
docs give; all else must end with the parameters of one process.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from training.layouts import LAYOUTS
from training.shrinking import Language, exchanged, one_fewer, plainer

LAYERS = 4
ADDED = LAYERS - 1  # the layer whose parameters a script may add to the optimizer later


@dataclass(frozen=True)
class Pass:
    """One backward pass of each rank.

    Attributes:
        used: the layers that each rank uses, in this order; a rank without any runs no pass.
        silent: whether it is within no_sync().
    """

    used: tuple[tuple[int, ...], ...]
    silent: bool = False


@dataclass(frozen=True)
class Turn:
    """What the loop does with one batch.

    Attributes:
        passes: its backward passes.
        ends: "step"; "closure", a step that runs the passes itself; "discard", zero_grad() without a step; "go on", neither.
        clips: "" not at all; "norm", behind backward(); "synchronized", behind synchronize(), with skip_synchronize().
        frozen: layers whose parameters ask for no gradient.
        overflow: the rank whose loss is infinite; -1 for none.
        adds: whether the parameters of the last layer are added to the optimizer before.
        reloads: whether the optimizer loads its own state before.
    """

    passes: tuple[Pass, ...]
    ends: str = "step"
    clips: str = ""
    frozen: tuple[int, ...] = ()
    overflow: int = -1
    adds: bool = False
    reloads: bool = False


@dataclass(frozen=True)
class Script:
    """The loop, and the optimizer.

    Attributes:
        turns: one for each batch.
        ranks: how many there are.
        layout: ranks of each host; "" for one host.
        op: "average"; "weighed", by what each rank's step counts; "sum"; or "per item", of losses that are sums over items.
        mode: further arguments of DistributedOptimizer, by a name of ``MODES``.
        passes_per_step: backward_passes_per_step.
        averages_passes: average_aggregated_gradients.
        optimizer: a name of ``with_torch.OPTIMIZERS``.
        zeroes: who sets gradients to zero, and when: "before" each batch or "after" each step, by the optimizer; "module",
            before; "zeros", before and not to None; "never".
        named: whether the optimizer gets names.
        scales: whether a GradScaler does.
        schedules: whether the rate changes after each step.
        counts_first: whether items, or what a step counts, are said before all else in a turn, and not before its first pass.
    """

    turns: tuple[Turn, ...]
    ranks: int = 2
    layout: str = ""
    op: str = "average"
    mode: str = "plain"
    passes_per_step: int = 1
    averages_passes: bool = False
    optimizer: str = "sgd"
    zeroes: str = "before"
    named: bool = True
    scales: bool = False
    schedules: bool = False
    counts_first: bool = False


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"groups": 2},
    "bucket views": {"gradient_as_bucket_view": True},
    "predivided": {"gradient_predivide_factor": 2.0},
    "sharded": {"sharded": True},
}
OPTIMIZER_NAMES = ["sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad"]


def loud(turn: Turn) -> int:
    """How many of its passes send."""
    return sum(not each.silent for each in turn.passes)


def accumulates(script: Script) -> bool:
    """Whether gradients that are reduced are added to: by more passes than were announced, or without zero_grad()."""
    most = script.passes_per_step
    return script.zeroes == "never" or any(
        turn.ends == "go on" or loud(turn) > most or (most > 1 and len(turn.passes) > most) or ends_silently(turn)
        for turn in script.turns
    )


def ends_silently(turn: Turn) -> bool:
    """Whether a pass that sends nothing comes behind one that has sent."""
    return any(not first.silent and then.silent for first, then in itertools.pairwise(turn.passes))


# What does not go together, and what says so.
ILLEGAL = {
    "what is reduced already would be counted once for each rank (errors.md, 'backward passes in a step')": lambda s: (
        accumulates(s) and (s.op != "average" or s.averages_passes or s.mode == "sharded")
    ),
    "where gradients travel with each pass, ranks run as many passes": lambda s: (
        accumulates(s) and any(not used for turn in s.turns for each in turn.passes for used in each.used)
    ),
    "and with backward_passes_per_step they use the same layers, or gradients of one would be complete after another pass": lambda s: (
        accumulates(s)
        and s.passes_per_step > 1
        and any(len(set(each.used)) > 1 for turn in s.turns for each in turn.passes)
    ),
    "zero_grad() of the module tells the optimizer nothing: what is discarded so has been sent by all ranks": lambda s: (
        s.zeroes == "module"
        and any(
            turn.ends == "discard"
            and (
                s.passes_per_step > 1
                or s.op in ("per item", "weighed")
                or any(not used for each in turn.passes for used in each.used)
            )
            for turn in s.turns
        )
    ),
    "gradient_predivide_factor needs op=Average": lambda s: s.mode == "predivided" and s.op != "average",
    "items are counted over all passes, and not averaged over these": lambda s: (
        s.op == "per item" and s.averages_passes
    ),
    "clipping behind backward() is right where all ranks had their last pass": lambda s: any(
        turn.clips == "norm"
        and (
            s.passes_per_step > 1
            or turn.passes[-1].silent
            or any(not used for each in turn.passes for used in each.used)
        )
        for turn in s.turns
    ),
    "zeros that a rank alone has of a layer, from passes that were given up, are in the norm of its clipping, which may round": lambda s: (
        s.zeroes == "zeros"
        and any(
            first.ends == "discard" and then.clips == "norm" and any(len(set(each.used)) > 1 for each in first.passes)
            for first, then in itertools.combinations(s.turns, 2)
        )
    ),
    "a step weighs something": lambda s: (
        s.op == "weighed" and any(not any(used for each in turn.passes for used in each.used) for turn in s.turns)
    ),
    "a closure runs its passes itself, once": lambda s: any(
        turn.ends == "closure"
        and (s.scales or turn.clips or s.mode == "sharded" or len(turn.passes) > 1 or turn.passes[0].silent)
        for turn in s.turns
    ),
    "an infinite loss is for a scaler to find, in a turn that steps": lambda s: any(
        turn.overflow >= 0 and not (s.scales and turn.ends == "step") for turn in s.turns
    ),
    "a scaler wants a loss of each rank in each step": lambda s: (
        s.scales
        and any(
            not any(each.used[rank] for each in turn.passes)
            for turn in s.turns
            if turn.ends == "step"
            for rank in range(s.ranks)
        )
    ),
    "the added layer is used from then on": lambda s: any(
        any(turn.adds for turn in s.turns) and ADDED in used
        for turn in s.turns[: next((i for i, turn in enumerate(s.turns) if turn.adds), len(s.turns))]
        for each in turn.passes
        for used in each.used
    ),
    "a layer is added once": lambda s: sum(turn.adds for turn in s.turns) > 1,
    "what is frozen in a turn has no pass: one layer at least has": lambda s: any(
        not set(used) - set(turn.frozen) for turn in s.turns for each in turn.passes for used in each.used if used
    ),
    "what is carried on is in the gradients: no state is loaded, and no layer added, within a step": lambda s: any(
        before.ends == "go on" and (after.reloads or after.adds or after.frozen != before.frozen)
        for before, after in itertools.pairwise(s.turns)
    ),
    "the last turn ends": lambda s: s.turns[-1].ends == "go on",
}


def _drawn(source: random.Random) -> Script:
    ranks = source.choice([1, 2, 2, 3])
    script = Script(
        turns=(),
        ranks=ranks,
        layout=source.choice(LAYOUTS[ranks]),
        op=source.choice(["average", "average", "sum", "per item", "weighed"]),
        mode=source.choice([*MODES, "plain"]),
        passes_per_step=source.choice([1, 1, 1, 2, 3]),
        optimizer=source.choice(OPTIMIZER_NAMES),
        zeroes=source.choice(["before", "before", "after", "module", "zeros", "never"]),
        named=source.random() < 0.7,
        scales=source.random() < 0.25,
        schedules=source.random() < 0.3,
        counts_first=source.random() < 0.3,
    )
    averages = script.passes_per_step > 1 and source.random() < 0.3
    turns = tuple(_drawn_turn(source, script) for _ in range(source.randint(2, 5)))
    return replace(script, averages_passes=averages, turns=turns)


def _drawn_turn(source: random.Random, script: Script) -> Turn:
    frozen = tuple(sorted(source.sample(range(LAYERS), source.choice([0, 0, 0, 1, 2]))))
    passes = tuple(_drawn_pass(source, script.ranks) for _ in range(source.choice([1, 1, script.passes_per_step, 2])))
    return Turn(
        passes,
        ends=source.choice(["step"] * 6 + ["closure", "discard", "go on"]),
        clips=source.choice(["", "", "norm", "synchronized"]),
        frozen=frozen,
        overflow=source.randrange(script.ranks) if script.scales and source.random() < 0.2 else -1,
        adds=source.random() < 0.1,
        reloads=source.random() < 0.1,
    )


def _drawn_pass(source: random.Random, ranks: int) -> Pass:
    def layers() -> tuple[int, ...]:
        return tuple(source.sample(range(LAYERS), source.choice([0, 1, 2, 3, 3, 3, 4, 4])))

    same = layers()
    used = tuple(layers() if source.random() < 0.3 else same for _ in range(ranks))
    return Pass(used, silent=source.random() < 0.3)


def _smaller_turn(turn: Turn) -> Iterator[Turn]:
    for fewer in one_fewer(turn.passes):
        yield replace(turn, passes=fewer)
    yield from plainer(turn, without={"passes"})
    for index, each in enumerate(turn.passes):
        alike = (replace(each, used=(used,) * len(each.used)) for used in dict.fromkeys(each.used) if used)
        others = [other for other in (*alike, *plainer(each, without={"used"})) if other != each]
        for passes in exchanged(turn.passes, index, others):
            yield replace(turn, passes=passes)


SCRIPTS = Language(_drawn, _smaller_turn, ILLEGAL)
