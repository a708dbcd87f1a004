"""A training script of JAX and optax as data: drawn from a seed, legal, and written so that it can be read again; pure.

``with_jax`` runs it, on ranks and in one process. What a script may not do is in ``ILLEGAL``, with the reason.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from training.layouts import LAYOUTS
from training.shrinking import Language, exchanged, one_fewer, plainer

LAYERS = 3
FROZEN = 1  # the layer that a script may not train
ALL = -2  # in place of the rank whose loss is infinite: every one


@dataclass(frozen=True)
class Turn:
    """What the loop does with one batch.

    Attributes:
        passes: of each gradient, the layers that each rank uses; a rank without any has zeros for all of them.
        discards: whether the gradients are thrown away.
        overflow: the rank whose loss is infinite in the last pass; ``ALL``; -1 for none.
        reloads: what is done before with parameters and state. "own": saved and loaded; "broadcast": lost by all ranks but
            one, which broadcasts them; "world": saved, and loaded in another world.
        rate: what the user multiplies the learning rate by before.
    """

    passes: tuple[tuple[tuple[int, ...], ...], ...]
    discards: bool = False
    overflow: int = -1
    reloads: str = ""
    rate: float = 1.0


@dataclass(frozen=True)
class Script:
    """The loop, and the transformation.

    Attributes:
        turns: one for each batch.
        ranks: how many there are.
        layout: ranks of each host; "" for one host.
        together: sets of ranks that train together, each apart from the others; () all.
        op: "average" or "sum".
        factors: "" or the one of these that is not 1: "prescale", "postscale".
        compression: a name of ``Compression``.
        optimizer: a name of ``with_jax.OPTIMIZERS``.
        rate: where the learning rate comes from: "" a number, "schedule", "hyperparameter", by inject_hyperparams.
        clips: the norm: "" not at all; "behind" the sums; "before" them, on each rank.
        accumulates: gradients of a turn's passes: "sum", "scan" of the program; or each pass calls update, and these are
            added up by the distributed transformation, in "passes", or by a MultiSteps "around" it or "within".
        every: such passes of a step.
        averages_passes: average_aggregated_gradients.
        frozen: how a layer is left alone: "", or by "masked" or "partition", "within" or "around"; "argument": no gradient
            is asked for; "two": each half of the parameters has a distributed transformation.
        finite: where apply_if_finite is: "", "within" or "around" the distributed transformation.
        plateau: whether reduce_on_plateau gets the mean of the losses as an extra argument.
        compiled: what is a program: "" nothing, "step", "gradient", "update", "parts" (both, each its own), "loop" (all steps).
        donates: whether programs take over the memory of parameters and state.
        wide: whether arrays are too large for XLA to run one instruction after the other.
        optimized: whether XLA compiles as it does by default, which takes long.
        maps: vmap over "" nothing, "samples" in the loss, "models" around the step.
        dtypes: of each layer.
        coupled: what the loss needs of other ranks: "", "centered" by their mean, and so in each pass of a "loop", "gathered"
            rows, "dealt" rows.
        remakes: whether jax.checkpoint has the backward pass compute the loss again.
        form: of the derivative: "grad", "value_and_grad", or "aux", with has_aux.
        reduces: "transformation" or, before a plain one, "gradients": allreduce_gradients.
        gives: whether update gets the parameters.
        replicas: of the transformation.
        looks: whether parameters are compared in every step.
        mistake: what the last rank does wrong, and all must be told: "", or a name of ``with_jax.MISTAKES``.
    """

    turns: tuple[Turn, ...]
    ranks: int = 2
    layout: str = ""
    together: tuple[tuple[int, ...], ...] = ()
    op: str = "average"
    factors: str = ""
    compression: str = "none"
    optimizer: str = "sgd"
    rate: str = ""
    clips: str = ""
    accumulates: str = "sum"
    every: int = 1
    averages_passes: bool = False
    frozen: str = ""
    finite: str = ""
    plateau: bool = False
    compiled: str = ""
    donates: bool = False
    wide: bool = False
    optimized: bool = False
    maps: str = ""
    dtypes: tuple[str, ...] = ("float64",) * LAYERS
    coupled: str = ""
    remakes: bool = False
    form: str = "grad"
    reduces: str = "transformation"
    gives: bool = True
    replicas: str = "equal"
    looks: bool = False
    mistake: str = ""

    @property
    def sets(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that train together."""
        return self.together or (tuple(range(self.ranks)),)

    @property
    def updates_each_pass(self) -> bool:
        return self.accumulates in ("passes", "around", "within")


SETS = {1: [()], 2: [()], 3: [(), (), ((0, 2), (1,)), ((1, 2), (0,))]}
QUICK = ["sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad"]
OPTIMIZERS = [*QUICK, "lamb", "noise"]
NEEDS_PARAMETERS = {"momentum", "adamw", "lamb"}
MISTAKES = ["start", "rate", "raises", "shape"]
DTYPES = ["float64", "float32", "float16", "bfloat16", "complex128"]


def _carries_on(script: Script, turn: int) -> bool:
    """Whether gradients of one rank alone are in the state before a turn."""
    before = sum(len(each.passes) for each in script.turns[:turn] if not each.discards)
    return script.accumulates in ("passes", "around") and before % script.every > 0


# What does not go together, and why.
ILLEGAL = {
    "an infinite gradient is for apply_if_finite to find, within, where all ranks see the same": lambda s: any(
        turn.overflow != -1 and not (s.finite == "within" or (s.finite and turn.overflow == ALL)) for turn in s.turns
    ),
    "optax.MultiSteps keeps what is not finite for ever": lambda s: (
        s.updates_each_pass and any(turn.overflow != -1 for turn in s.turns)
    ),
    "a loss that other ranks' rows go into is infinite on all ranks, and not a number": lambda s: bool(
        s.coupled and any(turn.overflow != -1 for turn in s.turns)
    ),
    "a rank whose sums are not broadcast loses none": lambda s: any(
        turn.reloads == "broadcast" and _carries_on(s, number) for number, turn in enumerate(s.turns)
    ),
    "a loop in a program has equal steps": lambda s: (
        s.compiled == "loop"
        and (
            any(turn.discards or turn.reloads or turn.rate != 1 for turn in s.turns)
            or len({len(turn.passes) for turn in s.turns}) > 1
        )
    ),
    "only what is compiled donates or is optimized": lambda s: not s.compiled and (s.donates or s.optimized),
    "whole steps donate": lambda s: s.donates and s.compiled not in ("step", "loop"),
    "a hyperparameter is what the user changes": lambda s: (
        s.rate != "hyperparameter" and any(turn.rate != 1 for turn in s.turns)
    ),
    "a hyperparameter is of float64, to which optax widens what else is in a branch, or carried by a loop": lambda s: (
        s.rate == "hyperparameter"
        and bool(s.finite or s.compiled == "loop")
        and not set(s.dtypes) <= {"float64", "complex128"}
    ),
    "what optimizers read they get": lambda s: not s.gives and s.optimizer in NEEDS_PARAMETERS,
    "gradients that are reduced before are so for all transformations": lambda s: (
        s.reduces == "gradients"
        and (s.frozen == "two" or s.finite == "around" or s.accumulates in ("passes", "around"))
    ),
    "a plateau is one of losses of whole steps": lambda s: s.plateau and s.updates_each_pass,
    "a plateau is one of losses, which are finite": lambda s: (
        s.plateau and (s.form == "grad" or any(turn.overflow != -1 for turn in s.turns))
    ),
    "optax compares dtypes, of which one is to be the lowest or highest": lambda s: (
        (s.plateau or s.rate == "hyperparameter") and {"float16", "bfloat16"} <= set(s.dtypes)
    ),
    "what is added up is of several passes": lambda s: (s.every > 1) != s.updates_each_pass,
    "the distributed transformation averages the passes that it adds up": lambda s: (
        s.averages_passes and s.accumulates != "passes"
    ),
    "complex numbers are for optimizers that know them": lambda s: (
        "complex128" in s.dtypes and (s.optimizer not in ("sgd", "adam") or s.clips or s.plateau)
    ),
    "what is dealt is dealt to all": lambda s: s.coupled == "dealt" and len({len(each) for each in s.sets}) > 1,
    "a mistake is told to other ranks": lambda s: bool(s.mistake) and s.ranks == 1,
    "a mistake is made in a world that trains together, in a plain loop": lambda s: bool(
        s.mistake
        and (
            s.together
            or s.compiled == "loop"
            or any(turn.discards or turn.reloads or turn.rate != 1 for turn in s.turns)
        )
    ),
    "what only replicas have is compared where they are to be equal": lambda s: (
        s.mistake in ("start", "rate")
        and (
            s.replicas == "differ"
            or s.reduces == "gradients"
            or s.accumulates == "passes"
            or s.maps == "models"
            or sum(s.finite != "around" or turn.overflow == -1 for turn in s.turns) < 3  # that it hears of
        )
    ),
    "another start is found in what update gets": lambda s: s.mistake == "start" and not s.gives,
    "another rate is found among hyperparameters": lambda s: s.mistake == "rate" and s.rate != "hyperparameter",
}


def _drawn(source: random.Random) -> Script:
    ranks = source.choice([1, 2, 2, 3])
    # Outside of programs branches of them are compiled anew each time, which takes long.
    compiled = source.choice(["step", "step", "gradient", "update", "parts", "loop"]) if source.random() < 0.25 else ""
    branches = compiled not in ("", "gradient")
    accumulates = source.choice(["sum", "scan", "passes", "around", "within"] if branches else ["sum", "sum", "passes"])
    passes = source.choice([1, 1, 2])
    script = Script(
        turns=(),
        ranks=ranks,
        layout=source.choice(LAYOUTS[ranks]),
        together=source.choice(SETS[ranks]),
        op=source.choice(["average", "average", "sum"]),
        factors=source.choice(["", "", "", "prescale", "postscale"]),
        compression=source.choice(["none", "none", "none", "float16", "bfloat16"]),
        optimizer=source.choice(OPTIMIZERS if compiled else QUICK),
        rate=source.choice(["", "schedule", "hyperparameter"]),
        clips=source.choice(["", "", "behind", "before"]),
        accumulates=accumulates,
        every=1 if accumulates in ("sum", "scan") else source.choice([2, 3]),
        averages_passes=accumulates == "passes" and source.random() < 0.5,
        frozen=source.choice(
            ["", "", "", "masked within", "masked around", "partition within", "partition around", "argument", "two"]
        ),
        finite=source.choice(["", "", "within", "around"]) if branches else "",
        plateau=branches and source.random() < 0.3,
        compiled=compiled,
        donates=compiled in ("step", "loop") and source.random() < 0.3,
        wide=bool(compiled) and source.random() < 0.3,
        optimized=bool(compiled) and source.random() < 0.03,
        maps=source.choice(["", "", "", "samples", "models"]),
        dtypes=_drawn_dtypes(source) if source.random() < (0.4 if compiled else 0.1) else ("float64",) * LAYERS,
        coupled=source.choice(["", "", "", "centered", "gathered", "dealt", *(["loop"] if compiled else [])]),
        remakes=source.random() < (0.2 if compiled else 0.05),
        form=source.choice(["grad", "value_and_grad", "aux"]),
        reduces=source.choice(["transformation"] * 4 + ["gradients"]),
        gives=source.random() < 0.85,
        replicas=source.choice(["equal", "equal", "equal", "differ"]),
        looks=source.random() < 0.5,
        mistake=source.choice(["", *MISTAKES]) if source.random() < 0.3 else "",
    )
    turns = tuple(_drawn_turn(source, script, passes) for _ in range(source.randint(1, 4)))
    return replace(script, turns=turns)


def _drawn_dtypes(source: random.Random) -> tuple[str, ...]:
    return tuple(source.choice(DTYPES) for _ in range(LAYERS))


def _drawn_turn(source: random.Random, script: Script, passes: int) -> Turn:
    def layers() -> tuple[int, ...]:
        return tuple(sorted(source.sample(range(LAYERS), source.choice([0, 1, 2, 3, 3]))))

    def used() -> tuple[tuple[int, ...], ...]:
        same = layers()
        return tuple(layers() if source.random() < 0.3 else same for _ in range(script.ranks))

    number = passes if script.compiled == "loop" else source.choice([1, 1, 2])
    overflows = script.finite and not (script.updates_each_pass or script.coupled) and source.random() < 0.4
    quiet = script.compiled == "loop" or bool(script.mistake)
    return Turn(
        passes=tuple(used() for _ in range(number)),
        discards=not quiet and source.random() < 0.15,
        overflow=source.choice([ALL, *(range(script.ranks) if script.finite == "within" else ())]) if overflows else -1,
        reloads=source.choice(["own", "broadcast", "world"]) if not quiet and source.random() < 0.15 else "",
        rate=0.5 if not quiet and script.rate == "hyperparameter" and source.random() < 0.3 else 1.0,
    )


def _smaller_turn(turn: Turn) -> Iterator[Turn]:
    for fewer in one_fewer(turn.passes):
        yield replace(turn, passes=fewer)
    yield from plainer(turn, without={"passes"})
    for place, each in enumerate(turn.passes):
        alike = [(used,) * len(each) for used in dict.fromkeys(each) if used and (used,) * len(each) != each]
        for passes in exchanged(turn.passes, place, alike):
            yield replace(turn, passes=passes)


def segments(script: Script) -> list[range]:
    """The turns of each world that a script opens, by number."""
    firsts = [number for number, turn in enumerate(script.turns) if turn.reloads == "world" and number > 0]
    return [range(first, end) for first, end in itertools.pairwise([0, *firsts, len(script.turns)])]


SCRIPTS = Language(_drawn, _smaller_turn, ILLEGAL)
