"""Real documents as bytes: the running Python's own sources and texts, or the user's files."""

from __future__ import annotations

import math
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Document", "read_documents"]

_SHORTEST = 50
_SUFFIXES = {".py", ".txt", ".rst", ".md"}
_NOT_HERE = {"__pycache__", "site-packages", "dist-packages", "test", "tests"}


@dataclass(frozen=True, slots=True)
class Document:
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
    rng = random.Random(seed)
    documents, left = [], tokens
    texts = [] if paths else list(_texts_of_python())
    rng.shuffle(texts)
    for path in _files(paths) if paths else texts:
        if left <= 0:
            break
        least = 1 if paths else min(_SHORTEST, longest)
        length = longest if paths else round(math.exp(rng.uniform(math.log(least), math.log(longest))))
        with path.open("rb") as file:
            data = file.read(min(length, left))
        if len(data) >= min(least, left) and b"\0" not in data:
            documents.append(Document(path.name, data))
            left -= len(data)
    if not documents:
        where = ", ".join(map(str, paths)) if paths else "the standard library's folder"
        raise ValueError(f"there is no text in {where}; name files or folders with --text")
    return documents


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    """The user's files, folders opened up."""
    for path in paths:
        if not path.is_dir() and not path.is_file():
            raise ValueError(f"--text {path}: there is no such file or folder")
        inside = sorted(p for p in path.rglob("*") if p.is_file() and not any(n.startswith(".") for n in p.parts))
        yield from inside if path.is_dir() else [path]


@cache
def _texts_of_python() -> tuple[Path, ...]:
    """Looked for once: on a network's file system that takes seconds."""
    root = Path(sysconfig.get_path("stdlib"))
    folders = sorted(p for p in root.glob("*/") if p.name not in _NOT_HERE)
    return tuple(
        p for folder in (root, *folders) for p in sorted(folder.glob("*")) if p.suffix in _SUFFIXES and p.is_file()
    )
