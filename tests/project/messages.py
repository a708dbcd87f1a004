"""What the code can say to a user: every message in the sources, as a template with "…" where a value stands.

``test_errors_page.py`` compares these with docs/errors.md. The rule is the same for Python and C++: a message is a
whole string expression (a literal, an f-string, or pieces joined by +) that

- is an argument of ``raise`` or of a call that logs or says it, or ends as a sentence does or with a space, or says what
  "must" be, is "expected" or what something "needs", and
- has four words at least, and
- does not start with a space, or a value and a full stop or comma: such a piece continues a message that has begun elsewhere.

Docstrings, help texts of commands, comments, whole pages of text and the tables of options and operations are no
messages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOLE = "…"
LEAST_WORDS = 4
SENTENCE_ENDS = (".", " ", ". " + HOLE, "." + HOLE)
CONTINUES = re.compile(f" |{HOLE}[.,] ")
DEMANDS = re.compile(r"\b(must|expected|needs)\b")
SPEAKERS = {"warning", "warn", "say", "refuse", "abort"}  # names of functions that tell the user
MOST_LINES = 3  # of a message; more are a page
HELP_KEYWORDS = {"help", "epilog", "short_help", "metavar", "description", "meaning"}
CPP_TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)\'|::|[-+*/<>=!&|]=|->|<<|>>|\w+|\S',
    re.DOTALL,
)
CPP_SPEAKERS = {
    "InvalidArgument",
    "Mismatch",
    "Unsupported",
    "Timeout",
    "PeerLost",
    "Closed",
    "Internal",
    "Refuse",
    "Warning",
}
CPP_OPENS, CPP_CLOSES = {"(", "[", "{"}, {")", "]", "}"}
CPP_ENDS_CHAIN = {",", ";", "=", "+=", "return", "?", ":", "<<"}


@dataclass(frozen=True)
class Message:
    """One message and where it stands."""

    template: str
    place: str  # file:line


def of_project() -> list[Message]:
    """All messages of the package and of the native code; the benchmarks speak for themselves."""
    found = []
    for path in sorted((ROOT / "ringtrain").rglob("*.py")):
        if "bench" not in path.relative_to(ROOT).parts:
            found += of_python(path.read_text(), str(path.relative_to(ROOT)))
    for path in sorted([*(ROOT / "native").rglob("*.cc"), *(ROOT / "native").rglob("*.h")]):
        if "tables" in path.relative_to(ROOT).parts:
            continue
        found += of_cpp(path.read_text(), str(path.relative_to(ROOT)))
    attributes = ROOT / "native" / "tables" / "attributes.def"  # has advice for those who use them
    return found + of_cpp(attributes.read_text(), str(attributes.relative_to(ROOT)))


def is_message(template: str, is_said: bool = False) -> bool:
    """Whether a string expression is a message by the rule above."""
    words = re.findall(r"[A-Za-z][\w'-]+", template.replace(HOLE, " "))
    return (
        len(words) >= LEAST_WORDS
        and CONTINUES.match(template) is None
        and (is_said or template.endswith(SENTENCE_ENDS) or DEMANDS.search(template) is not None)
    )


def tidy(template: str) -> str:
    """One line, with one hole where several values follow each other."""
    return re.sub(f"{HOLE}+", HOLE, re.sub(r"\s*\n\s*", " ", template))


# ---- Python ----


def of_python(source: str, name: str) -> list[Message]:
    """The messages of a Python module."""
    tree = ast.parse(source)
    silent = set(_docstrings(tree)) | set(_help_texts(tree))
    said = set(_said(tree))
    found = []
    for node in _whole_strings(tree, silent):
        template = _template_of(node)
        if template.count("\n") >= MOST_LINES:
            continue
        template = tidy(template)
        if is_message(template, id(node) in said):
            found.append(Message(template, f"{name}:{node.lineno}"))
    return found


def _docstrings(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node.value)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("__doc__"):
            yield id(node.value)


def _said(tree: ast.AST) -> Iterator[int]:
    """Arguments of what is raised, logged or printed for the user."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from map(id, ast.walk(node.exc))
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in SPEAKERS:
                yield from (id(part) for argument in node.args for part in ast.walk(argument))


def _help_texts(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in HELP_KEYWORDS:
                    yield id(keyword.value)


def _whole_strings(tree: ast.AST, silent: set[int]) -> Iterator[ast.expr]:
    """String expressions that are no part of another one."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if id(node) in silent:
            continue
        if _is_text(node):
            yield node
            waiting += list(_values_within(node))
        else:
            waiting += list(ast.iter_child_nodes(node))


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and (_is_text(node.left) or _is_text(node.right))
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _values_within(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in the holes of a text."""
    if isinstance(node, ast.JoinedStr):
        yield from (value.value for value in node.values if isinstance(value, ast.FormattedValue))
    elif isinstance(node, ast.BinOp):
        for side in (node.left, node.right):
            yield from _values_within(side) if _is_text(side) else [side]


def _template_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdr]", HOLE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template_of(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return _template_of(node.left) + _template_of(node.right)
    return HOLE


# ---- C++ ----


def of_cpp(source: str, name: str) -> list[Message]:
    """The messages of a C++ file. What stands in parentheses within a text is a hole of it, and is looked at by itself."""
    tokens, line, counted_to = [], 1, 0
    for match in CPP_TOKEN.finditer(_without_directives(source)):
        line += match.string.count("\n", counted_to, match.start())
        counted_to = match.start()
        if not match.group().startswith(("//", "/*")):
            tokens.append((match.group(), line))
    chains = [(tidy(template), line, is_said) for template, line, is_said in _chains(tokens)]
    return [Message(template, f"{name}:{line}") for template, line, is_said in chains if is_message(template, is_said)]


def _without_directives(source: str) -> str:
    return re.sub(r"^#[^\n]*(\\\n[^\n]*)*", lambda match: "\n" * match.group().count("\n"), source, flags=re.MULTILINE)


def _chains(tokens: list[tuple[str, int]]) -> Iterator[tuple[str, int, bool]]:
    """Templates of all chains `"text" + value + "text"`, the line of their first text, and whether a speaker gets them."""
    chains: list[list[tuple[str, int]]] = [[]]  # the innermost, unfinished ones of what is around it before
    callers = [""]  # whose parentheses these are
    before = ""
    for token, line in tokens:
        if token in CPP_OPENS:
            chains[-1].append((HOLE, line))
            chains.append([])
            callers.append(before)
        elif token in CPP_CLOSES:
            yield from _finish(chains.pop(), callers.pop())
        elif token in CPP_ENDS_CHAIN:
            yield from _finish(chains[-1], callers[-1])
            chains[-1] = []
        elif token.startswith('"'):
            chains[-1].append((token[1:-1].replace('\\"', '"').replace("\\n", "\n"), line))
        elif token != "+":
            chains[-1].append((HOLE, line))
        before = token


def _finish(chain: list[tuple[str, int]], caller: str) -> Iterator[tuple[str, int, bool]]:
    texts = [line for text, line in chain if text != HOLE]
    if texts:
        yield "".join(text for text, _ in chain), texts[0], caller in CPP_SPEAKERS
