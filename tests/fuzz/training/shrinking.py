"""What scripts of all frameworks have in common: they are drawn until legal, and made smaller one thing at a time; pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

Script = TypeVar("Script")
Rules = Mapping[str, Callable[[Any], bool]]  # why something may not be, and whether a script does it


def first_broken(script: Any, rules: Rules) -> str:
    """Why a script may not do what it does; "" if it may."""
    return next((reason for reason, forbids in rules.items() if forbids(script)), "")


def first_legal(seed: int, draw: Callable[[random.Random], Script], rules: Rules) -> Script:
    """The first script of a seed that breaks no rule."""
    source = random.Random(seed)
    while first_broken(script := draw(source), rules):
        pass
    return script


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
