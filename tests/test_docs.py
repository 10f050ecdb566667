"""What the documentation shows is true: its files are read, its schedules simulated, its docstring examples run."""

from __future__ import annotations

import doctest
import importlib
import json
import re
from pathlib import Path

import pytest

import lowtide

DOCS = Path(__file__).parent.parent / "docs"
SOURCE = Path(lowtide.__file__).parent


def test_the_schedule_in_the_formats_page_costs_what_it_says() -> None:
    blocks = re.findall(r"```json\n(.*?)```", (DOCS / "formats.md").read_text(encoding="utf-8"), re.DOTALL)
    chain, schedule = (json.loads(block) for block in blocks)
    trace = lowtide.simulate(chain, schedule)
    assert trace.peak_bytes == schedule["predicted"]["peak_bytes"]
    assert trace.seconds == pytest.approx(schedule["predicted"]["seconds"])


def test_the_guarantees_name_tests_that_exist() -> None:
    """A bare file name is in a folder of tests/runtime; others are paths."""
    page = (DOCS / "guarantees.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] not in ("| promise", "| ---")]
    assert len(rows) > 40
    assert [row[0] for row in rows if not re.search(r"`[^`]*\.py`", row[-1])] == []
    known = {path.name for path in (DOCS.parent / "tests" / "runtime").rglob("test_*.py")}
    named = [name for row in rows for name in re.findall(r"`([^`]*\.py)`", row[-1])]
    missing = [name for name in named if name not in known and not (DOCS.parent / name).is_file()]
    assert missing == []


PAGES = [path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def test_every_page_is_in_the_site() -> None:
    site = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r": ([\w/-]+\.md)$", site, re.MULTILINE)
    assert sorted(listed) == sorted(PAGES)


def anchors(page: Path) -> set[str]:
    """What headings can be linked to, as GitHub and the site spell it."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", [*PAGES, "../README.md", "../CONTRIBUTING.md", "../CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    page = DOCS / name
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in LINK.findall(text):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{name} leads to {target}"
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found), f"{name} leads to {target}#{anchor}"


# Every module with an example in a docstring that is run.
WITH_EXAMPLES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in sorted(SOURCE.rglob("*.py"))
    if re.search(r"^ *>>> (?!.*# doctest: \+SKIP)", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(name, marks=[pytest.mark.torch] if name.startswith(("runtime", "zoo")) else [])
        for name in WITH_EXAMPLES
    ],
)
def test_docstring_examples(module: str) -> None:
    results = doctest.testmod(importlib.import_module(f"lowtide.{module}"))
    assert results.attempted > 0
    assert results.failed == 0
