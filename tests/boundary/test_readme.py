"""What the README says of the package, in the order and the length that it should have."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ORDER = ("Install", "Five lines", "Two commands", "Why", "Where you already are", "When a number is wrong")


def test_it_is_short_and_in_order() -> None:
    assert len(README.splitlines()) <= 150
    assert tuple(re.findall(r"^## (.*)$", README, re.MULTILINE))[: len(ORDER)] == ORDER


def test_the_badges_are_true() -> None:
    [torch] = [found[1] for need in PROJECT["dependencies"] if (found := re.fullmatch(r"torch>=([\d.]+)", need))]
    python = PROJECT["requires-python"].removeprefix(">=")
    title = f"Python {python} and later, PyTorch {torch} and later, licence {PROJECT['license']}"
    badges = (ROOT / "docs" / "pictures" / "badges.svg").read_text()
    assert title in badges
    assert re.findall(r">([^<>\n]+)</text>", badges) == [
        word for part in title.split(", ") for word in part.split(" ", 1)
    ]
