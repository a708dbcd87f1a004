"""The lines of the launcher's log: text for people, or a JSON object each for programs (`--log-json`). Used by `output`.

A line is a rank's, the engine's, or an event: what the launcher says, of a kind, with facts. docs/launcher-events.md is KINDS
for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Protocol

STREAMS = ("stdout", "stderr")
Fact = str | int | float | bool | Sequence[str] | Sequence[int]


@dataclass(frozen=True)
class Kind:
    """What an event tells, and which facts are with it, all or some; beside `time`, `event` and `text`."""

    meaning: str
    facts: tuple[str, ...] = ()


KINDS = {
    # of each job
    "remark": Kind(
        meaning="Something to know: a flag without effect, a network that is not used, what `--verbose` asks for."
    ),
    "waiting": Kind(meaning="Hosts or slots are not there yet, and are waited for."),
    "rank-started": Kind(meaning="A rank runs.", facts=("rank", "host")),
    "rank-ended": Kind(
        meaning="A rank has ended; `code` is its exit code, -N after signal N, and -9 if its host was lost.",
        facts=("rank", "host", "code", "because"),
    ),
    "rank-failed": Kind(
        meaning="The rank whose failure has ended the job, or one that an elastic job goes on without before it had joined; "
        "`because` is what it heard of another rank.",
        facts=("rank", "host", "code", "because", "last_words"),
    ),
    "rank-left": Kind(meaning="Ranks ended with exit code 0 while others still needed them.", facts=("ranks",)),
    "rank-killed": Kind(
        meaning="A rank that was to end and did not, or is stopped for ever, is ended by force.", facts=("rank", "host")
    ),
    "host-lost": Kind(meaning="The connection to hosts was lost.", facts=("hosts",)),
    "agent-failed": Kind(meaning="The agent on a host has failed.", facts=("host",)),
    "engine-restarted": Kind(
        meaning="mpirun or srun ended before any rank ran, and is started once more.", facts=("engine",)
    ),
    "engine-ended": Kind(
        meaning="mpirun or srun has ended the job, or was killed on a host.", facts=("engine", "code", "host")
    ),
    "output-lost": Kind(meaning="Output of ranks could not be written.", facts=("place", "host", "lines", "bytes")),
    "left-over": Kind(meaning="Processes of the job could not be ended."),
    "stopped": Kind(meaning="A signal to the launcher has ended the job.", facts=("signal",)),
    "not-started": Kind(meaning="The job could not be started."),
    "launcher-failed": Kind(meaning="A fault of the launcher itself."),
    "launcher-ended": Kind(meaning="The last line: the exit code of ringtrainrun.", facts=("code",)),
    # of an elastic one
    "job-named": Kind(meaning="How the job is taken up, should the launcher be lost.", facts=("job", "seconds")),
    "job-resumed": Kind(meaning="This launcher has taken the job up.", facts=("job", "ranks")),
    "world": Kind(meaning="Who has joined, left, or is suspected, and what follows."),
    "slot-started": Kind(
        meaning="A slot gets another rank, so many seconds after the end of its last one.",
        facts=("host", "slot", "seconds"),
    ),
    "host-came": Kind(meaning="Another host has been checked and is used.", facts=("host", "slots")),
    "host-absent": Kind(meaning="A host cannot be used now, and is tried again later.", facts=("host",)),
    "host-unreachable": Kind(meaning="The ranks of others do not hear those of a host.", facts=("host",)),
    "script-failed": Kind(meaning="The host discovery script fails; said once until it works again."),
    "record-lost": Kind(meaning="What another launcher would need cannot be written.", facts=("place",)),
    "job-ended": Kind(meaning="Why the job cannot go on."),
}


class Form(Protocol):
    """How lines look.

    Attributes:
        is_for_people: whether time goes before lines, and progress bars below them.
    """

    is_for_people: bool

    def of_rank(self, rank: int, stream: int, text: bytes) -> bytes:
        """A line that a rank has written to its stdout (1) or stderr (2)."""

    def of_engine(self, stream: int, text: bytes) -> bytes:
        """A line that mpirun or srun has written."""

    def of_event(self, kind: str, text: str, facts: Mapping[str, Fact]) -> list[bytes]:
        """What the launcher says; nothing for people if there is no text."""


class Text:
    """Ranks' lines with their numbers, the launcher's with its name; facts are in the text already, but for last words."""

    is_for_people = True

    def of_rank(self, rank: int, stream: int, text: bytes) -> bytes:
        """As `[3] text`."""
        return b"[%d] " % rank + text

    def of_engine(self, stream: int, text: bytes) -> bytes:
        """As it is."""
        return text

    def of_event(self, kind: str, text: str, facts: Mapping[str, Fact]) -> list[bytes]:
        """As `ringtrainrun: text`, each line of it."""
        lines = [b"ringtrainrun: " + line.encode(errors="backslashreplace") for line in text.splitlines()]
        words = facts.get("last_words")
        last = [f"[{facts['rank']}] {word}" for word in words] if isinstance(words, list) else []
        return lines + [line.encode(errors="surrogateescape") for line in last]


class Json:
    """An object a line."""

    is_for_people = False

    def of_rank(self, rank: int, stream: int, text: bytes) -> bytes:
        """`event` is "output"."""
        return _json("output", text.decode(errors="replace"), rank=rank, stream=STREAMS[stream - 1])

    def of_engine(self, stream: int, text: bytes) -> bytes:
        """As of a rank, but of none."""
        return _json("output", text.decode(errors="replace"), stream=STREAMS[stream - 1])

    def of_event(self, kind: str, text: str, facts: Mapping[str, Fact]) -> list[bytes]:
        """`text` is "" where people are told nothing."""
        return [_json(kind, text, **facts)]


def _json(event: str, text: str, **facts: Fact) -> bytes:
    """What is no UTF-8 becomes U+FFFD: strict readers of JSON take no lone surrogate."""
    time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    members = {"time": time, "event": event, **facts, "text": text}
    return json.dumps({name: _readable(value) for name, value in members.items()}).encode()


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return [_readable(each) for each in value] if isinstance(value, list) else value
