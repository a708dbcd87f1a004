"""Error feedback: what rounding has lost of a rank's operations. The core keeps it, so that later ones make up for it."""

from typing import Any

from ringtrain._binding._native import CData, counted, ffi, lib, require, take_answer
from ringtrain._runtime.context import Context


def keep(context: Context, process_set: int, prefix: str) -> None:
    """The results of the operations whose names begin so were used: what rounding has lost of them stays lost."""
    if context.usable:
        require(lib.rt_residuals_keep(context.native, process_set, prefix.encode()))


def take_back(context: Context, process_set: int, prefix: str, after: int = -1) -> None:
    """They were not used: the next ones make up for what was lost before them; but for those up to a number."""
    if context.usable:
        require(lib.rt_residuals_take_back(context.native, process_set, prefix.encode(), after))


def turns(context: Context) -> int:
    """The number of the last operation that rounding has lost anything of; it goes on in the next world."""
    return lib.rt_residuals_turns(context.native)


def inherit(context: Context, former: Context) -> None:
    """Goes on with what this rank has lost in the world before, which is closed: the next operations make up for it."""
    require(lib.rt_residuals_inherit(context.native, former.native))


def sizes(context: Context, process_set: int, prefix: str) -> dict[tuple[str, int], int]:
    """What the core keeps rounding errors of: elements by (name, place in the operation)."""
    lines = take_answer(lib.rt_residuals(context.native, process_set, prefix.encode())).split("\n")[:-1]
    rows = [line.split("|", 2) for line in lines]
    return {(name, int(place)): int(elements) for elements, place, name in rows}


def save(context: Context, process_set: int, name: str, place: int, elements: int) -> tuple[bool, CData, CData]:
    """Whether it is what was loaded, whole; and what is kept of a tensor, as float32: of sums sent, of sums finished."""
    sent, finished = ffi.new("float[]", elements), ffi.new("float[]", elements)
    whole = lib.rt_residual_save(context.native, process_set, name.encode(), place, elements, sent, finished)
    return bool(counted(whole)), sent, finished


def load(context: Context, process_set: int, name: str, place: int, sent: Any, finished: Any) -> None:
    """Has the next operation make up for this, from contiguous memory of float32; the same on all ranks."""
    given, done = ffi.from_buffer("float[]", sent), ffi.from_buffer("float[]", finished)
    require(lib.rt_residual_load(context.native, process_set, name.encode(), place, len(given), given, done))
