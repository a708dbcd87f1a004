"""Worlds for tests: ranks as threads of this process, or, under the launcher, the ranks that it started.

The same test files serve both. Under a launcher every rank runs every test in the same order, each with a world of its
own.
"""

import pytest

import ringtrain as rt
from ringtrain import testing
from ringtrain._binding import options
from ringtrain._rendezvous import launcher
from ringtrain._runtime import context

_INTRODUCED = launcher.find_introduced(options.environment())
_STARTED_BY = _INTRODUCED or launcher.find(options.environment())
LAUNCHED = _INTRODUCED is not None or (_STARTED_BY is not None and _STARTED_BY.announces_several)
LAUNCHED_RANK = (_STARTED_BY.rank or 0) if LAUNCHED else 0

# size, layout (None: one host), algorithm
_CONFIGURATIONS = [
    (1, None, "auto"), (1, None, "ring"),
    (2, None, "auto"), (2, None, "shared_memory"), (2, None, "ring"), (2, "1+1", "auto"),
    (3, None, "auto"), (3, None, "ring"), (3, "2+1", "auto"), (3, "1+1+1", "auto"), (3, "1+2", "hierarchical"),
    (4, None, "auto"), (4, None, "ring"), (4, "2+2", "auto"), (4, "3+1", "hierarchical"), (4, "1+1+1+1", "auto"),
    (4, "1+1|1+1", "auto"),
    (7, None, "auto"), (7, None, "ring"), (7, "4+3", "auto"), (7, "2+2+2+1", "hierarchical"),
]  # fmt: skip


class LaunchedWorld:
    """The ranks that the launcher started, with the interface of ``ringtrain.testing.World``.

    A test that asks for another number of them is left out.
    """

    def __init__(self, size: int, layout: str | None = None, **chosen: object):
        if size not in sizes():
            pytest.skip(f"needs {size} ranks, and the launcher has started {sizes()[0]}")
        rt.init(host_layout=layout, **chosen)
        self.size = size

    def run(self, function, *arguments) -> list:
        """Calls the function on this rank; the list has its result alone."""
        try:
            return [function(rt.rank(), *arguments)]
        except BaseException as problem:
            if rt.is_initialized():
                context.current().abort(f"rank {rt.rank()} raised {type(problem).__name__}: {problem}")
            raise

    def close(self) -> None:
        rt.shutdown()

    def __enter__(self) -> "LaunchedWorld":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


World = LaunchedWorld if LAUNCHED else testing.World


def sizes(least: int = 1) -> list[int]:
    """The sizes of worlds to test, from ``least`` on: the launcher's alone under a launcher, which may be none."""
    return [size for size in ([_STARTED_BY.size] if LAUNCHED else [1, 2, 3, 4, 7]) if size >= least]


def configurations(least: int = 1) -> list[tuple[int, str | None, str]]:
    """Sizes with layouts and algorithms."""
    return [each for each in _CONFIGURATIONS if each[0] in sizes(least)]
