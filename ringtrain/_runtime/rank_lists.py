"""How ranks are named in texts, and how such a text is read. The launcher has this without NumPy."""

from collections.abc import Iterable


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 5``."""
    ascending = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ascending:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ascending) == 1 else "ranks ") + ", ".join(texts)


def ranks_of(text: str) -> list[int]:
    """The ranks in what ``ranks_text`` has made."""
    runs = [each.split("-") for each in text.split(" ", 1)[1].split(", ")]
    return [rank for run in runs for rank in range(int(run[0]), int(run[-1]) + 1)]
