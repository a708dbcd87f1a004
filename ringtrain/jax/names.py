"""Names of operations in programs that JAX traces: alike on all ranks that trace alike, and never twice in one program.

A name is fixed when a program is traced, and comes again whenever that runs. It is made of the function that is being
traced, the outermost one if functions call each other, and of the place among those that would be called alike, in the
order of the calls. A function that is traced again starts anew, so a rank may do that alone. What the user names keeps
that name. Outside of programs operations have no such names: the core numbers them.

JAX may put what was traced once into a program several times: tangents of one linearization, say. So a name that comes again
when the program is compiled gets a number, the user's too.
"""

import weakref
from collections import Counter

from jax._src import core as _core  # where the current trace is; JAX has no public name for it
from jax._src.interpreters.batching import BatchTrace

# Names that were given out, for the outermost trace of each program; it ends with its trace.
_claimed: "weakref.WeakKeyDictionary[_core.Trace, Counter[str]]" = weakref.WeakKeyDictionary()


def claim(label: str) -> str | None:
    """A name for an operation of the program that is being traced; None where none is."""
    traced = program()
    if traced is None:
        return None
    name = f"{traced.frame.debug_info.func_name}/{label}"
    claimed = _claimed.setdefault(traced, Counter())
    claimed[name] += 1
    return f"{name}.{claimed[name]}" if claimed[name] > 1 else name


def claim_in_program(kept: list[object], name: str) -> str:
    """The name, with a number if the program that is being compiled has an operation of this name already.

    Args:
        kept: the list of what JAX keeps alive for that program.
        name: from when it was traced.
    """
    claimed = next((each for each in kept if isinstance(each, _Claimed)), None)
    if claimed is None:
        kept.append(claimed := _Claimed())
    number, unused = 1, name
    while unused in claimed:
        number += 1
        unused = f"{name}.{number}"
    claimed.add(unused)
    return unused


class _Claimed(set[str]):
    """The names of the operations of one compiled program."""


def tracing() -> bool:
    """Whether a program is being traced, so that operations become part of it, whatever their arguments."""
    return program() is not None


def batching() -> bool:
    """Whether a function under ``jax.vmap`` is being traced, whose values stand for many."""
    trace = _core.trace_ctx.trace
    while trace is not None:
        if isinstance(trace, BatchTrace):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def program() -> _core.Trace | None:
    """The outermost trace that makes a program; bodies of loops, and functions under ``grad``, have traces within it."""
    trace, outermost = _core.trace_ctx.trace, None
    while trace is not None:
        outermost = trace if hasattr(trace, "frame") else outermost
        trace = getattr(trace, "parent_trace", None)
    return outermost
