"""Messages, first lines of docstrings and documentation use the words of the glossary in docs/concepts.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What not to write, and what to write instead.
INSTEAD = {
    r"\blet(s|ting)? (go|it go|them go)\b": "free",
    r"\b(run|runs|ran|running) again\b": "recompute",
    r"\b(run|runs|ran|running) (it|them|the stages?|a stage) again\b": "recompute",
    r"\bpictures?\b": "images, or figure for a chart",
    r"\bmid-training\b|\bin the midst of\b": "during training",
    r"\b(is|are) no (model|module|list|number)\b": "is not a",
    r"\b(is|are) other than\b": "differ, or have changed since",
    r"\bfit (it |this model )?again\b(?<!call fit again)": "call fit again",
    r"\ba defect of lowtide\b": "a bug in lowtide",
}
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(ROOT.glob("docs/**/*.md"))
MODULES = sorted((ROOT / "src").rglob("*.py"))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a page; the messages and first docstring lines of a module."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from enumerate(source.splitlines(), start=1)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise | ast.Call) and (isinstance(node, ast.Raise) or _warns(node)):
            parts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield getattr(node, "lineno", 1), (ast.get_docstring(node) or "").partition("\n")[0]


def _warns(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr == "warn"


def complaints(path: Path) -> list[str]:
    return [
        f"{path.name}:{line}: {found[0]!r}, write {instead!r}: {text.strip()[:100]}"
        for line, text in texts(path)
        for pattern, instead in INSTEAD.items()
        if (found := re.search(pattern, text, re.IGNORECASE))
    ]


@pytest.mark.parametrize("path", [*PAGES, *MODULES], ids=lambda path: str(path.relative_to(ROOT)))
def test_the_glossary_is_kept(path: Path) -> None:
    assert complaints(path) == []


def test_wrong_words_are_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Fine."""\nraise ValueError(f"stage {1} is let " "go; fit again")\nx = "let go"\n')
    assert [line.partition(", ")[0] for line in complaints(module)] == [
        "module.py:2: 'let go'",
        "module.py:2: 'fit again'",
    ]
    module.write_text('"""Fine."""\nraise ValueError("call fit again")\n')
    assert complaints(module) == []
