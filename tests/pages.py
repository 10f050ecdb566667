"""The programs and commands in README.md and the pages under docs/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """The blocks of a page that are run, with the numbers of their lines."""
    text = "\n" + page.read_text(encoding="utf-8")  # so that a block on the first line has a line before it
    for found in re.finditer(r"^([^\n]*)\n```(console|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        before, kind, body = found.groups()
        if kind == language and not before.startswith("<!-- not run"):
            yield text[: found.start(3)].count("\n"), body
