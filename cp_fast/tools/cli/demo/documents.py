"""Real documents as bytes: the running Python's own sources and texts, or the user's files."""

from __future__ import annotations

import math
import random
import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["Document", "read_documents"]

_SHORTEST = 50
_SUFFIXES = {".py", ".txt", ".rst", ".md"}
_NOT_HERE = {"__pycache__", "site-packages", "dist-packages", "test", "tests"}


class Document(NamedTuple):
    """The first bytes of a file."""

    name: str
    data: bytes


def read_documents(paths: list[Path], tokens: int, longest: int, seed: int) -> list[Document]:
    """Documents of `tokens` bytes in all, the last one cut to fit; fewer where the files end.

    Args:
        paths: files and folders of the user, taken in order, cut to `longest` bytes. Without any, files of the running
            Python's standard library in random order, each cut to a random length: the logarithms of these are spread
            evenly from 50 bytes to `longest`, so that most are short and a few long ones hold most of the tokens.

    Raises:
        ValueError: there is nothing to read.
    """
    rng, documents, left = random.Random(seed), [], tokens
    least = 1 if paths else min(_SHORTEST, longest)
    files = [file for path in paths for file in _files(path)] if paths else [*_texts_of_python()]
    if not paths:
        rng.shuffle(files)
    for path in files:
        length = longest if paths else round(math.exp(rng.uniform(math.log(least), math.log(longest))))
        with path.open("rb") as file:
            data = file.read(min(length, left))
        if len(data) >= min(least, left) and b"\0" not in data:
            documents.append(Document(path.name, data))
            left -= len(data)
        if not left:
            break
    if not documents:
        where = ", ".join(map(str, paths)) if paths else "the standard library's folder"
        raise ValueError(f"there is no text in {where}; name files or folders with --text")
    return documents


def _files(path: Path) -> list[Path]:
    """A file of the user, or all files in a folder, hidden ones left out."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"--text {path}: there is no such file or folder")
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return [p for p in files if not any(name.startswith(".") for name in p.relative_to(path).parts)]


@cache
def _texts_of_python() -> tuple[Path, ...]:
    """Looked for once: on a network's file system that takes seconds."""
    root = Path(sysconfig.get_path("stdlib"))
    folders = root, *sorted(p for p in root.glob("*/") if p.name not in _NOT_HERE)
    return tuple(p for folder in folders for p in sorted(folder.glob("*")) if p.suffix in _SUFFIXES and p.is_file())
