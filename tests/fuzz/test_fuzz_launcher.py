"""What the launcher and its agents read of others, with hypothesis: host lists, configuration files, and what they tell each other.

Any text is read or refused with an error of ours; any cut of a stream into pieces gives the same messages. `bin/test`
draws the same examples in every run, `bin/test --long` 100 times as many, which are drawn anew (--hypothesis-seed
repeats them).
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtrain.launch.agent import link as host_side
from ringtrain.launch.hosts import HostsError, parse_hostfile, parse_hosts, parse_slurm
from ringtrain.launch.reach import Agent
from ringtrain.launch.settings import SETTINGS, ConfigError, read_config

EXAMPLES, MANY = 200, 20000
LONG = pytest.mark.parametrize(
    "examples", [EXAMPLES, pytest.param(MANY, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)


def pieces(*words: str) -> st.SearchStrategy[str]:
    """Texts of such words and of anything else, one behind another."""
    return st.lists(
        st.one_of(st.sampled_from(words), st.integers(0, 10**20).map(str), st.text(max_size=3)), max_size=12
    ).map("".join)


HOST_WORDS = pieces(
    "node-a", "10.0.0.1", "localhost", ":", "4", ",", " slots=", "\n", "#", "[::1]", "::1", "@", ":" + "9" * 4400, "٣"
)
SLURM_WORDS = pieces("2", "(x", ")", ",", "3(x2)", "999999999999", "9" * 4400, "٣")
CONFIG_WORDS = pieces(
    *(name for setting in SETTINGS for name in setting.place),
    "controller",
    ":",
    "\n",
    "  ",
    "- ",
    "{",
    "}",
    "[" * 2000,
    "true",
    "1.5",
    "2001-99-99",
    "0b_",
    "&a ",
    "*a",
    "!!python/object:os.system ",
    "'",
    '"',
)
READERS: dict[str, tuple[st.SearchStrategy[str], Callable[[str], object], type[Exception]]] = {
    "-H": (HOST_WORDS, parse_hosts, HostsError),
    "host file": (HOST_WORDS, lambda text: parse_hostfile(text, "hosts"), HostsError),
    "Slurm's counts": (SLURM_WORDS, lambda text: parse_slurm(["a", "b"], text), HostsError),
    "configuration": (CONFIG_WORDS, lambda text: read_config(text, "config.yaml"), ConfigError),
}
# What once ended in an error of Python's, or in all memory taken.
FOUND = [
    ("-H", "a:" + "9" * 4400),
    ("Slurm's counts", "2(x999999999999)"),
    ("configuration", "2001-99-99"),
    ("configuration", "[" * 2000),
]
FACTS = st.dictionaries(
    st.text(max_size=8), st.one_of(st.integers(), st.text(), st.none(), st.lists(st.integers())), max_size=4
)
MESSAGES = st.lists(st.tuples(FACTS, st.one_of(st.none(), st.binary(max_size=40))), max_size=6)
CUTS = st.lists(st.integers(0, 400), max_size=12)


def many(examples: int, **strategies: st.SearchStrategy) -> Callable:
    """`given`, with so many examples; more than the usual number are drawn anew in each run."""
    return lambda test: settings(max_examples=examples, derandomize=examples == EXAMPLES)(given(**strategies)(test))


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    """The stream in pieces, none of them empty."""
    ends = sorted({place for place in places if 0 < place < len(stream)} | {len(stream)})
    return [stream[begin:end] for begin, end in zip([0, *ends], ends, strict=False) if end > begin]


@LONG
@pytest.mark.parametrize("what", READERS)
def test_any_text_is_read_or_refused(what: str, examples: int) -> None:
    words, read, refusal = READERS[what]

    @many(examples, text=words)
    def check(text: str) -> None:
        try:
            read(text)
        except refusal as error:
            assert str(error).strip()

    check()


@pytest.mark.parametrize("what, text", FOUND, ids=range(len(FOUND)))
def test_what_was_found_is_refused(what: str, text: str) -> None:
    _, read, refusal = READERS[what]
    with pytest.raises(refusal):
        read(text)


@LONG
def test_the_launcher_hears_the_same_however_it_arrives(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts and bytes behind them, after whatever a login shell has printed."""
    sent: list[bytes] = []
    monkeypatch.setattr(host_side.os, "write", lambda _, data: sent.append(bytes(data)) or len(data))

    @many(examples, greeting=st.text(max_size=20), messages=MESSAGES, places=CUTS)
    def check(greeting: str, messages: list[tuple[dict, bytes | None]], places: list[int]) -> None:
        sent.clear()
        mouth = host_side.LauncherEnd()
        for facts, data in messages:
            mouth.tell(facts, data)
        ear = object.__new__(Agent)
        ear._pending, ear._has_started, ear.fault = bytearray(), False, ""
        heard = []
        for piece in cut(greeting.encode() + b"".join(sent), places):
            ear._read = lambda piece=piece: ear._pending.extend(piece)
            heard += [(facts, data) for facts, data in ear.news()]
        assert heard == [
            (dict(facts, bytes=len(data)) if data is not None else facts, data or b"")
            for facts, data in messages
            if facts or data is not None  # nothing is said by an agent that begins
        ]

    check()


@LONG
def test_an_agent_hears_the_same_however_it_arrives(examples: int) -> None:
    @many(examples, requests=st.lists(FACTS, max_size=6), places=CUTS)
    def check(requests: list[dict], places: list[int]) -> None:
        ear = object.__new__(host_side.LauncherEnd)
        ear.pending = bytearray()
        heard = []
        for piece in cut(b"".join(json.dumps(facts).encode() + b"\n" for facts in requests), places):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(host_side.os, "read", lambda *_, piece=piece: piece)
                heard += ear.requests()
        assert heard == requests

    check()
