"""The site's table of contents is that of docs/README.md: its bold lines are the captions, its links the pages."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

PAGE = "docs/README"


def toctrees(text: str) -> str:
    """A hidden toctree for each part of a page."""
    parts = re.split(r"^\*\*(.+)\*\*$", text, flags=re.MULTILINE)[1:]
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{''.join(f'/{page}{chr(10)}' for page in pages(links))}```\n"
        for caption, links in zip(parts[::2], parts[1::2], strict=True)
    )


def pages(text: str) -> list[str]:
    """The pages that a text links to, from the root of the repository; the home page has the tables, and is in none."""
    found = (_from_root(target) for target in re.findall(r"\]\(([^)#:]+)\.md\)", text))
    return [page for page in dict.fromkeys(found) if page != "README"]


def _from_root(target: str) -> str:
    parts: list[str] = ["docs"]
    for part in PurePosixPath(target).parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)


def add(app: Any, page: str, source: list[str]) -> None:
    """Puts them onto the home page, behind its text."""
    if page == app.config.root_doc:
        contents = f"\n```{{toctree}}\n:hidden:\n\n/{PAGE}\n```\n"
        source[0] += contents + toctrees((Path(app.srcdir) / f"{PAGE}.md").read_text())


def add_index(app: Any, problem: Exception | None) -> None:
    """The page that a folder's address shows leads to the home page."""
    if problem is None:
        page = f'<!doctype html><title>{app.config.project}</title><meta http-equiv="refresh" content="0; url={app.config.root_doc}.html">'
        (Path(app.outdir) / "index.html").write_text(f"{page}\n")


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", add)
    app.connect("build-finished", add_index)
    return {"parallel_read_safe": True}
