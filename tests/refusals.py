"""What ranks are told of a mistake in an argument: in the same words, but for the rank that made it."""

import re
from collections.abc import Iterable


def said_alike(texts: Iterable[object]) -> bool:
    """Whether refusals are the same where each rank has made the mistake itself."""
    return len({re.sub(r"Found on rank \d+", "", str(each)) for each in texts}) == 1
