"""A training script of Keras as data: drawn from a seed, legal, and written so that it can be read again; pure.

``with_keras`` runs it, on each backend. What a script may not do is in ``ILLEGAL``, with the reason; all else must end with
the weights of one process.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from training.layouts import LAYOUTS
from training.shrinking import Language, exchanged, one_fewer, plainer

FIRST, HIDDEN, HEAD = 0, (1, 2), 3  # the layers of a model; the head is always trained
LOCAL = HIDDEN[-1]  # the layer that "partial" leaves to each rank
OPTIMIZER_NAMES = [
    "sgd", "momentum", "nesterov", "adam", "amsgrad", "adamw", "rmsprop", "adagrad", "adamax", "nadam", "adafactor", "lamb",
    "muon", "schedule free",
]  # fmt: skip
LOSSY = ("fp16", "bf16")


@dataclass(frozen=True)
class Turn:
    """One call of fit, or what stands in its place.

    Attributes:
        does: "fit"; "batches", train_on_batch for each; "loop", gradients and apply() in a loop of the user's own.
        begins: what is done before: "" nothing; "compile" with the same optimizer; "fresh", compile with a new one; "reload",
            all ranks load what rank 0 has saved; "resume", rank 0 alone does, and the others make a new model.
        steps: updates in an epoch.
        epochs: of fit.
        first: initial_epoch.
        frozen: layers that are not trained.
        routes: of each rank the hidden layers that its batches go through; () for all on all.
        rate: "" or who sets the learning rate: "assigned" before; "scheduler" LearningRateScheduler; "plateau"
            ReduceLROnPlateau; "multiplier" LearningRateScheduleCallback; "warmup" LearningRateWarmupCallback.
        weights: "", "class" or "sample".
        validates: whether fit does.
        stops: whether EarlyStopping is there.
        averages: whether MetricAverageCallback is.
        broadcasts: whether BroadcastGlobalVariablesCallback is; outside of fit, broadcast_variables().
        overflow: the rank whose first batch has an infinite weight; -1 for none.
    """

    does: str = "fit"
    begins: str = ""
    steps: int = 1
    epochs: int = 1
    first: int = 0
    frozen: tuple[int, ...] = ()
    routes: tuple[tuple[int, ...], ...] = ()
    rate: str = ""
    weights: str = ""
    validates: bool = False
    stops: bool = False
    averages: bool = True
    broadcasts: bool = True
    overflow: int = -1


@dataclass(frozen=True)
class Script:
    """The model, the optimizer, and what is done with them.

    Attributes:
        turns: one after the other.
        ranks: how many there are.
        layout: ranks of each host; "" for one host.
        model: "functional", "sequential" or "subclassed".
        table: "" or what becomes of an Embedding's gradient: "sparse", or "dense" by sparse_as_dense; "sharded" for a
            ShardedEmbedding, whose rows SGD changes.
        regularizes: whether layers add to the loss.
        step: who makes the training step: "" Keras; "own", a train_step; "synchronized", one that clips behind synchronize();
            "two", one with two optimizers.
        runs: "eager"; "graph", on JAX a compiled step; "executions", with steps_per_execution=2. On PyTorch all are eager.
        optimizer: a name of ``OPTIMIZER_NAMES``.
        clips: "", "clipnorm", "clipvalue" or "global_clipnorm".
        schedules: whether the learning rate is a schedule of Keras.
        moving: "" or the optimizer's moving average: "often" overwrites the weights with it, or at the "end" of fit.
        keras_passes: gradient_accumulation_steps.
        scales: "" or where LossScaleOptimizer is: "within" the distributed one; "around"; "mixed", where compile() puts it for
            mixed_float16.
        op: "average" or "sum".
        passes_per_step: backward_passes_per_step.
        averages_passes: average_aggregated_gradients.
        groups: 0 for none; a number; -1 for the variables of each layer.
        predivide: gradient_predivide_factor.
        compression: a name of ``Compression``.
        method: "exact"; "late", by delay=1; "local", by every=2; "partial", by PartialDistributedOptimizer with one layer.
        members: the ranks of the process set that trains together, the others each for itself; () for all.
        mistake: what rank 1 does wrong in the last turn, and all must be told, a name of ``MISTAKES``; "" for nothing.
    """

    turns: tuple[Turn, ...]
    ranks: int = 2
    layout: str = ""
    model: str = "functional"
    table: str = ""
    regularizes: bool = False
    step: str = ""
    runs: str = "eager"
    optimizer: str = "sgd"
    clips: str = ""
    schedules: bool = False
    moving: str = ""
    keras_passes: int = 1
    scales: str = ""
    op: str = "average"
    passes_per_step: int = 1
    averages_passes: bool = False
    groups: int = 0
    predivide: float = 1.0
    compression: str = "none"
    method: str = "exact"
    members: tuple[int, ...] = ()
    mistake: str = ""


# What a rank may do wrong, and what all are told then.
MISTAKES = {
    "rate": "learning_rate must be the same on all ranks",
    "setting": "ema_momentum must be the same on all ranks",
    "weights": "must be the same on all ranks",
    "steps": "fit 'steps': expected the same number on all ranks",
    "epochs": "fit 'epochs': expected the same number on all ranks",
    "first": "fit 'initial_epoch': the first epoch must be the same on all ranks",
    "stop": "fit 'stop_training': it must be the same on all ranks",
    "early": "expected MetricAverageCallback before it",
    "delay": "fit: arguments of DistributedOptimizer must be the same on all ranks, but (mode|delay) is",
    "model": "broadcast_variables '.*': shape and dtype must be the same on all ranks",
    "frozen": "the parameters that are trained must be the same on all ranks, but",
}


def follows(turn: Turn) -> bool:
    """Whether something in it depends on the epochs of fit."""
    return bool(turn.rate not in ("", "assigned") or turn.validates or turn.stops or turn.first or turn.epochs > 1)


def is_rounded(script: Script) -> bool:
    """Whether numbers of a rank are not as exact as those of one process."""
    return script.compression in LOSSY or script.scales == "mixed"


def is_seen(script: Script) -> bool:
    """Whether the ranks can find out by themselves what one does wrong."""
    last = script.turns[-1]
    if script.method == "local" or script.members or last.does != "fit" or last.overflow >= 0:
        return False
    if script.step == "two" and script.mistake in ("rate", "setting") and {FIRST, HIDDEN[0]} <= set(last.frozen):
        return False  # of an optimizer that has nothing to update
    return {
        "rate": not last.broadcasts and not last.rate and not script.schedules,
        "setting": last.begins in ("", "compile"),
        "weights": not last.broadcasts and not last.begins and script.moving != "end",
        "steps": last.broadcasts,
        "epochs": last.broadcasts,
        "first": last.broadcasts,
        "stop": last.epochs > 1 and not last.stops,
        "early": last.averages,
        "delay": (
            last.broadcasts
            and script.method == "exact"
            and last.begins == "fresh"
            and not script.scales
            and script.table != "sharded"  # rows have rules of their own with delay=1, which one rank alone would break
        ),
        "model": len(script.turns) == 1,
        "frozen": last.begins == "fresh" and not last.frozen,
    }[script.mistake]


def known_to_optimizer(turns: tuple[Turn, ...]) -> Iterator[tuple[set[int], Turn]]:
    """Each turn with the layers that are frozen for the optimizer that it uses, since that was made."""
    frozen: set[int] = set(turns[0].frozen)
    for turn in turns:
        if turn.begins in ("fresh", "resume", "reload"):
            frozen = set(turn.frozen)
        yield frozen, turn


def reached(turn: Turn) -> set[int]:
    """The hidden layers that get gradients on any rank."""
    return set().union(*(turn.routes or (HIDDEN,))) - set(turn.frozen)


def reaches_on_all(script: Script, turn: Turn, layer: int) -> bool:
    """Whether a layer is frozen, or gets a gradient in each group of ranks that train together."""
    if layer in turn.frozen or not turn.routes:
        return True
    reached_by = {rank for rank, route in enumerate(turn.routes) if layer in route}
    return all(reached_by & set(group) for group in groups_of(script))


def groups_of(script: Script) -> list[list[int]]:
    """The ranks that train together."""
    members = list(script.members or range(script.ranks))
    return [members, *([rank] for rank in range(script.ranks) if rank not in members)]


# What does not go together, and what says so.
ILLEGAL = {
    "the first turn begins with a model that is made and compiled": lambda s: s.turns[0].begins != "",
    "ranks start from weights of their own": lambda s: not s.turns[0].broadcasts,
    "what only rank 0 has is sent by a fit that broadcasts": lambda s: any(
        turn.begins == "resume" and not (turn.does == "fit" and turn.broadcasts) for turn in s.turns
    ),
    "Keras: a layer is frozen, and thawed, by compile()": lambda s: any(
        before.frozen != after.frozen and after.begins not in ("compile", "fresh")
        for before, after in itertools.pairwise(s.turns)
    ),
    "Keras: an optimizer has the variables with which it was built, and a file those that are trained": lambda s: (
        any(not frozen <= set(turn.frozen) for frozen, turn in known_to_optimizer(s.turns))
        or any(
            after.begins in ("reload", "resume") and set(before.frozen) != frozen
            for (frozen, before), (_, after) in itertools.pairwise(known_to_optimizer(s.turns))
        )
    ),
    "Keras: a moving average is of all variables of the optimizer": lambda s: (
        s.moving != "" and any(set(turn.frozen) != frozen for frozen, turn in known_to_optimizer(s.turns))
    ),
    "the head is trained": lambda s: any(HEAD in turn.frozen for turn in s.turns),
    "only a model of one's own has routes, and in a graph they are those of its trace": lambda s: (
        (s.model != "subclassed" or s.runs != "eager") and any(turn.routes for turn in s.turns)
    ),
    "only fit has epochs": lambda s: any(turn.does != "fit" and follows(turn) for turn in s.turns),
    "Keras: a rate that is a schedule cannot be set": lambda s: s.schedules and any(turn.rate for turn in s.turns),
    "Keras: the rate of a schedule has 32 bits, which Muon does not cast": lambda s: (
        s.optimizer == "muon" and s.schedules
    ),
    "Keras: ScheduleFreeAdamW that is built within a graph begins its momentum anew in each step": lambda s: (
        s.optimizer == "schedule free"
        and s.runs != "eager"
        and (s.step == "two" or any(turn.begins == "fresh" and not turn.broadcasts for turn in s.turns))
    ),
    "what decides by metrics needs those of all ranks (docs/training.md), and exact ones here": lambda s: any(
        (turn.stops or turn.rate == "plateau") and (not turn.averages or is_rounded(s)) for turn in s.turns
    ),
    "a warm-up moves with each batch, not with each execution": lambda s: (
        s.runs == "executions" and any(turn.rate == "warmup" for turn in s.turns)
    ),
    "Keras: weights of samples, or of classes, and a loop has no classes": lambda s: any(
        turn.weights == "class" and (turn.overflow >= 0 or turn.does == "loop") for turn in s.turns
    ),
    "an infinite loss is for a LossScaleOptimizer to find": lambda s: (
        not s.scales and any(turn.overflow >= 0 for turn in s.turns)
    ),
    "LossScaleOptimizer around a distributed one: fit and train_on_batch put it right (errors.md, 'outside')": lambda s: (
        s.scales in ("around", "mixed")
        and any(turn.does == "loop" and (number == 0 or turn.begins) for number, turn in enumerate(s.turns))
    ),
    "float16 rounds too much for what divides by gradients": lambda s: (
        s.scales == "mixed" and (s.optimizer not in ("sgd", "momentum") or s.keras_passes > 1)
    ),
    "16 bits round too much for what divides by gradients": lambda s: (
        s.compression in LOSSY and s.optimizer not in ("sgd", "momentum", "nesterov")
    ),
    "two optimizers: the second is not in files and not scaled, and the first may be built with all variables, to average": lambda s: (
        s.step == "two"
        and (
            s.scales
            or s.moving
            or any(turn.begins in ("reload", "resume") or turn.rate in ("multiplier", "warmup") for turn in s.turns)
        )
    ),
    "Keras: each of two optimizers has a gradient": lambda s: (
        s.step == "two" and any(FIRST in turn.frozen and not reaches_on_all(s, turn, HIDDEN[0]) for turn in s.turns)
    ),
    "clipping behind synchronize() is of gradients that are not scaled": lambda s: (
        s.step == "synchronized" and s.scales
    ),
    "gradient_predivide_factor needs op=Average": lambda s: s.predivide != 1.0 and s.op == "sum",
    "one accumulation": lambda s: s.passes_per_step > 1 and s.keras_passes > 1,
    "load_model() knows no variables to group": lambda s: (
        s.groups == -1 and any(turn.begins in ("reload", "resume") for turn in s.turns)
    ),
    "delay: no groups, no scaling here, no synchronize(), no second accumulation": lambda s: (
        s.method == "late"
        and (s.groups != 0 or s.scales != "" or s.step in ("synchronized", "two") or s.keras_passes > 1)
    ),
    "local steps: plain averages, without further rules for gradients, and one optimizer": lambda s: (
        (
            s.method == "local"
            and (s.op, s.predivide, s.compression, s.groups, s.scales) != ("average", 1.0, "none", 0, "")
        )
        or (s.method in ("local", "partial") and s.step in ("synchronized", "two"))
    ),
    "local steps in graphs: ranks of one process share TensorFlow's threads, of which each blocks one": lambda s: (
        s.method == "local" and s.runs != "eager" and s.ranks > 2
    ),
    "local layers are not in the file of another rank, and load_model() knows none": lambda s: (
        s.method == "partial" and (s.groups == -1 or any(turn.begins in ("reload", "resume") for turn in s.turns))
    ),
    "a norm of all gradients is another one on each rank with local layers (docs/errors.md)": lambda s: (
        s.method == "partial" and s.clips == "global_clipnorm"
    ),
    "rows of a ShardedEmbedding have a rate and a file of their own (docs/embeddings.md)": lambda s: (
        s.table == "sharded"
        and (
            (s.optimizer, s.schedules, s.moving, s.members) != ("sgd", False, "", ())
            or s.method == "local"
            or s.step in ("synchronized", "two")
            or any(turn.rate or turn.stops or turn.begins in ("reload", "resume") for turn in s.turns)
            or s.mistake == "rate"
        )
    ),
    "rows: with delay=1 nothing is clipped or accumulated, and with local layers nothing is scaled (docs/embeddings.md)": lambda s: (
        s.table == "sharded"
        and (
            (s.method == "late" and (s.clips != "" or s.passes_per_step > 1 or s.keras_passes > 1))
            or (s.method == "partial" and s.scales != "")
        )
    ),
    "rows in graphs: ranks of one process share TensorFlow's threads": lambda s: (
        s.table == "sharded" and s.runs != "eager" and s.ranks > 2
    ),
    "a process set: one file for each rank, and no other": lambda s: (
        bool(s.members)
        and (
            s.method != "exact"
            or not set(s.members) < set(range(s.ranks))
            or any(turn.begins in ("reload", "resume") for turn in s.turns)
        )
    ),
    "delay: the last gradients are of the variables of that step, and not in files": lambda s: (
        s.method == "late"
        and any(
            after.begins not in ("", "fresh") and not (before.does == "fit" and before.broadcasts)
            for before, after in itertools.pairwise(s.turns)
        )
    ),
    "delay: the gradients of a step are of the variables of the one before (docs/errors.md, 'with delay=1')": lambda s: (
        s.method == "late"
        and any(
            after.begins != "fresh"
            and not (before.does == "fit" and before.broadcasts)
            and reached(before) != reached(after)
            for before, after in itertools.pairwise(s.turns)
        )
    ),
    "Keras: a file of a model of one's own does not say what is frozen": lambda s: (
        s.model == "subclassed" and any(turn.begins in ("reload", "resume") and turn.frozen for turn in s.turns)
    ),
    "one process that is late has not updated after its first step, and Keras' moving averages are made with the first update": lambda s: (
        s.method == "late" and s.moving != "" and s.turns[0].steps * s.turns[0].epochs == 1
    ),
    "a mistake is told to other ranks": lambda s: s.mistake != "" and s.ranks == 1,
    "what is wrong can be seen": lambda s: s.mistake != "" and not is_seen(s),
}


def is_legal(script: Script) -> bool:
    """Whether a script may be."""
    return not any(forbids(script) for forbids in ILLEGAL.values())


def _drawn(source: random.Random) -> Script:
    script = _drawn_settings(source)
    turns: tuple[Turn, ...] = ()
    for _ in range(source.randint(1, 4)):
        for _ in range(8):
            turn = _drawn_turn(source, script, turns[-1] if turns else None)
            if is_legal(replace(script, turns=(*turns, turn))):
                turns = (*turns, turn)
                break
    script = replace(script, turns=turns or (turn,))
    return _with_mistake(source, script) if source.random() < 0.15 else script


# What the last turn must be for a mistake to be seen in it.
_NEEDED = {
    "rate": {"broadcasts": False, "rate": ""},
    "setting": {"begins": ""},
    "weights": {"broadcasts": False, "begins": ""},
    "steps": {"broadcasts": True},
    "epochs": {"broadcasts": True},
    "first": {"broadcasts": True},
    "stop": {"epochs": 2, "stops": False},
    "early": {"averages": True},
    "delay": {"broadcasts": True, "begins": "fresh"},
    "model": {"broadcasts": True},
    "frozen": {"begins": "fresh", "frozen": ()},
}


def _with_mistake(source: random.Random, script: Script) -> Script:
    """The script with a mistake, if there is one that it allows."""
    for mistake in source.sample([*_NEEDED], len(_NEEDED)):
        before = () if mistake == "model" else script.turns[:-1]
        last = replace(script.turns[-1], does="fit", overflow=-1, **_NEEDED[mistake])
        wrong = replace(script, turns=(*before, last), mistake=mistake)
        if is_legal(wrong):
            return wrong
    return script


def _drawn_settings(source: random.Random) -> Script:
    ranks = source.choice([1, 2, 2, 3])
    passes = source.choice([1, 1, 1, 2, 3])
    method = source.choice(["exact"] * 5 + ["late", "local", "partial"])
    script = Script(
        turns=(),
        ranks=ranks,
        layout=source.choice(LAYOUTS[ranks]),
        model=source.choice(["functional", "sequential", "subclassed"]),
        table=source.choice(["", "", "sparse", "dense"]),
        regularizes=source.random() < 0.2,
        step=source.choice(["", "", "", "own"]),
        runs=source.choice(["eager", "eager", "eager", "graph", "executions"]),
        optimizer=source.choice(OPTIMIZER_NAMES),
        clips=source.choice(["", "", "", "clipnorm", "clipvalue", "global_clipnorm"]),
        schedules=source.random() < 0.2,
        moving=source.choice(["", "", "", "", "often", "end"]),
        passes_per_step=passes,
        averages_passes=passes > 1 and source.random() < 0.5,
        keras_passes=2 if passes == 1 and source.random() < 0.15 else 1,
        method=method,
    )
    if source.random() < 0.1:
        script = replace(script, table="sharded", optimizer="sgd", schedules=False, moving="")
        script = replace(script, runs=source.choice([script.runs, "graph"]))
    if method == "local":
        return script
    script = replace(
        script,
        op=source.choice(["average", "average", "sum"]),
        predivide=source.choice([1.0, 1.0, 1.0, 2.0]),
        compression=source.choice(["none"] * 6 + ["fp16", "bf16"]),
    )
    if method == "late":
        return script
    script = replace(
        script,
        groups=source.choice([0, 0, 0, 1, 2, -1]),
        scales=source.choice(["", "", "", "within", "around", "mixed"]),
    )
    if script.scales == "mixed":
        script = replace(script, optimizer=source.choice(["sgd", "momentum"]), keras_passes=1)
    if method == "partial":
        return script
    return replace(
        script,
        step=source.choice([script.step, script.step, "synchronized", "two"]),
        members=source.choice([(0, 1), (0, 2), (1, 2)]) if ranks == 3 and source.random() < 0.2 else (),
    )


def _drawn_turn(source: random.Random, script: Script, before: Turn | None) -> Turn:
    begins = source.choice(["", "", "compile", "fresh", "reload", "resume"]) if before else ""
    frozen = before.frozen if before else ()
    if before is None or begins in ("compile", "fresh"):
        frozen = tuple(sorted(source.sample(range(HEAD), source.choice([0, 0, 0, 1, 2]))))
        if script.table == "sharded":  # whose gradients have a way of their own
            frozen = tuple(sorted({*frozen, *source.choice([(), (FIRST,)])} - {*source.choice([(), (FIRST,)])}))

    def route() -> tuple[int, ...]:
        return tuple(source.sample(HIDDEN, source.choice([0, 1, 1, 2])))

    does = source.choice(["fit", "fit", "fit", "batches", "loop"])
    turn = Turn(
        does=does,
        begins=begins,
        steps=source.choice([1, 2, 2, 3]),
        frozen=frozen,
        routes=tuple(route() for _ in range(script.ranks)) if source.random() < 0.3 else (),
        weights=source.choice(["", "", "class", "sample"]),
        broadcasts=before is None or source.random() < 0.5,
        overflow=source.randrange(script.ranks) if script.scales and source.random() < 0.3 else -1,
        rate=source.choice(["", "", "assigned"]),
    )
    if does != "fit":
        return turn
    return replace(
        turn,
        epochs=source.choice([1, 1, 2, 3]),
        first=source.choice([0, 0, 0, 1, 2]),
        rate=source.choice(["", "", "assigned", "scheduler", "plateau", "multiplier", "warmup"]),
        validates=source.random() < 0.2,
        stops=source.random() < 0.15,
        averages=source.random() < 0.8,
    )


def _smaller_turn(turn: Turn) -> Iterator[Turn]:
    yield from plainer(turn)
    for fewer in one_fewer(turn.frozen):
        yield replace(turn, frozen=fewer)
    for place, route in enumerate(turn.routes):
        for routes in exchanged(turn.routes, place, [each for each in (HIDDEN, *one_fewer(route)) if each != route]):
            yield replace(turn, routes=routes)
    for number in ("steps", "epochs"):
        if getattr(turn, number) > 2:
            yield replace(turn, **{number: 2})


SCRIPTS = Language(_drawn, _smaller_turn, ILLEGAL)
