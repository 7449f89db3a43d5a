"""Hooks of mkdocs.yml: the root's own pages join the site, and links to files that are none become plain text."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports] (the extra docs)

ROOT = Path(__file__).resolve().parents[1]
OF_THE_ROOT = {"README.md": "index.md", **{name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#:]*)(#[^)\s]*)?\)")
PICTURE = re.compile(r"!\[([^\]]*)\]\(docs/")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages of the root."""
    for name, place in OF_THE_ROOT.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Write links as the site has them."""
    folder = "" if page.file.src_uri in OF_THE_ROOT.values() else "docs"

    def written(link: re.Match[str]) -> str:
        label, path, anchor = link[1], link[2], link[3] or ""
        if not path:
            return link[0]
        place = normpath(PurePosixPath(folder) / path)
        place = OF_THE_ROOT.get(place, place.removeprefix("docs/"))
        return f"[{label}]({place}{anchor})" if files.get_file_from_path(place) else label

    return LINK.sub(written, PICTURE.sub(r"![\1](", _lists_apart(markdown)))


def _lists_apart(markdown: str) -> str:
    """An empty line before every list, which the site's Markdown needs where GitHub's does not."""
    lines: list[str] = []
    in_code = False
    for line in markdown.splitlines():
        in_code ^= line.startswith("```")
        begins = not in_code and re.match(r"(- |\d+\. )", line)
        if begins and lines and lines[-1].strip() and not re.match(r"(- |\d+\. |\s)", lines[-1]):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)
