"""The directive ``public`` puts names of a module onto a page, with their signatures and docstrings.

    ```{public} ringtrain.torch
    allreduce
    Average: the mean over the ranks
    ```

What another module has under the same name, and shows on its own page, becomes a link there. Constants have no docstring: their
text follows the name. ``gaps`` names what the pages and the docstrings lack, examples among it; the site is not built while there is any.

With the tag "quick" the names alone are shown, and no module is imported.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.ext.autodoc.mock import mock
from sphinx.util import logging

PAGES = Path(__file__).parents[1] / "reference"
# The public modules. A name that several have is shown where it comes first.
MODULES = [
    "ringtrain", "ringtrain.errors", "ringtrain.elastic", "ringtrain.testing",
    "ringtrain.torch", "ringtrain.torch.elastic",
    "ringtrain.tensorflow", "ringtrain.tensorflow.elastic",
    "ringtrain.keras", "ringtrain.keras.callbacks", "ringtrain.keras.elastic", "ringtrain.keras.layers",
    "ringtrain.tensorflow.keras", "ringtrain.tensorflow.keras.callbacks", "ringtrain.tensorflow.keras.elastic",
    "ringtrain.jax", "ringtrain.lightning", "ringtrain.huggingface", "ringtrain.spark",
]  # fmt: skip
_RETURNS = re.compile(r"\breturns?\b|\byields?\b", re.IGNORECASE)
_SAYS_WHAT_IT_IS = re.compile(
    r"^(Whether|The|A|An|What|How|Number|Version|Place|This|True|False|NCCL|Combines|Gathers)\b"
)


@functools.cache
def module_of(name: str) -> Any:
    """A module, with stand-ins for what only the tests of --long install."""
    with mock(["pyspark"]):
        return importlib.import_module(name)


def names_of(module: str) -> list[str]:
    """The public names of a module, but for its public modules, which have pages or parts of pages of their own."""
    found = module_of(module)
    return [name for name in found.__all__ if not inspect.ismodule(getattr(found, name))]


def listed(module: str) -> dict[str, str]:
    """The names of a module that the pages have, with their texts."""
    found: dict[str, str] = {}
    for page in sorted(PAGES.glob("*.md")):
        for block in re.findall(rf"^```{{public}} {re.escape(module)}\n(.*?)^```", page.read_text(), re.M | re.S):
            found |= dict(_rows(block.splitlines()))
    return found


def _rows(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in filter(None, map(str.strip, lines)):
        name, _, text = line.partition(": ")
        yield name, text


@functools.cache
def homes(last: str) -> dict[int, tuple[str, str]]:
    """Where each class and function of the modules up to one is shown: the module and the name, by identity."""
    found: dict[int, tuple[str, str]] = {}
    for its_own in (True, False):  # RingtrainError before HorovodInternalError, which is the same class
        for module in MODULES[: MODULES.index(last) + 1]:
            for name in names_of(module):
                value = getattr(module_of(module), name)
                if not its_own or getattr(value, "__name__", name) == name:
                    found.setdefault(id(value), (module, name))
    return found


def gaps() -> list[str]:
    """What the pages and the docstrings of all public modules lack."""
    return [f"{module}.{gap}" for module in MODULES for gap in gaps_of(module)]


def gaps_of(module: str) -> Iterator[str]:
    """Those of one module, without its name."""
    found, on_pages, public = module_of(module), listed(module), names_of(module)
    for name in sorted(on_pages.keys() - set(public)):
        yield f"{name}: a page of docs/reference has it, but the module has not"
    visible = {name for name in dir(found) if not name.startswith("__")}
    for name in sorted(visible - set(found.__all__)):
        yield f"{name}: dir() shows it, but __all__ has it not"
    for name in public:
        value = getattr(found, name)
        if name not in on_pages:
            yield f"{name}: no page of docs/reference has it"
        elif not callable(value):
            if not on_pages[name] and homes(module)[id(value)][0] == module:
                yield f"{name}: a constant needs a text behind its name"
        elif homes(module)[id(value)] == (module, name):
            yield from (f"{name}: {lack}" for lack in lacks(value, found))
            if not has_example(value):
                yield f"{name}: its docstring has no example"


def lacks(value: Any, module: Any = None) -> list[str]:
    """What the docstring of a class or a function lacks: a sentence, an argument, what is returned.

    Args:
        value: the class or the function.
        module: where the functions are that the docstring refers to: their arguments need not be explained again.
    """
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return [] if _is_sentence(text) else ["its docstring has no sentence"]
    found = [] if _is_sentence(text) else ["its docstring has no sentence"]
    explained = "\n".join([text, *(inspect.getdoc(each) or "" for each in _referred(value, module))])
    signature = _signature(value)
    for name, parameter in signature.parameters.items() if signature else ():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name.startswith("_"):
            continue
        if not re.search(rf"`{name}\b|^ *(\w+, )*{name}(, \w+)*:", explained, re.M):
            found.append(f"its docstring does not explain the argument {name}")
    if (
        isinstance(value, FunctionType)
        and signature
        and _gives_something(signature)
        and not _says_what_returns(explained)
    ):
        found.append("its docstring does not say what it returns")
    return found


def has_example(value: Any) -> bool:
    """Whether the docstring of a class or a function has one, or there is no use for one, as of an error."""
    return ">>>" in (inspect.getdoc(value) or "") or (inspect.isclass(value) and issubclass(value, BaseException))


def _is_sentence(text: str) -> bool:
    return len(text.split()) >= 3 and bool(re.search(r"[.:](\s|$)", text))


def _referred(value: Any, module: Any) -> list[Any]:
    """The functions and classes that a docstring names, and those that theirs name: of the module, or by the whole name."""
    found, waiting = {id(value): value}, [value]
    while waiting:
        for name in re.findall(r"``([\w.]+)`?`?", inspect.getdoc(waiting.pop()) or ""):
            owner, _, last = name.rpartition(".")
            home = module_of(owner) if owner in MODULES else module if not owner else None
            each = getattr(home, last) if last in getattr(home, "__all__", vars(home) if home else ()) else None
            if callable(each) and id(each) not in found:
                found[id(each)] = each
                waiting.append(each)
    return list(found.values())[1:]


def _signature(value: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(value)
    except (TypeError, ValueError):
        return None


def _gives_something(signature: inspect.Signature) -> bool:
    return signature.return_annotation not in (None, "None", signature.empty)


def _says_what_returns(text: str) -> bool:
    return bool(_RETURNS.search(text) or _SAYS_WHAT_IT_IS.match(text))


class Public(Directive):
    """See the head of the file."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        module, lines, elsewhere = self.arguments[0], [], []
        if self.state.document.settings.env.app.tags.has("quick"):
            return [nodes.paragraph(text=", ".join(name for name, _ in _rows(list(self.content))))]
        found = module_of(module)
        for name, text in _rows(list(self.content)):
            value = getattr(found, name)
            home = homes(module).get(id(value), (module, name)) if callable(value) or not text else (module, name)
            if home != (module, name):
                elsewhere.append(f"{{py:obj}}`{name} <{'.'.join(home)}>`")
            else:
                lines += _entry(f"{module}.{name}", value, text)
        lines = ["```{eval-rst}", *lines, "```"] if lines else []
        if elsewhere:
            lines += ["", "Shown elsewhere: " + ", ".join(elsewhere) + "."]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, self.state.document["source"]), self.content_offset, node)
        return node.children


def _entry(path: str, value: Any, text: str) -> list[str]:
    if not callable(value):
        return [f".. py:data:: {path}", "", f"   {text}", ""]
    if not inspect.isclass(value):
        return [f".. autofunction:: {path}", ""]
    kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
    return [f".. {kind}:: {path}", "   :members:", ""]


def check(app: Any, env: Any) -> None:
    """A warning for each gap."""
    for gap in [] if app.tags.has("quick") else gaps():
        logging.getLogger(__name__).warning("%s", gap, type="public")


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("public", Public)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True}
