"""mkdocs' hooks: documents outside of docs/ are pages too, and names of documents in the text are links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "DESIGN.md": "DESIGN.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the documents of the root, with links as seen from docs/."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text().replace("](docs/", "](").replace("](README.md", "](index.md")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The title of a document where the text names its file: "docs/gradients.md" -> "[Who sums what](gradients.md)"."""
    fences = re.split(r"(^```.*?^```|^    .*?$|`[^`\n]*`|\]\([^)]*\))", markdown, flags=re.DOTALL | re.MULTILINE)
    for n in range(0, len(fences), 2):  # what is no code and no link
        fences[n] = re.sub(r"(?<![\w/])(?:docs/)?(\w+\.md)\b", _link, fences[n])
    return "".join(fences).replace("](../", "](")


def _link(found: re.Match[str]) -> str:
    page = PAGES.get(found[1], found[1])
    source = ROOT / found[1] if found[1] in PAGES else ROOT / "docs" / found[1]
    if not source.exists():
        return found[0]
    return f"[{source.read_text().splitlines()[0].removeprefix('# ')}]({page})"
