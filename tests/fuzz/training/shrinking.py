"""What scripts of all frameworks have in common: they are drawn until legal, and made smaller one thing at a time; pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

Script = TypeVar("Script")
Rules = Mapping[str, Callable[[Any], bool]]  # why something may not be, and whether a script does it


@dataclass(frozen=True)
class Language:
    """The scripts of a framework.

    Attributes:
        draw: any script.
        smaller_turns: what a turn may be replaced by that does less.
        rules: why a script may not be, and whether one is so.
    """

    draw: Callable[[random.Random], Any]
    smaller_turns: Callable[[Any], Iterator[Any]]
    rules: Rules

    def why_illegal(self, script: Any) -> str:
        """Why a script may not do what it does; "" if it may."""
        return next((reason for reason, forbids in self.rules.items() if forbids(script)), "")

    def drawn(self, seed: int) -> Any:
        """The first script of a seed that is legal."""
        source = random.Random(seed)
        while self.why_illegal(script := self.draw(source)):
            pass
        return script

    def smaller(self, script: Any) -> Iterator[Any]:
        """Legal scripts that do less than this one, in one thing."""
        return (each for each in self._smaller(script) if not self.why_illegal(each))

    def _smaller(self, script: Any) -> Iterator[Any]:
        turns = script.turns
        for fewer in one_fewer(turns):
            yield replace(script, turns=fewer)
        for place, turn in enumerate(turns):
            for other in exchanged(turns, place, self.smaller_turns(turn)):
                yield replace(script, turns=other)
        yield from plainer(script, without={"turns", "ranks"})


def plainer(thing: Any, without: Iterable[str] = ()) -> Iterator[Any]:
    """The same with one field set to its default."""
    for field in fields(thing):
        if field.name not in without and getattr(thing, field.name) != field.default:
            yield replace(thing, **{field.name: field.default})


def one_fewer(things: tuple) -> Iterator[tuple]:
    """The same without one of them, as long as one is left."""
    for place in range(len(things) if len(things) > 1 else 0):
        yield (*things[:place], *things[place + 1 :])


def exchanged(things: tuple, place: int, others: Iterable[Any]) -> Iterator[tuple]:
    """The same with another one at a place."""
    for other in others:
        yield (*things[:place], other, *things[place + 1 :])


def kind(told: str) -> str:
    """What a failure has in common with those that are likely the same."""
    return told.partition(":")[0]


def shrunk(
    script: Script, verdict: Callable[[Script], str], smaller: Callable[[Script], Iterator[Script]]
) -> tuple[Script, str]:
    """The smallest script found that fails in the same way, and how it does."""
    found = verdict(script)
    while True:
        for each in smaller(script):
            told = verdict(each)
            if told and kind(told) == kind(found):
                script, found = each, told
                break
        else:
            return script, found
