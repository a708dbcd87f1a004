"""A training script of gradient tapes as data: drawn from a seed, legal, and written so that it can be read again; pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from training.layouts import LAYOUTS
from training.shrinking import Language, exchanged, one_fewer, plainer

LAYERS = 3
LOCAL = LAYERS - 1  # the layer that a script may leave to each rank


@dataclass(frozen=True)
class Turn:
    """What the loop does with one batch.

    Attributes:
        passes: of each tape, the layers that each rank uses, in this order; a rank without any lacks all gradients.
        discards: whether the gradients are thrown away.
        frozen: layers that the tapes are not asked about.
    """

    passes: tuple[tuple[tuple[int, ...], ...], ...]
    discards: bool = False
    frozen: tuple[int, ...] = ()


@dataclass(frozen=True)
class Script:
    """The loop, and how gradients are reduced.

    Attributes:
        turns: one for each batch.
        ranks: how many there are.
        layout: ranks of each host; "" for one host.
        op: "average" or "sum".
        groups: of ``DistributedGradientTape``.
        predivide: gradient_predivide_factor.
        compression: a name of ``Compression``.
        sparse: what becomes of the table's gradient: "" no table, "sparse", or "dense" by sparse_as_dense.
        local: "" or what becomes of the local layer's gradient: "scaled" or "own".
        in_graph: whether each turn is a tf.function.
    """

    turns: tuple[Turn, ...]
    ranks: int = 2
    layout: str = ""
    op: str = "average"
    groups: int | None = None
    predivide: float = 1.0
    compression: str = "none"
    sparse: str = ""
    local: str = ""
    in_graph: bool = False


ILLEGAL = {
    "gradient_predivide_factor needs op=Average": lambda s: s.predivide != 1.0 and s.op == "sum",
    "a tape is asked about something": lambda s: any(len(turn.frozen) == LAYERS for turn in s.turns),
    "a graph's gradients are None on the ranks of its first trace": lambda s: (
        s.in_graph and any(len(set(used)) > 1 for turn in s.turns for used in turn.passes)
    ),
}


def _drawn(source: random.Random) -> Script:
    ranks = source.choice([1, 2, 2, 3])
    return Script(
        turns=tuple(_drawn_turn(source, ranks) for _ in range(source.randint(1, 3))),
        ranks=ranks,
        layout=source.choice(LAYOUTS[ranks]),
        op=source.choice(["average", "average", "sum"]),
        groups=source.choice([None, None, 1, 2]),
        predivide=source.choice([1.0, 1.0, 2.0]),
        compression=source.choice(["none", "none", "fp16"]),
        sparse=source.choice(["", "sparse", "dense"]),
        local=source.choice(["", "", "scaled", "own"]),
        in_graph=source.random() < 0.1,
    )


def _drawn_turn(source: random.Random, ranks: int) -> Turn:
    def layers() -> tuple[int, ...]:
        return tuple(source.sample(range(LAYERS), source.choice([0, 1, 2, 3, 3])))

    def used() -> tuple[tuple[int, ...], ...]:
        same = layers()
        return tuple(layers() if source.random() < 0.3 else same for _ in range(ranks))

    frozen = tuple(sorted(source.sample(range(LAYERS), source.choice([0, 0, 0, 1, 2]))))
    return Turn(tuple(used() for _ in range(source.choice([1, 1, 2]))), source.random() < 0.15, frozen)


def _smaller_turn(turn: Turn) -> Iterator[Turn]:
    for fewer in one_fewer(turn.passes):
        yield replace(turn, passes=fewer)
    yield from plainer(turn, without={"passes"})
    for place, each in enumerate(turn.passes):
        alike = [(used,) * len(each) for used in dict.fromkeys(each) if used and (used,) * len(each) != each]
        for passes in exchanged(turn.passes, place, alike):
            yield replace(turn, passes=passes)


SCRIPTS = Language(_drawn, _smaller_turn, ILLEGAL)
