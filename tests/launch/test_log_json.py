"""--log-json: each line is an object, of a kind that docs/launcher-events.md has, with the facts that it says."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from ringtrain.launch.log_lines import KINDS, Json, Text
from ringtrain.launch.terminal import Terminal

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "ringtrain" / "launch"
SAYS = {"say", "note"}
PARTS = {"facts": {"rank", "host", "code", "because"}}  # of calls that pass on what a rank says of itself


def said() -> dict[str, set[str]]:
    """The kinds that the launcher's sources name, with the facts beside them."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in LAUNCH.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in SAYS:
                kinds = [each.value for each in call.args[call.func.attr == "say" :] if isinstance(each, ast.Constant)]
                named = {keyword.arg for keyword in call.keywords if keyword.arg}
                spread = [keyword.value for keyword in call.keywords if keyword.arg is None]
                for kind in kinds:
                    found[kind] |= named
                    for value in spread:
                        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
                            found[kind] |= PARTS[value.func.attr]
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "functools.partial":
                found |= {each.value.value: set() for each in call.keywords if each.arg == "kind"}
    return found


def test_each_kind_is_said_with_its_facts() -> None:
    found = {"remark": set(), **said()}
    assert found.keys() == KINDS.keys()
    assert {kind: found[kind] for kind in KINDS} == {kind: set(KINDS[kind].facts) for kind in KINDS}


def test_the_page_has_each_kind_with_its_facts() -> None:
    page = (ROOT / "docs" / "launcher-events.md").read_text()
    rows = [re.fullmatch(r"\| `([a-z-]+)` \| (.*) \| (.*) \|", line) for line in page.splitlines()]
    table = {row[1]: (tuple(re.findall(r"`(\w+)`", row[2])), row[3]) for row in rows if row}
    assert table.pop("output")[0] == ("rank", "stream")
    assert table == {name: (kind.facts, kind.meaning) for name, kind in KINDS.items()}


class Screen(io.BytesIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_an_event_is_one_object_whatever_is_in_its_text() -> None:
    screen = Screen()
    terminal = Terminal(screen, screen)
    terminal.take_form(Json(), shows_time=True)
    terminal.say('two\nlines, "quoted", \udcff', "rank-failed", last_words=["\udced\udca0\udc80", "ü", "\ud800"])
    terminal.write_of_rank(3, 2, b"no UTF-8: \xff \x1b[31m")
    terminal.show_progress(b"[0] 10%")
    event, line = map(json.loads, screen.getvalue().decode("ascii").splitlines())
    assert (event["event"], event["text"]) == ("rank-failed", 'two\nlines, "quoted", \ufffd')
    assert event["last_words"] == ["\ufffd" * 3, "ü", "\ufffd"]
    assert (line["event"], line["rank"], line["stream"]) == ("output", 3, "stderr")
    assert line["text"] == "no UTF-8: \ufffd \x1b[31m"
    assert not terminal.live


def test_people_are_told_no_events_without_text_and_last_words_below() -> None:
    assert Text().of_event("rank-started", "", {"rank": 1}) == []
    facts = {"rank": 1, "last_words": ["one", "two \udcff"]}
    assert Text().of_event("rank-failed", "it failed:", facts) == [
        b"ringtrainrun: it failed:",
        b"[1] one",
        b"[1] two \xff",
    ]


PROGRAM = """
import os, sys
print("hello", flush=True)
if os.environ["RINGTRAIN_RANK"] == "1":
    raise SystemExit("the end of 1")
"""


def objects(*arguments: str, code: int) -> tuple[list[dict], list[dict]]:
    """What the launcher writes to stdout and to stderr."""
    command = [sys.executable, "-m", "ringtrain.launch", "--log-json", "--transport", "tcp", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, (done.stdout, done.stderr)
    stdout, stderr = ([json.loads(line) for line in text.splitlines()] for text in (done.stdout, done.stderr))
    assert stderr[-1]["event"] == "launcher-ended" and stderr[-1]["code"] == code
    return stdout, stderr


def test_a_job_that_fails_is_told_as_objects() -> None:
    stdout, stderr = objects("-np", "2", sys.executable, "-c", PROGRAM, code=1)
    assert {line["event"] for line in stdout} == {"output"}
    assert sorted((line["rank"], line["text"]) for line in stdout) == [(0, "hello"), (1, "hello")]
    events = {(line["event"], line.get("rank")) for line in stderr}
    assert {("rank-started", 0), ("rank-started", 1), ("rank-ended", 1), ("rank-failed", 1)} <= events
    failed = next(line for line in stderr if line["event"] == "rank-failed")
    assert failed["code"] == 1 and "failed with exit code 1" in failed["text"]
    assert {"event": "output", "rank": 1, "stream": "stderr", "text": "the end of 1"}.items() <= next(
        line for line in stderr if line["event"] == "output"
    ).items()
    for line in stderr:
        if line["event"] != "output":
            assert line.keys() - {"time", "event", "text"} <= set(KINDS[line["event"]].facts)


def test_a_job_that_cannot_start_is_told_as_an_object() -> None:
    stdout, stderr = objects("-np", "1", "no-such-program-anywhere", code=125)
    assert not stdout and stderr[0]["event"] == "not-started" and "no-such-program-anywhere" in stderr[0]["text"]
