"""Traces of several ranks as one: each rank writes a file of its own, with its rank as process id and one clock for all.

The ranks of a host, or of hosts with a shared folder, leave FILE (rank 0's), FILE.1, FILE.2, ... side by side. Without
a shared folder copy them to one first; nothing in them depends on where they lie.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PROCESS = re.compile(r'"pid":\s*(\d+)')


def merge(files: Iterable[str | os.PathLike], output: str | os.PathLike) -> list[Path]:
    """Writes one trace with the events of all files, and returns those that it read, in the order of their ranks.

    Args:
        files: traces; with each come its companions, which have a rank's number behind its name.
        output: the file to write. It is replaced at once, as a whole, and may be one of ``files``. A trace that was
            merged before gives only the events of ranks that have no file of their own, so that none comes twice.

    Raises:
        OSError: a file cannot be read, or the output not be written.
        ValueError: a file is no trace of ours.
    """
    sources = list(dict.fromkeys(source for file in files for source in with_companions(Path(file))))
    output = Path(output)
    growing = output.with_name(f"{output.name}.growing")
    had_elsewhere = _ranks_had_elsewhere({source: {_rank(event) for event in _events(source)} for source in sources})
    try:
        with open(growing, "w", encoding="utf-8") as merged:
            separator = "[\n"
            for source in sources:
                for event in _events(source):
                    if _rank(event) in had_elsewhere[source]:
                        continue
                    merged.write(separator + event)
                    separator = ",\n"
            merged.write("[\n]\n" if separator == "[\n" else "\n]\n")
        os.replace(growing, output)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(growing)
        raise OSError(error.errno, error.strerror, str(output)) from None  # the user has not named the other one
    return sources


def _ranks_had_elsewhere(ranks: Mapping[Path, set[str]]) -> dict[Path, set[str]]:
    """For each file the ranks that another one has: for merged traces only, those of several ranks; pure."""
    had = set().union(*(own for own in ranks.values() if len(own) == 1))
    skipped: dict[Path, set[str]] = {}
    for file, own in ranks.items():
        skipped[file] = own & had if len(own) > 1 else set()
        had |= own
    return skipped


def _rank(event: str) -> str:
    """The rank that an event belongs to; "" if it says none."""
    match = PROCESS.search(event)
    return match[1] if match else ""


def with_companions(file: Path) -> Iterator[Path]:
    """A trace, and those beside it that have a rank's number behind its name, in the order of their ranks."""
    yield file
    number = re.compile(re.escape(file.name) + r"\.(\d+)")
    found = ((number.fullmatch(name), name) for name in os.listdir(file.parent))
    for _, name in sorted((int(match[1]), name) for match, name in found if match):
        yield file.with_name(name)


def _events(file: Path) -> Iterator[str]:
    """The events as JSON text; in our files each has a line of its own."""
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            text = line.strip().rstrip(",").rstrip()  # a comma may stand at the next page
            if text in ("", "[", "]"):
                continue
            if not text.startswith("{") or not text.endswith("}"):
                raise ValueError(
                    f"{file}: expected one event in line {number}, but found {text[:80]!r}. Is it a trace of ringtrain?"
                )
            yield text
