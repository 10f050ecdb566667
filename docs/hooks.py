"""Links that leave docs/: on GitHub they lead to files of the repository, which the site does not have.

Figures are taken along; of any other file the site names the path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
FIGURES = (".png", ".svg")

# A figure or a link whose target leads out of the page's folder.
LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def _outside(page: str, target: str) -> str | None:
    """The path in the repository that a page's link leads to; None where that is in docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") else path


def on_files(files: Any, config: Any) -> Any:
    """Take along the figures that pages show from elsewhere in the repository."""
    for file in list(files.documentation_pages()):
        for _, _, target, _ in LINK.findall(Path(file.abs_src_path).read_text(encoding="utf-8")):
            path = _outside(file.src_uri, target)
            if path is not None and path.endswith(FIGURES) and files.get_file_from_path(path) is None:
                files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point figures to where they are in the site, and name the path of everything else."""

    def replaced(found: re.Match[str]) -> str:
        mark, text, target, _ = found.groups()
        path = _outside(page.file.src_uri, target)
        if path is None:
            return found.group()
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri} leads to {path}, which is not in the repository")
        if path.endswith(FIGURES):
            return f"{mark}[{text}]({posixpath.relpath(path, posixpath.dirname(page.file.src_uri) or '.')})"
        return text if text.strip("`") in path else f"{text} (`{path}`)"

    return LINK.sub(replaced, markdown)
