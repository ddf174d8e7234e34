"""mkdocs' hooks: documents of the root are pages too, and names of documents are links."""

from __future__ import annotations

import posixpath
import re
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "DESIGN.md": "DESIGN.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the documents of the root, with links as seen from docs/."""
    for name, page in PAGES.items():
        text = (
            (ROOT / name)
            .read_text()
            .replace("](docs/", "](")
            .replace("](README.md", "](index.md")
        )
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The titles of documents that the text names: plans.md -> [Plans](how_to/plans.md).

    A picture is a link to its file, which a small screen can enlarge.
    """
    folder = posixpath.dirname(page.file.src_uri)
    fences = re.split(
        r"(^```.*?^```|^    .*?$|`[^`\n]*`|\]\([^)]*\))",
        markdown,
        flags=re.DOTALL | re.MULTILINE,
    )
    for n in range(0, len(fences), 2):  # what is no code and no link
        fences[n] = re.sub(
            r"(?<![\w/])(?:docs/)?((?:\w+/)?\w+\.md)\b", partial(_link, folder), fences[n]
        )
    up = "../" * (len(folder.split("/")) if folder else 0)
    # Documents of the root are pages beside those of docs/.
    text = "".join(fences).replace(f"](../{up}", f"]({up}")
    return re.sub(r"^!\[([^]]*)\]\((\S+)\)$", r"[![\1](\2)](\2)", text, flags=re.MULTILINE)


def _link(folder: str, found: re.Match[str]) -> str:
    """A link to the page that a text in `folder` names, with its folder or without."""
    sources = (
        [ROOT / found[1]]
        if found[1] in PAGES
        else sorted((ROOT / "docs").glob(f"**/{found[1]}"))
    )
    if len(sources) != 1 or not sources[0].exists():
        return found[0]
    name = PAGES.get(found[1]) or sources[0].relative_to(ROOT / "docs").as_posix()
    title = sources[0].read_text().splitlines()[0].removeprefix("# ")
    return f"[{title}]({posixpath.relpath(name, folder or '.')})"
