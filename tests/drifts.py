"""What the tests of drift in all frameworks have in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringtrain.testing import World


def refused(told: tuple[type[Exception], ...], two: World, body: Callable[[int], object]) -> str:
    """Both ranks raise the same error, one of those of a framework; returns its text."""

    def on_rank(rank: int) -> str:
        with pytest.raises(told) as caught:
            body(rank)
        return str(caught.value)

    texts = two.run(on_rank)
    said = {text[text.index("step '") :].split("\n")[0] for text in texts}
    assert len(said) == 1, texts
    return said.pop()
